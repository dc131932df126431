"""Final values against one setting, the others held equal."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from palsgd.lab.groups import Group, differing, label, settings_of, shown, sortable
from palsgd.lab.judging.interval import of_mean
from palsgd.lab.report.curves import Curve
from palsgd.lab.run_folder import Run


@dataclass(frozen=True)
class Ablation:
    """How the final values of otherwise equal runs depend on a setting."""

    field: str
    bundles: list[Group]  # one line each; settings without the field
    beside: list[Group]  # methods on which the field has no effect
    values: list[Any]
    moved: list[str]  # settings that change together with the field

    @property
    def ticks(self) -> list[str] | None:
        """The values as words, unless they are quantities."""
        numbers = all(isinstance(v, int | float) and not isinstance(v, bool) for v in self.values)
        return None if numbers else [shown(v) for v in self.values]

    def curve(self, bundle: Group, key: str) -> Curve | None:
        """The mean over the runs at each value, with its interval. A value at which a seed has no
        finite end has no point."""
        every: dict[str, list[float | None]] = {}
        for run in bundle.runs:
            every.setdefault(repr(run.config.get(self.field)), []).append(final(run, key))
        found = {at: finite for at, own in every.items() if (finite := all_there(own))}
        values = [value for value in self.values if repr(value) in found]
        if not values:
            return None
        x = [self.values.index(v) if self.ticks else float(v) for v in values]
        means = [of_mean(found[repr(v)]) for v in values]
        ends = [(m.low, m.high) if m.known else (m.value, m.value) for m in means]
        mean, (low, high) = np.array([m.value for m in means]), np.array(ends).T
        n = min(m.n for m in means)
        return Curve({"value": np.array(x, dtype=float)}, mean, low, high, n)


def all_there(values: Iterable[float | None]) -> list[float]:
    """The values of all seeds, or none of them: the mean without a seed that diverged flatters."""
    found = list(values)
    there = [value for value in found if value is not None]
    return there if len(there) == len(found) else []


def final(run: Run, key: str) -> float | None:
    value = (run.summary or {}).get(f"final_{key}")
    return float(value) if value is not None and np.isfinite(value) else None


def ablations(groups: list[Group], *, without: Sequence[str] = ()) -> list[Ablation]:
    """One for each setting that varies within a method, unless another figure shows it."""
    methods = dict.fromkeys(group.method for group in groups)
    kin = [[group for group in groups if group.method == method] for method in methods]
    fields = dict.fromkeys(field for each in kin for field in differing(each))
    found = [_ablation(groups, field) for field in fields if field not in without]
    return [ablation for ablation in found if ablation.bundles]


def _ablation(groups: list[Group], field: str) -> Ablation:
    runs = [run for group in groups for run in group.finished]
    concerned = [run for run in runs if field in settings_of(run)]
    along = moved(concerned, field)
    kin = bundles(concerned, lambda key: key == field or key in along)
    kin = [bundle for bundle in kin if len(_values(bundle.runs, field)) > 1]
    values = _values([run for bundle in kin for run in bundle.runs], field)
    beside = [group for group in groups if field not in group.settings and group.finished]
    return Ablation(field, kin, beside, sorted(values, key=sortable), along)


def bundles(runs: list[Run], left_out: Callable[[str], bool]) -> list[Group]:
    """Runs that are equal in all settings but those that are left out."""
    found: dict[tuple[str, str], Group] = {}
    for run in runs:
        rest = {key: value for key, value in settings_of(run).items() if not left_out(key)}
        key = run.method, repr(sorted(rest.items()))
        found.setdefault(key, Group(run.method, rest)).runs.append(run)
    for bundle in found.values():
        kin = [other for other in found.values() if other.method == bundle.method]
        varied = {key: bundle.settings.get(key) for key in differing(kin)}
        bundle.label = label(bundle.method, varied)
    return list(found.values())


def moved(runs: list[Run], field: str) -> list[str]:
    """Settings that the field's value determines, such as steps if epochs are fixed and K
    varies."""
    keys = dict.fromkeys(key for run in runs for key in settings_of(run) if key != field)
    return [key for key in keys if _varies(runs, key) and _decided(runs, field, key)]


def _varies(runs: list[Run], key: str) -> bool:
    by_method: dict[str, set[str]] = {}
    for run in runs:
        by_method.setdefault(run.method, set()).add(repr(run.config.get(key)))
    return any(len(values) > 1 for values in by_method.values())


def _decided(runs: list[Run], field: str, key: str) -> bool:
    seen: dict[tuple[str, str], str] = {}
    for run in runs:
        at, value = (run.method, repr(run.config.get(field))), repr(run.config.get(key))
        if seen.setdefault(at, value) != value:
            return False
    return True


def _values(runs: list[Run], field: str) -> list[Any]:
    found = {repr(run.config.get(field)): run.config.get(field) for run in runs}
    return list(found.values())  # a file may hold what cannot be a key

"""Final values against one setting, the others held equal."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from palsgd.lab.groups import Group, differing, label, settings_of, shown, sortable
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
        return None if numbers and self.field != "seed" else [shown(v) for v in self.values]

    def curve(self, bundle: Group, key: str) -> Curve | None:
        """Mean, lowest and highest over the runs at each value."""
        found: dict[Any, list[float]] = {}
        for run in bundle.runs:
            if (value := final(run, key)) is not None:
                found.setdefault(run.config.get(self.field), []).append(value)
        values = [value for value in self.values if value in found]
        if not values:
            return None
        x = [self.values.index(v) if self.ticks else float(v) for v in values]
        columns = [[reduce(found[v]) for v in values] for reduce in (np.mean, np.min, np.max)]
        mean, low, high = (np.array(column, dtype=float) for column in columns)
        return Curve({"value": np.array(x, dtype=float)}, mean, low, high)


def final(run: Run, key: str) -> float | None:
    value = (run.summary or {}).get(f"final_{key}")
    return float(value) if value is not None and np.isfinite(value) else None


def ablations(groups: list[Group]) -> list[Ablation]:
    """One for each setting that varies within a method, and for the seed."""
    methods = dict.fromkeys(group.method for group in groups)
    kin = [[group for group in groups if group.method == method] for method in methods]
    fields = dict.fromkeys(field for each in kin for field in differing(each))
    found = [_ablation(groups, field) for field in [*fields, "seed"]]
    return [ablation for ablation in found if ablation.bundles]


def _ablation(groups: list[Group], field: str) -> Ablation:
    runs = [run for group in groups for run in group.finished]
    concerned = [run for run in runs if field == "seed" or field in settings_of(run)]
    moved = [] if field == "seed" else _moved(concerned, field)
    bundles = _bundles(concerned, lambda key: key == field or key in moved)
    bundles = [bundle for bundle in bundles if len(_values(bundle.runs, field)) > 1]
    values = _values([run for bundle in bundles for run in bundle.runs], field)
    beside = [g for g in groups if field != "seed" and field not in g.settings and g.finished]
    return Ablation(field, bundles, beside, sorted(values, key=sortable), moved)


def _bundles(runs: list[Run], left_out: Callable[[str], bool]) -> list[Group]:
    bundles: dict[tuple[str, str], Group] = {}
    for run in runs:
        rest = {key: value for key, value in settings_of(run).items() if not left_out(key)}
        key = run.method, repr(sorted(rest.items()))
        bundles.setdefault(key, Group(run.method, rest)).runs.append(run)
    for bundle in bundles.values():
        kin = [other for other in bundles.values() if other.method == bundle.method]
        varied = {key: bundle.settings.get(key) for key in differing(kin)}
        bundle.label = label(bundle.method, varied)
    return list(bundles.values())


def _moved(runs: list[Run], field: str) -> list[str]:
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
    return list(dict.fromkeys(run.config.get(field) for run in runs))

"""Runs that differ in nothing but their seed are one line of a plot and one row of a table."""

from dataclasses import dataclass, field
from typing import Any

from palsgd import references
from palsgd.lab.methods import is_baseline, without_effect
from palsgd.lab.run_folder import Run

SYMBOLS = {"sync_every": "H", "mix_prob": "p", "mix_rate": "η", "workers": "K"}

# Fields of a run that are no settings, or that repeat a setting.
_NOT_SETTINGS = {
    "schema", "seed", "floor", "method", "workload", "commit", "dirty", "command",
}  # fmt: skip


@dataclass(eq=False)
class Group:
    """The runs of one setting."""

    method: str
    settings: dict[str, Any]  # the settings that have an effect on the method
    runs: list[Run] = field(default_factory=list)
    label: str = ""

    @property
    def is_baseline(self) -> bool:
        """Are the others measured against it?"""
        return is_baseline(self.method)

    @property
    def finished(self) -> list[Run]:
        return [run for run in self.runs if run.finished]

    @property
    def seeds(self) -> list[Any]:
        return sorted({run.config.get("seed") for run in self.runs}, key=str)


def group(runs: list[Run]) -> list[Group]:
    """The groups of one workload's runs, labelled by what tells them apart."""
    groups: dict[tuple[str, str], Group] = {}
    for run in runs:
        settings = settings_of(run)
        key = run.method, repr(sorted(settings.items()))
        groups.setdefault(key, Group(run.method, settings)).runs.append(run)
    ordered = _by_value(list(groups.values()))
    for each in ordered:
        kin = [other for other in ordered if other.method == each.method]
        each.label = label(each.method, {key: each.settings.get(key) for key in differing(kin)})
    return ordered


def settings_of(run: Run) -> dict[str, Any]:
    without = _NOT_SETTINGS | without_effect(run.method)
    return {key: value for key, value in run.config.items() if key not in without}


def differing(groups: list[Group]) -> list[str]:
    """The settings in which the groups that have them differ, the paper's letters first."""
    keys = dict.fromkeys([*SYMBOLS, *(key for each in groups for key in each.settings)])
    return [key for key in keys if len(_values(groups, key)) > 1]


def label(method: str, settings: dict[str, Any]) -> str:
    return " ".join(
        [references.short(method), *(f"{named(key)}={shown(settings[key])}" for key in settings)]
    )


def named(key: str) -> str:
    return SYMBOLS.get(key, key.replace("_", " "))


def shown(value: Any) -> str:
    if value is None:
        return "none"
    if isinstance(value, bool):
        return "yes" if value else "no"
    return f"{value:g}" if isinstance(value, float) else str(value)


def _values(groups: list[Group], key: str) -> set[str]:
    return {repr(each.settings[key]) for each in groups if key in each.settings}


def _by_value(groups: list[Group]) -> list[Group]:
    """Methods stay in their order; within one, settings in the order of their values."""
    methods = list(dict.fromkeys(each.method for each in groups))
    keys = differing(groups)
    return sorted(
        groups,
        key=lambda each: (
            methods.index(each.method),
            [sortable(each.settings.get(key)) for key in keys],
        ),
    )


def sortable(value: Any) -> tuple[int, float, str]:
    """Numbers by size, then everything else by its text."""
    if isinstance(value, int | float):
        return 0, float(value), ""
    return 1, 0.0, str(value)

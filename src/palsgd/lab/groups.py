"""Runs that differ in nothing but their seed are one line of a plot and one row of a table."""

from dataclasses import dataclass, field
from typing import Any

from palsgd import references
from palsgd.lab.methods import is_baseline, without_effect
from palsgd.lab.programs import NOT_COMPUTED
from palsgd.lab.run_folder import Run

SYMBOLS = {"sync_every": "H", "mix_prob": "p", "mix_rate": "η", "workers": "K"}

# Fields of a run that are no settings, or that repeat a setting.
_NOT_SETTINGS = {
    "schema", "seed", "floor", "method", "workload", "commit", "dirty", "command", "same_as",
    "program", "warmup_computed_by", "link", "changes", "twin_of", *NOT_COMPUTED,
}  # fmt: skip


@dataclass(eq=False)
class Group:
    """The runs of one setting."""

    method: str
    settings: dict[str, Any]  # the settings that have an effect on the method
    runs: list[Run] = field(default_factory=list)  # one for each seed
    repeats: list[Run] = field(
        default_factory=list
    )  # further runs of a seed, which say nothing new
    label: str = ""

    def add(self, run: Run) -> None:
        """A finished run of a seed goes before one that is not."""
        for place, other in enumerate(self.runs):
            if other.config.get("seed") == run.config.get("seed"):
                if run.finished and not other.finished:
                    self.runs[place], run = run, other
                self.repeats.append(run)
                return
        self.runs.append(run)

    @property
    def is_baseline(self) -> bool:
        """Are the others measured against it?"""
        return is_baseline(self.method)

    @property
    def given_name(self) -> str | None:
        """A collection may name a setting after what it is for: a folder METHOD-NAME. None: the
        settings that differ tell groups apart. A setting that was also run without such a name is
        the method's own."""
        own = [run for run in (*self.runs, *self.repeats) if run.twin_place is None]
        names = {run.point for run in own}
        name = names.pop() if len(names) == 1 else ""
        return name if name.startswith(f"{self.method}-") else None

    @property
    def kind(self) -> str:
        """The method, or the control that the group is: of a name METHOD-NAME,SETTINGS what stands
        before the settings."""
        return (self.given_name or self.method).partition(",")[0]

    @property
    def finished(self) -> list[Run]:
        return [run for run in self.runs if run.finished]

    @property
    def seeds(self) -> list[Any]:
        return sorted({run.config.get("seed") for run in self.runs}, key=str)


def group(runs: list[Run]) -> list[Group]:
    """The groups of one workload's runs, labelled by what tells them apart. The twin of a run that
    is there too is a repeat of it, and no seed of its own."""
    groups: dict[tuple[str, str], Group] = {}
    twins = _twins(runs)
    for run in runs:
        if run not in twins:
            settings = settings_of(run)
            key = run.method, repr(sorted(settings.items()))
            groups.setdefault(key, Group(run.method, settings)).add(run)
    ordered = _by_value(list(groups.values()))
    for twin, run in twins.items():
        home = next(each for each in ordered if run in (*each.runs, *each.repeats))
        home.repeats.append(twin)
    families: dict[tuple[str, str | None], list[Group]] = {}
    for each in ordered:
        families.setdefault((each.method, each.given_name), []).append(each)
    for (method, name), family in families.items():
        keys = differing(family)
        for each in family:
            own = {key: each.settings.get(key) for key in keys}
            each.label = label(method, own) if name is None else _with(name, own)
    return ordered


def _twins(runs: list[Run]) -> dict[Run, Run]:
    """For each twin of a run that is there, and is no twin itself, that run."""
    places = {run.folder.path.resolve(): run for run in runs if run.twin_place is None}
    return {run: places[at] for run in runs if (at := run.twin_place) and at in places}


def settings_of(run: Run) -> dict[str, Any]:
    without = _NOT_SETTINGS | without_effect(run.method, run.config.get("draws", "balanced"))
    return {key: value for key, value in run.config.items() if key not in without}


def differing(groups: list[Group]) -> list[str]:
    """The settings in which the groups that have them differ, the paper's letters first."""
    keys = dict.fromkeys([*SYMBOLS, *(key for each in groups for key in each.settings)])
    return [key for key in keys if len(_values(groups, key)) > 1]


def label(method: str, settings: dict[str, Any]) -> str:
    return _with(references.short(method), settings)


def _with(name: str, settings: dict[str, Any]) -> str:
    return " ".join([name, *(f"{named(key)}={shown(settings[key])}" for key in settings)])


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
    """Methods stay in their order; within one, settings in the order of their values. Settings
    with names of their own come last."""
    methods = list(dict.fromkeys(each.method for each in groups))
    keys = differing(groups)
    return sorted(
        groups,
        key=lambda each: (
            each.given_name is not None,
            methods.index(each.method),
            [sortable(each.settings.get(key)) for key in keys],
        ),
    )


def sortable(value: Any) -> tuple[int, float, str]:
    """Numbers by size, then everything else by its text."""
    if isinstance(value, int | float):
        return 0, float(value), ""
    return 1, 0.0, str(value)

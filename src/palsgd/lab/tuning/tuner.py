"""Runs the trials of a search, each in a folder of its own, and writes what was chosen."""

import math
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from palsgd import references
from palsgd.checks import check_int
from palsgd.lab import workloads
from palsgd.lab.run_folder import RunFolder
from palsgd.lab.run_set import FailedRunsError, Options, run_all
from palsgd.lab.settings import Settings
from palsgd.lab.tuning.budget import with_gradients
from palsgd.lab.tuning.halving import Judged, Outcome, Trial, halve
from palsgd.lab.tuning.search_space import Space, points, space_of


@dataclass(frozen=True, kw_only=True)
class Search:
    """What is tried for whom. `base` says all that is not searched."""

    recipe: str
    base: Settings
    methods: Sequence[str]
    trials: int  # points of each method
    seeds: int  # of the finalists, and of the better half of the points before
    gradients: int  # of each worker in each run
    spaces: Mapping[str, Space]  # by method

    def __post_init__(self) -> None:
        for name in ("trials", "seeds"):
            check_int(name, getattr(self, name), least=1)

    @classmethod
    def of(
        cls,
        recipe: str,
        base: Settings,
        methods: Sequence[str],
        *,
        trials: int,
        seeds: int,
        given: Collection[str] = (),
        data: str | None = None,
    ) -> "Search":
        """The search of a recipe: its space without the fields that are `given`, and its length in
        gradients."""
        base = replace(base, split="choose")
        space = workloads.search(recipe)
        return cls(
            recipe=recipe,
            base=base,
            methods=methods,
            trials=trials,
            seeds=seeds,
            gradients=base.steps or base.total_steps(_examples(base, data)),
            spaces={method: space_of(space, method, given) for method in methods},
        )

    def point(self, method: str, number: int) -> dict[str, Any]:
        return points(self.spaces[method], self.trials, self.base.seed)[number]

    def settings(self, method: str, number: int) -> Settings:
        """Of a point, with the steps that its budget of gradients gives it."""
        chosen = self.base.changed({"method": method, **self.point(method, number)})
        return with_gradients(chosen, self.gradients)


class Trials:
    """The runs of a search in a folder. Those that are finished are not run again."""

    def __init__(self, search: Search, folder: Path, options: Options):
        self.search, self.folder, self._options = search, folder, options
        self._runs: dict[str, Settings] = {}

    def run(self, trials: list[Trial]) -> Judged:
        self._runs |= {_name(trial): self.settings(trial) for trial in trials}
        with suppress(FailedRunsError):  # a trial that diverges has lost
            run_all(self._runs, self.folder, self._options)
        self._options = replace(self._options, force=False, resume=True)
        return {trial: self.judged(trial) for trial in trials}

    def settings(self, trial: Trial) -> Settings:
        method, point, seed = trial
        return replace(self.search.settings(method, point), seed=seed)

    def summary(self, trial: Trial) -> dict[str, Any] | None:
        """None: training failed."""
        return RunFolder(self.folder / _name(trial)).summary()

    def figure(self, trial: Trial, name: str) -> float:
        """A figure of the trial's end; infinite where training failed."""
        found = self.summary(trial)
        value = None if found is None else found[name]
        return math.inf if value is None or not math.isfinite(value) else value

    def judged(self, trial: Trial) -> float:
        """What the workload is judged on, lower is better; infinite where training failed."""
        kind = workloads.kind(self.search.base.workload)
        value = self.figure(trial, f"final_{kind.judged_on}")
        turned = kind.judged_on == "metric" and kind.higher_is_better and math.isfinite(value)
        return -value if turned else value


def run_search(
    search: Search, folder: Path, options: Options
) -> tuple[Trials, Mapping[str, Outcome]]:
    trials = Trials(search, folder, options)
    for method in search.methods:  # refuse what cannot work before the first run
        for number in range(search.trials):
            search.settings(method, number)
    found = halve(search.methods, search.trials, search.seeds, search.base.seed, trials.run)
    return trials, found


def _name(trial: Trial) -> str:
    method, point, seed = trial
    return f"{references.short(method)},point={point},seed={seed}"


def _examples(base: Settings, data: str | None) -> int:
    """Training examples of the data that are there, for lengths in epochs."""
    return workloads.load(base.workload, data=data, **workloads.data_settings(base)).examples

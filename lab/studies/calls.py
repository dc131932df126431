"""Runs that a study asks of palsgd's lab: a search for settings, a comparison, a sweep; grid.py has
one more.

A call says what it will run before it does so, from the lists that the lab itself makes of it.
"""

import hashlib
import json
import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Self

import palsgd.lab
from palsgd.lab import workloads
from palsgd.lab.api import run_options
from palsgd.lab.controls import chosen_controls, controls_for
from palsgd.lab.methods import runs_of, whole_names
from palsgd.lab.programs import program
from palsgd.lab.run_list import NO_TUNING, compared_runs, with_seeds
from palsgd.lab.run_set import grid_of, run_all
from palsgd.lab.settings import Settings, with_alternatives
from palsgd.lab.tuning.halving import FINALISTS, rungs
from palsgd.lab.tuning.tuned_file import read_tuned

Options = dict[str, Any]  # as palsgd.lab.compare takes them
ACCURACY = {"target_on": "metric"}  # what methods of pictures are judged by
# Without the one that accumulates a round's gradients: its batch of long texts fits no memory.
OF_TEXTS = ("no-pull", "same-settings", "raised-lr", "equal-gradients")
LENGTHS = ("steps", "epochs", "whole_rounds")


@dataclass(frozen=True, kw_only=True)
class Call(ABC):
    name: str  # of its folder
    recipe: str
    settings: Mapping[str, Any] = field(default_factory=dict)
    seeds: int = 1
    # Do runs of equal shape share a program? They compute faster then, and end together. A large
    # model gains nothing, and its runs end one by one.
    together: bool = True

    @abstractmethod
    def stages(self) -> list[list[Settings]]:
        """The runs that are handed over together, one list after another."""

    @abstractmethod
    def do(self, runs: Path, tuning: Path, options: Options) -> None:
        """Run what is not done yet. `runs` and `tuning` are the part's folders of runs that are
        judged and of trials that only choose settings."""

    def judged(self, runs: Path, tuning: Path) -> Path | None:
        """The folder of its runs that are judged; None: it has none."""
        return runs / self.name

    @property
    def shares_warmups(self) -> bool:
        """Are the runs of `stages` what will run? A search will choose other learning rates."""
        return True

    def shortened(self, share: float) -> Self:
        """The same with runs of a share of their length, warm-ups included."""
        whole = {key: value for key, value in self.settings.items() if not _is_list(value)}
        base = workloads.recipe(self.recipe).changed(whole)
        changes: dict[str, Any] = {"warmup_steps": round(base.warmup_steps * share)}
        if base.epochs is None:
            assert base.steps is not None
            changes["steps"] = max(1, round(base.steps * share))
        else:
            changes |= {"epochs": base.epochs * share, "whole_rounds": True}
        for name in ("lr_warmup_steps", "lr_warmup_epochs", "schedule_every"):
            if value := getattr(base, name):
                changes[name] = type(value)(value * share) or 1
        return replace(self, settings={**self.settings, **changes})

    def how(self, options: Options) -> Options:
        return {**options, "resume": True, "share_program": self.together}


@dataclass(frozen=True, kw_only=True)
class Tune(Call):
    """Equally many trials for each method, on data that are held out of the training data."""

    methods: Sequence[str]
    trials: int

    def judged(self, runs: Path, tuning: Path) -> None:
        return None

    @property
    def shares_warmups(self) -> bool:
        return False

    def stages(self) -> list[list[Settings]]:
        base = workloads.recipe(self.recipe).changed({**self.settings, "split": "choose"})
        first, *second = rungs(self.trials, self.seeds)
        again = [points * (seeds - first[1]) for points, seeds in second]
        counts = [first[0] * first[1], *again, min(FINALISTS, self.trials) * self.seeds]
        methods = list(runs_of(base, whole_names(self.methods)).values())
        return [[run for run in methods for _ in range(count)] for count in counts if count]

    def do(self, runs: Path, tuning: Path, options: Options) -> None:
        tuning_file(tuning, self.name).parent.mkdir(parents=True, exist_ok=True)
        palsgd.lab.tune(
            self.recipe, self.methods, trials=self.trials, seeds=self.seeds,
            out=tuning_file(tuning, self.name), options=self.how(options), **self.settings,
        )  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Compare(Call):
    """Methods beside each other, with the same seeds, at the settings of a search if one is
    named."""

    methods: Sequence[str]
    controls: bool | Sequence[str] = False
    tuned_by: str | None = None  # the name of a Tune or Grid of the same part

    @property
    def shares_warmups(self) -> bool:
        return self.tuned_by is None

    def judged(self, runs: Path, tuning: Path) -> Path | None:
        """With settings that a search chose, a folder that is named after them: a search that goes
        on may choose others, and runs of the old ones are not judged then."""
        if self.tuned_by is None:
            return runs / self.name
        path = tuning_file(tuning, self.tuned_by)
        if not path.exists():
            return None
        chosen = {
            name: {key: value for key, value in own["settings"].items() if key not in LENGTHS}
            for name, own in read_tuned(path)["methods"].items()
        }
        digest = hashlib.sha256(json.dumps(chosen, sort_keys=True).encode()).hexdigest()
        return runs / f"{self.name}-{digest[:8]}"

    def stages(self) -> list[list[Settings]]:
        base = workloads.recipe(self.recipe).changed(self.settings)
        found, _ = compared_runs(
            runs_of(base, whole_names(self.methods)), recipe=self.recipe, seeds=self.seeds,
            controls=self.controls, tuned=NO_TUNING, given=self.settings,
        )  # fmt: skip
        return [list(found.values())]

    def do(self, runs: Path, tuning: Path, options: Options) -> None:
        settings, tuned = dict(self.settings), NO_TUNING
        if self.tuned_by is not None:
            tuned = str(tuning_file(tuning, self.tuned_by))
            chosen = read_tuned(tuned)["methods"].values()
            searched = {key for own in chosen for key in own["settings"]}
            # A search has them for each method, and gives all equally many gradients.
            for key in searched.intersection(LENGTHS):
                settings.pop(key, None)
            if kept := sorted(searched & with_alternatives(settings)):
                raise ValueError(f"{self.name} was tuned in {', '.join(kept)}, and also gives it")
        palsgd.lab.compare(
            self.recipe, self.methods, seeds=self.seeds, controls=self.controls, tuned=tuned,
            out=self.judged(runs, tuning), options=self.how(options), **settings,
        )  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Sweep(Call):
    """All combinations of the settings that are lists."""

    def stages(self) -> list[list[Settings]]:
        return [list(self.points().values())]

    def points(self) -> dict[str, Settings]:
        lists = {key: list(value) for key, value in self.settings.items() if _is_list(value)}
        rest = {key: value for key, value in self.settings.items() if key not in lists}
        base = workloads.recipe(self.recipe).changed(rest)
        return with_seeds(grid_of(base, lists), self.seeds)

    def do(self, runs: Path, tuning: Path, options: Options) -> None:
        palsgd.lab.sweep(
            self.recipe, seeds=self.seeds, out=runs / self.name, options=self.how(options),
            **self.settings,
        )  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Controls(Call):
    """The controls of every point of a sweep, each once."""

    of: Sweep
    wanted: Sequence[str]

    def shortened(self, share: float) -> Self:
        return replace(self, of=self.of.shortened(share))

    def stages(self) -> list[list[Settings]]:
        return [list(self.points().values())]

    def points(self) -> dict[str, Settings]:
        """By the name of the run."""
        found: dict[Any, tuple[str, Settings]] = {}
        for point, settings in replace(self.of, seeds=1).points().items():
            made, _ = controls_for({point: settings}, chosen_controls(list(self.wanted)))
            for name, each in made.items():
                found.setdefault(program(each), (f"{name},{point}", each))
        return with_seeds(dict(found.values()), self.seeds)

    def do(self, runs: Path, tuning: Path, options: Options) -> None:
        run_all(self.points(), runs / self.name, run_options(True, self.how(options)))


def tuning_file(tuning: Path, name: str) -> Path:
    return tuning / name / "tuned.yaml"


def tuned_comparison(
    name: str, recipe: str, methods: Sequence[str], *, trials: int, seeds: int,
    tuning_seeds: int = 1, controls: bool | Sequence[str] = False, together: bool = True,
    **settings: Any,
) -> list[Call]:  # fmt: skip
    """A search for each method's settings, and a comparison at those that it chose."""
    common: dict[str, Any] = dict(
        name=name, recipe=recipe, methods=methods, settings=settings, together=together
    )
    return [
        Tune(**common, trials=trials, seeds=tuning_seeds),
        Compare(**common, seeds=seeds, controls=controls, tuned_by=name),
    ]


def _is_list(value: Any) -> bool:
    return isinstance(value, list | tuple)


def gradient_examples(settings: Settings) -> float:
    """About how many examples a run computes gradients of, all workers together."""
    from palsgd.lab.controls import mixed_share

    steps = settings.total_steps(workloads.examples(settings.workload))
    warmup = _warmup_steps(settings)
    gradients = warmup + (steps - warmup) * (1 - mixed_share(settings))
    return math.ceil(gradients) * settings.workers * settings.batch_size


def warmup_examples(settings: Settings) -> int:
    """Those of its warm-up."""
    return _warmup_steps(settings) * settings.workers * settings.batch_size


def _warmup_steps(settings: Settings) -> int:
    steps = settings.total_steps(workloads.examples(settings.workload))
    return min(steps, settings.warmup_steps)

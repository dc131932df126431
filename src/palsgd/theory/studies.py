"""The code that all studies share: the runs they start, and the lines and exponents they return."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from palsgd.theory.algorithm import Outcome, RandomSource, Watch, run
from palsgd.theory.fits import Fit, Measured, power_law
from palsgd.theory.problems import Problem
from palsgd.theory.theorem import Setting

MOST_STEPS = 2_000_000  # of one study; more would take an hour
_RESOLVED = 0.3  # half an interval that still tells exponents apart


@dataclass(frozen=True, kw_only=True)
class StudyContext:
    """The setting that all studies start from."""

    problem: Problem
    setting: Setting
    distance: float
    runs: int
    seed: int = 0
    device: torch.device | str = "cpu"

    @property
    def few_runs(self) -> int:
        """The number of runs per setting for studies with many settings."""
        return max(32, self.runs // 4)

    def outcome(
        self, problem: Problem, setting: Setting, *, distance: float, runs: int,
        snapshots: Sequence[int] = (), watch: Watch | None = None,
    ) -> Outcome:  # fmt: skip
        source = RandomSource(problem, setting, runs=runs, seed=self.seed, device=self.device)
        start = problem.start(distance)
        return run(problem, setting, start, source, snapshots=set(snapshots), watch=watch)

    def excess(self, problem: Problem, setting: Setting, *, distance: float, runs: int) -> Measured:
        """E[F(xhat)] - F*."""
        found = self.outcome(problem, setting, distance=distance, runs=runs)
        return Measured.of(problem.excess(found.average))


@dataclass
class Line:
    label: str
    x: list[float]
    measured: list[Measured]
    bound: list[float] | None = None

    def fit(self) -> Fit:
        return power_law(self.x, self.measured)

    def bound_slope(self) -> float:
        """The slope of the bound over the same points."""
        assert self.bound is not None
        return power_law(self.x, [Measured(value, 0.0) for value in self.bound]).slope


@dataclass
class Exponent:
    """A claim of the theorem beside what was measured."""

    claim: str
    claimed: float
    measured: Fit
    bound: float | None  # of the explicit bound over the same points
    why: str  # where they differ, the reason; else what was held equal

    @property
    def verdict(self) -> str:
        miss = self.measured.slope - self.claimed
        if not self.measured.half <= _RESOLVED:
            return "too wide to say"
        if abs(miss) <= max(self.measured.half, 0.05):
            return "as claimed"
        # A bound holds where the error falls faster or grows slower than it says.
        return "better than claimed" if miss < 0 else "worse than claimed"


@dataclass
class Study:
    name: str
    title: str
    xlabel: str
    lines: list[Line] = field(default_factory=list)
    exponents: list[Exponent] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    log_x: bool = True
    show_bound: bool = True  # False if the bound is so large that the other lines could not be read
    names: list[str] = field(default_factory=list)  # of the places on the x axis, if no numbers


def skipped(study: Study, steps: float) -> bool:
    """Is a study too long to run? If so, its text says so."""
    if steps <= MOST_STEPS:
        return False
    study.notes.append(
        f"Not run: the regime where this term dominates needs {steps:,.0f} steps; a smaller "
        "L/mu or H, or a larger p, needs fewer."
    )
    return True


def say_outside(study: Study, settings: Sequence[Setting], problem: Problem) -> None:
    """Which points of a study the theorem does not cover."""
    x = study.lines[0].x
    found = [f"{at:g}" for at, s in zip(x, settings, strict=True) if s.outside(problem)]
    if found:
        study.notes.append(f"Outside the theorem: {', '.join(found)}.")


def noiseless(study: Study, context: StudyContext) -> bool:
    """Is the problem of a study of noise without noise? If so, the study's text says so."""
    if context.problem.sigma > 0:
        return False
    study.notes.append("Not run: without noise (sigma = 0) this term is 0.")
    return True


def times(one: float, other: float) -> str:
    """The ratio of the two numbers, in words."""
    if not other:
        return "infinitely many"
    return f"{one / other:,.0f}" if one >= 100 * other else f"{one / other:.3g}"


def rounds_up(steps: float, sync_every: int) -> int:
    """The number of steps, rounded up to whole rounds."""
    return math.ceil(steps / sync_every) * sync_every


def with_(setting: Setting, **changes: object) -> Setting:
    return replace(setting, **changes)  # type: ignore[arg-type]


def mean_model_watch(problem: Problem, each: Callable[[int, Tensor, Tensor], None]) -> Watch:
    """Calls `each` with F - F* of the workers' mean and of the anchor, at each step."""

    def watch(clock: int, before: Tensor, after: Tensor, anchor: Tensor) -> None:
        each(clock, problem.excess(before.mean(dim=1)), problem.excess(anchor[:, 0]))

    return watch

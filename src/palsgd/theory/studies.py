"""The code that all studies share: the runs they start, and the lines and exponents they return."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from palsgd.theory.algorithm import Outcome, RandomSource, Watch, run
from palsgd.theory.fits import Measured, power_law
from palsgd.theory.inequality import Check
from palsgd.theory.problems import Problem
from palsgd.theory.theorem import Setting
from palsgd.theory.verdicts import Family, Verdict, Words, judged

MOST_STEPS = 2_000_000  # of one study; more would take an hour
_FEW = 4
# Exponents of such laws are multiples of 1/2. What is nearer to one than this is nearer to it than
# to any other.
MARGIN = 0.25
# A bound holds where the error falls faster or grows slower than it says.
RATES = Words("better than claimed", "as claimed", "worse than claimed")
WORTH_MARGIN = 0.05  # of the error: less than this is no reason to mix, or not to
WORTHS = Words("gains", "makes no difference", "costs")


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
        return max(32, self.runs // _FEW)

    @property
    def few_seeds(self) -> int:
        """The seeds that so many runs stand for."""
        return self.few_runs * _FEW

    def outcome(
        self, problem: Problem, setting: Setting, *, distance: float, runs: int,
        snapshots: Sequence[int] = (), watch: Watch | None = None, average_lr: float | None = None,
    ) -> Outcome:  # fmt: skip
        source = RandomSource(problem, setting, runs=runs, seed=self.seed, device=self.device)
        start = problem.start(distance)
        return run(
            problem, setting, start, source, snapshots=set(snapshots), watch=watch,
            average_lr=average_lr,
        )  # fmt: skip

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

    def fit(self) -> Measured:
        return power_law(self.x, self.measured)

    def bound_slope(self) -> float:
        """The slope of the bound over the same points."""
        assert self.bound is not None
        return power_law(self.x, [Measured(value) for value in self.bound]).mean


@dataclass
class Exponent:
    """A claim of the theorem beside what was measured."""

    claim: str
    claimed: float
    measured: Measured
    bound: float | None  # of the explicit bound over the same points
    why: str  # where they differ, the reason; else what was held equal
    seeds: int  # that the measurement stands for

    def verdict(self, family: Family) -> Verdict:
        return judged(self.measured, self.claimed, MARGIN, RATES, family, self.seeds)


@dataclass
class Worth:
    """What eta > 0 is worth: its error divided by that of eta = 0, with the same coins and data."""

    regime: str
    times: float  # eta, in units of the theorem's
    alpha: float  # of its opponent, in units of its own
    ratio: Measured
    seeds: int

    def verdict(self, family: Family) -> Verdict:
        return judged(self.ratio, 1.0, WORTH_MARGIN, WORTHS, family, self.seeds)


@dataclass
class Study:
    name: str
    title: str
    xlabel: str
    lines: list[Line] = field(default_factory=list)
    exponents: list[Exponent] = field(default_factory=list)
    checks: list[Check] = field(default_factory=list)
    worths: list[Worth] = field(default_factory=list)
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
    """Which points of a study the theorem does not cover, and why."""
    points: dict[str, list[str]] = {}
    for at, setting in zip(study.lines[0].x, settings, strict=True):
        for condition in setting.unmet(problem):
            points.setdefault(condition, []).append(f"{at:g}")
    if points:
        reasons = "; ".join(f"{', '.join(x)} ({why})" for why, x in points.items())
        study.notes.append(f"Outside the theorem are the points at {study.xlabel} = {reasons}.")


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

"""What turns steps of the clock into seconds."""

import math
from dataclasses import dataclass, field

import numpy as np

from palsgd.lab.judging.interval import Interval
from palsgd.lab.judging.quality_curve import DRAWS, bounds

PARTS = ("computing", "mixing", "waiting", "exchanging")
NO_LINK = "give --link to project"  # what is said in place of seconds that nobody knows


@dataclass(frozen=True, eq=False, kw_only=True)
class Pace:
    """The seconds of a step of one method on one cluster.

    A step of the warm-up costs an all-reduce and a step of the local phase a share of a sync, so
    they have seconds of their own. Both are arrays with a row per repetition and a column for each
    of `PARTS`. A repetition of all methods was measured in one turn, so row i of one pace belongs
    to row i of another: what slowed the machine in that turn slowed all methods alike. The value of
    a pace is the median over repetitions, and draws of several paces draw the same rows.
    """

    kind: str  # "measured" or "projected"
    source: str  # where the seconds come from, in words
    warmup: float  # steps of the warm-up; math.inf under DDP
    link: str | None = None  # emulated or projected on; None: the network as it was
    averaging: np.ndarray = field(default_factory=lambda: np.zeros((1, len(PARTS))))
    local: np.ndarray = field(default_factory=lambda: np.zeros((1, len(PARTS))))

    def __post_init__(self) -> None:
        for steps in (self.averaging, self.local):
            if steps.ndim != 2 or steps.shape[1] != len(PARTS) or not len(steps):
                raise ValueError(f"{steps.shape} seconds; a pace has a row per repetition of PARTS")

    @property
    def repetitions(self) -> int:
        return max(len(self.averaging), len(self.local))

    def seconds(self, clock: float) -> float:
        """The seconds until the clock shows `clock`."""
        return float(np.median(self._of_each_repetition(clock)))

    def interval(self, clock: float, *, draws: int = DRAWS) -> Interval:
        """`seconds`, and how far they may be off by the chance of what was measured."""
        n = self.repetitions
        if n < 2:
            kind = "one measurement" if self.kind == "measured" else "a model, no measurement"
            return Interval(self.seconds(clock), -math.inf, math.inf, n, f"{kind}, no interval")
        low, high = bounds(self.drawn(clock, draws=draws))
        kind = f"95% bootstrap over {n} repetitions"
        return Interval(self.seconds(clock), low, high, n, kind)

    def drawn(self, clock: float, *, draws: int = DRAWS) -> np.ndarray:
        """Medians over repetitions that are drawn again, for Monte Carlo."""
        each = self._of_each_repetition(clock)
        return np.median(each[_resampled(len(each), draws)], axis=1)

    def factors(self, clock: float, *, draws: int = DRAWS) -> np.ndarray:
        """`drawn` over `seconds`: the noise of a cost that is given in these seconds."""
        value = self.seconds(clock)
        return self.drawn(clock, draws=draws) / value if value else np.ones(draws)

    def parts(self, first: float, last: float) -> dict[str, float]:
        """The seconds from clock `first` to clock `last`, by what they were spent on; they add up
        to the difference of `seconds`."""
        (warm, rest), before = self._phases(last), self._phases(first)
        warm, rest = warm - before[0], rest - before[1]
        spent = warm * self.averaging.mean(axis=0) + rest * self.local.mean(axis=0)
        whole = self.seconds(last) - self.seconds(first)
        total = spent.sum()
        return dict(zip(PARTS, (spent * (whole / total if total else 0.0)).tolist(), strict=True))

    def _phases(self, clock: float) -> tuple[float, float]:
        warm = min(clock, self.warmup)
        return warm, clock - warm

    def _of_each_repetition(self, clock: float) -> np.ndarray:
        warm, rest = self._phases(clock)
        return warm * self.averaging.sum(axis=1) + rest * self.local.sum(axis=1)


def _resampled(n: int, draws: int) -> np.ndarray:
    """Rows of repetitions, drawn with replacement; the same for all paces with equally many. They
    are other rows than those of seeds, from which they must be independent."""
    return np.random.default_rng([n, 1]).integers(0, n, size=(draws, n))

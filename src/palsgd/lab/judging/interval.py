"""A figure with its interval: how far it may be from the truth, by chance of the seeds."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, stdev

LEVEL = 0.95


@dataclass(frozen=True)
class Interval:
    """A value between two bounds. A single run has a value, and bounds that say nothing."""

    value: float
    low: float
    high: float
    n: int  # seeds, or pairs of them
    kind: str  # of the interval, in words
    deviation: float = math.nan  # between seeds, or between pairs of them

    @property
    def known(self) -> bool:
        """Are there bounds?"""
        return math.isfinite(self.low) and math.isfinite(self.high)

    def scaled(self, factor: float) -> "Interval":
        """The same in another unit. A negative factor would swap the bounds; there is no such
        unit."""
        return Interval(
            self.value * factor, self.low * factor, self.high * factor, self.n, self.kind,
            self.deviation * factor,
        )  # fmt: skip

    def as_dict(self) -> dict[str, float | int | str | None]:
        bounds = {"low": self.low, "high": self.high} if self.known else {"low": None, "high": None}
        return {"value": self.value, **bounds, "n": self.n, "kind": self.kind}


def of_mean(values: Sequence[float]) -> Interval:
    """The mean of a sample of seeds, with Student's interval."""
    return _student(list(values), f"95% t interval over {len(values)} seeds")


def of_difference(own: Mapping[int, float], other: Mapping[int, float]) -> Interval:
    """The mean of own - other over the seeds that both have. Runs of one seed share data and
    initial weights, so the difference of a pair varies less than its parts."""
    seeds = [seed for seed in own if seed in other]
    if not seeds:
        raise ValueError(
            f"seeds {sorted(own)} and {sorted(other)} have none in common; run both with the same"
        )
    differences = [own[seed] - other[seed] for seed in seeds]
    return _student(differences, f"95% paired t interval over {len(seeds)} seeds")


def relative_difference(own: Mapping[int, float], other: Mapping[int, float]) -> Interval:
    """`of_difference` as a share of the other's mean, which is taken as known."""
    difference = of_difference(own, other)
    base = fmean(other[seed] for seed in own if seed in other)
    if base == 0:
        raise ValueError("the other's mean is 0, so there is no share of it; use differences")
    return difference.scaled(1 / abs(base))


def _student(values: list[float], kind: str) -> Interval:
    n, mean = len(values), fmean(values)
    if n < 2 or not all(map(math.isfinite, values)):
        return Interval(mean, -math.inf, math.inf, n, "one seed, no interval" if n < 2 else kind)
    from scipy.stats import t  # type: ignore[import-untyped]

    deviation = stdev(values)
    half = float(t.ppf(0.5 + LEVEL / 2, n - 1)) * deviation / math.sqrt(n)
    return Interval(mean, mean - half, mean + half, n, kind, deviation)

"""What it costs to reach a quality: the mean curve of several seeds, and where it crosses a level.

A curve holds the loss (or another figure, lower is better) of each seed at common steps, and what
had been spent there. Reaching a level is judged on the mean over seeds, made monotone: what counts
is the first time that the mean was that low. Its interval comes from seeds drawn again with
replacement. Seeds that stay above a level therefore count; they are not left out.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from palsgd.lab.judging.interval import Interval

DRAWS = 1000


@dataclass(frozen=True, eq=False)
class QualityCurve:
    """`values[seed][point]`, lower is better, at `costs[axis][point]`; every axis grows."""

    seeds: tuple[int, ...]
    values: np.ndarray
    costs: Mapping[str, np.ndarray]

    def __post_init__(self) -> None:
        points = self.values.shape[1]
        if self.values.shape[0] != len(self.seeds) or points == 0:
            raise ValueError(f"{self.values.shape} values for {len(self.seeds)} seeds")
        for axis, cost in self.costs.items():
            if cost.shape != (points,):
                raise ValueError(f"{axis} has {cost.shape} costs for {points} points")

    def mean(self, rows: np.ndarray | None = None) -> np.ndarray:
        """The lowest mean so far, at each point, over all seeds or the given rows. Of several
        draws of rows each has its own."""
        chosen = np.arange(len(self.seeds)) if rows is None else rows
        counts = (chosen[..., None] == np.arange(len(self.seeds))).sum(axis=-2)
        finite = np.isfinite(self.values)
        means = counts @ np.where(finite, self.values, 0.0) / chosen.shape[-1]
        means = np.where(counts @ ~finite > 0, np.inf, means)
        return np.minimum.accumulate(means, axis=-1)


@dataclass(frozen=True)
class Reached:
    """Where a curve reaches a level."""

    cost: Interval  # bounds are infinite where some draws of the seeds never reach it
    resolution: float  # the distance between the evaluations around it, of which it is a part


def reach(
    curve: QualityCurve,
    level: float,
    axis: str,
    *,
    draws: int = DRAWS,
    noise: np.ndarray | None = None,
) -> Reached | None:
    """The cost at which the mean over seeds first is at most `level`, between two evaluations by a
    straight line. None: it never is. `noise`: factors of the cost, one per draw, where the cost
    itself is uncertain, as measured seconds are."""
    costs = curve.costs[axis]
    place = float(arrival(curve.mean(), level))
    if math.isnan(place):
        return None
    at = float(cost_at(costs, place))
    last = math.ceil(place)
    resolution = float(costs[last] - costs[last - 1]) if last > 0 else 0.0
    n = len(curve.seeds)
    if n < 2:
        return Reached(Interval(at, -math.inf, math.inf, n, "one seed, no interval"), resolution)
    drawn = cost_at(costs, arrival(curve.mean(resampled(n, draws)), level))
    low, high = bounds(drawn if noise is None else drawn * noise)
    return Reached(Interval(at, low, high, n, f"95% bootstrap over {n} seeds"), resolution)


def arrival(falling: np.ndarray, level: float) -> np.ndarray:
    """The place, between two points by a straight line, at which falling curves (the last axis)
    first are at most the level; nan where they never are. Costs grow along the same line, so that
    a place has its cost on every axis."""
    below = falling <= level
    first = below.argmax(axis=-1)
    before = np.maximum(first - 1, 0)
    high = np.take_along_axis(falling, before[..., None], -1)[..., 0]
    low = np.take_along_axis(falling, first[..., None], -1)[..., 0]
    with np.errstate(invalid="ignore", divide="ignore"):
        share = (high - level) / (high - low)
    # at the first point, and after one that is not finite, there is nothing to draw a line from
    place = np.where((first > 0) & np.isfinite(high), before + share, first)
    return np.where(below.any(axis=-1), place, np.nan)


def cost_at(costs: np.ndarray, place: "np.ndarray | float") -> np.ndarray:
    """What was spent at a place; nan stays nan."""
    return np.interp(place, np.arange(len(costs)), costs)


def crossing(falling: np.ndarray, costs: np.ndarray, levels: np.ndarray) -> np.ndarray:
    """The cost at which falling curves first are at most each level, which is the last axis; nan
    where they never are."""
    return np.stack([cost_at(costs, arrival(falling, level)) for level in levels], axis=-1)


def resampled(n: int, draws: int) -> np.ndarray:
    """Rows of seeds, drawn with replacement; always the same ones, so that reports can be made
    again, and methods with equally many seeds are drawn in pairs."""
    return np.random.default_rng(n).integers(0, n, size=(draws, n))


def bounds(drawn: np.ndarray, level: float = 0.95) -> tuple[float, float]:
    """The middle `level` of the draws. Draws that are nan never reached it: they lie above all."""
    placed = np.sort(np.where(np.isnan(drawn), np.inf, drawn))
    tail = (1 - level) / 2
    last = len(placed) - 1
    return float(placed[math.floor(tail * last)]), float(placed[math.ceil((1 - tail) * last)])

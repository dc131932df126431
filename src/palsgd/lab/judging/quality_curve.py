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
        """The lowest mean so far, at each point, over all seeds or the given rows."""
        chosen = self.values if rows is None else self.values[rows]
        return np.minimum.accumulate(chosen.mean(axis=0))


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
    at = float(crossing(curve.mean(), costs, np.array([level]))[0])
    if math.isnan(at):
        return None
    place = int(np.searchsorted(costs, at))
    resolution = float(costs[place] - costs[place - 1]) if place > 0 else 0.0
    n = len(curve.seeds)
    if n < 2:
        return Reached(Interval(at, -math.inf, math.inf, n, "one seed, no interval"), resolution)
    drawn = np.array(
        [crossing(curve.mean(rows), costs, np.array([level]))[0] for rows in resampled(n, draws)]
    )
    low, high = bounds(drawn if noise is None else drawn * noise)
    return Reached(Interval(at, low, high, n, f"95% bootstrap over {n} seeds"), resolution)


def crossing(falling: np.ndarray, costs: np.ndarray, levels: np.ndarray) -> np.ndarray:
    """The cost at which a falling curve first is at most each level; nan where it never is."""
    first = np.array([int(np.argmax(falling <= level)) for level in levels])
    found = np.full(len(levels), np.nan)
    for number, (at, level) in enumerate(zip(first, levels, strict=True)):
        if falling[at] > level:
            continue
        if at == 0 or not np.isfinite(falling[at - 1]):  # nothing to draw a line from
            found[number] = costs[at]
            continue
        share = (falling[at - 1] - level) / (falling[at - 1] - falling[at])
        found[number] = costs[at - 1] + share * (costs[at] - costs[at - 1])
    return found


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

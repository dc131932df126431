"""How much a method cares about its settings: figures of a grid of final losses.

Losses are of one method, by setting; infinite where a run did not end with a finite loss. A loss is
above zero.
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

NEAR = 0.03  # a loss at most this share above the best is as good as the best
TRAINS = 2.0  # a loss below this many times the best is that of a run that trained
FIELDS = ("lr", "outer_lr", "outer_momentum", "sync_every")


@dataclass(frozen=True)
class Point:
    """A setting of the grid, with what its runs end with."""

    settings: Mapping[str, float]  # by FIELDS; a field that has no effect on the method is left out
    loss: float

    @property
    def heat(self) -> float:
        """About how far the global model may move in a round: H steps of size lr, times what the
        outer step makes of them. A field that is left out counts as a plain average does."""
        get = self.settings.get
        momentum = get("outer_momentum", 0.0)
        gain = get("outer_lr", 1.0) / (1 - momentum) if momentum < 1 else math.inf
        return get("lr", 1.0) * get("sync_every", 1.0) * gain


@dataclass(frozen=True)
class Robustness:
    """What a grid says about its method."""

    points: int
    best: float
    near_own: int  # points at most NEAR above the method's own best
    near_all: int  # points at most NEAR above the best of all methods
    hottest: Point | None  # that trains; None: nothing in the grid does


def robustness(points: Iterable[Point], best_of_all: float | None = None) -> Robustness:
    """`best_of_all`: the lowest loss that any method has; by default this one's."""
    grid = list(points)
    if not grid:
        raise ValueError("a grid without a point says nothing; give at least one")
    best = min(point.loss for point in grid)
    return Robustness(
        points=len(grid),
        best=best,
        near_own=_near(grid, best),
        near_all=_near(grid, best if best_of_all is None else best_of_all),
        hottest=hottest_that_trains(grid, best),
    )


def hottest_that_trains(points: Iterable[Point], best: float) -> Point | None:
    """The point with the highest heat among those that end below TRAINS times the best. Of equal
    heats the worst counts: nobody can rely on the better one."""
    trained = [each for each in points if math.isfinite(each.loss) and each.loss < TRAINS * best]
    return max(trained, key=lambda each: (each.heat, each.loss), default=None)


def _near(points: list[Point], best: float) -> int:
    if not math.isfinite(best):
        return 0
    return sum(each.loss <= best * (1 + NEAR) for each in points)

"""Successive halving over seeds: poor points are left early, and the others are tried again.

All points run with half of the seeds, and the better half of them with all. The two best are the
finalists: they run again with seeds that had no part in choosing them, and those decide. So the
winner's figure is hardly better by luck. Points are ranked by what an unlucky run of theirs ends
with, as somebody who trains once gets one seed. So one lucky seed does not make a winner.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, stdev

FINALISTS = 2
RULE = (
    "the lowest mean plus standard deviation over seeds, on the held out data: of all points with "
    "half of the seeds, of the better half with all, of the two best with fresh ones"
)
# Seeds of a search begin so far above the recipe's, so that no comparison has the same ones.
SEARCH_SEEDS, FRESH_SEEDS = 10_000, 20_000

Trial = tuple[str, int, int]  # method, point, seed
Judged = Mapping[Trial, float]  # lower is better, infinite where training failed
Run = Callable[[list[Trial]], Judged]


@dataclass(frozen=True)
class Outcome:
    """Of one method."""

    finalists: list[int]  # the winner first
    judged: dict[int, dict[int, float]]  # each finalist by fresh seed, lower is better
    trials: list[Trial]  # all that were run, in order

    @property
    def winner(self) -> int:
        return self.finalists[0]


def unlucky(values: Sequence[float]) -> float:
    """What a run may come to that is a standard deviation worse than the mean; lower is better.
    Infinite if one of the values is."""
    if not all(map(math.isfinite, values)):
        return math.inf
    return fmean(values) + (stdev(values) if len(values) > 1 else 0.0)


def rungs(points: int, seeds: int) -> list[tuple[int, int]]:
    """How many points run with how many seeds, from rung to rung, before the finalists."""
    found = [(points, math.ceil(seeds / 2))]
    if points > FINALISTS:
        found.append((max(FINALISTS, math.ceil(points / 2)), seeds))
    return found


def halve(
    methods: Sequence[str], points: int, seeds: int, first: int, run: Run
) -> dict[str, Outcome]:
    """The outcome of each method. `run` does the trials that are new and judges all;
    trials of all methods on a rung are handed over together, so that they can share programs."""
    left = {method: list(range(points)) for method in methods}
    done: dict[str, list[Trial]] = {method: [] for method in methods}
    judged: dict[Trial, float] = {}

    def tried(seeds: Sequence[int]) -> None:
        trials = [(m, point, seed) for m in methods for point in left[m] for seed in seeds]
        judged.update(run(trials))
        for trial in trials:
            if trial not in done[trial[0]]:
                done[trial[0]].append(trial)
        for method in methods:
            left[method].sort(key=lambda point: unlucky([judged[method, point, s] for s in seeds]))

    for count, many in rungs(points, seeds):
        left = {method: best[:count] for method, best in left.items()}
        tried([first + SEARCH_SEEDS + i for i in range(many)])
    left = {method: best[:FINALISTS] for method, best in left.items()}
    fresh = [first + FRESH_SEEDS + i for i in range(seeds)]
    tried(fresh)
    return {
        method: Outcome(
            left[method],
            {point: {s: judged[method, point, s] for s in fresh} for point in left[method]},
            done[method],
        )
        for method in methods
    }

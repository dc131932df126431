"""The speeds of unevenly fast workers, by which paced draws share out the steps of a round.

A speed is the gradients that a worker computes in some time, over those of the fastest worker.
Every sync's header has the seconds of a gradient step of each worker: data, forward, backward and
update, without exchanges and without waiting. All workers read the same headers and compute the
same speeds from them. New speeds hold from the next round that begins, so that a round's plan is
fixed before its first step, also where a delayed sync is applied within the round.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from palsgd.checks import check_int, in_error
from palsgd.schedule import check_speeds

Speeds = tuple[float, ...]
Settled = list[tuple[int, Speeds]]  # speeds, each with the first round they hold in

LEAST_ROUNDS, MOST_ROUNDS = 3, 5  # that speeds are taken from: the medians over the last of them
BAND = 0.125  # a worker whose speed changes by less than this share keeps its speed
DIGITS = 2  # decimal places of a speed


@dataclass(frozen=True, kw_only=True)
class Pacing:
    """How the speeds of a run are found: they are given, or measured."""

    workers: int
    fragments: int = 1
    given: Settled | None = None

    def __post_init__(self) -> None:
        wrong = next((v for _, v in self.given or [] if len(v) != self.workers), None)
        if wrong is not None:
            raise ValueError(
                f"speeds={in_error(list(wrong))} are of {len(wrong)} workers, and there are "
                f"{self.workers}; give one for each"
            )

    @property
    def measures(self) -> bool:
        return self.given is None and self.workers > 1

    @property
    def first(self) -> Settled:
        """What a run begins with: until speeds are measured, all are equal."""
        return [(0, (1.0,) * self.workers)] if self.given is None else list(self.given)

    def kept(self, rows: list[list[float]], seconds: list[float]) -> list[list[float]]:
        """The seconds of a gradient step at the last syncs, this one included."""
        return [*rows, seconds][-MOST_ROUNDS * self.fragments :]

    def settled(self, rows: list[list[float]], present: Speeds) -> Speeds | None:
        """The speeds after these syncs; None if the present ones still hold.

        A median is not moved by one odd round, such as a first one that compiles. A change within
        the band changes nothing, so that the jitter of equally fast workers leaves them equal."""
        columns = [[s for s in column if s > 0] for column in zip(*rows, strict=True)]
        if min(map(len, columns)) < LEAST_ROUNDS * self.fragments:
            return None
        seconds = [median(column) for column in columns]
        found = [min(seconds) / each for each in seconds]
        if all(abs(new / old - 1) <= BAND for new, old in zip(found, present, strict=True)):
            return None
        least = 10.0**-DIGITS
        return tuple(1.0 if v >= 1 - BAND else max(least, round(v, DIGITS)) for v in found)


def speeds_in(settled: Settled, round: int) -> Speeds:
    """The speeds that hold in a round."""
    return next((speeds for first, speeds in reversed(settled) if first <= round), settled[0][1])


def checked_speeds(speeds: Any) -> Settled | None:
    """The speeds that an optimizer is given: one for each worker, or a ledger's record of those
    that were measured, which a replay repeats. None: they are to be measured."""
    if speeds is None:
        return None
    if not isinstance(speeds, Sequence) or isinstance(speeds, str) or not speeds:
        return [(0, check_speeds(speeds))]
    if not isinstance(speeds[0], Mapping):
        return [(0, check_speeds(speeds))]
    try:
        found = [(check_int("round", entry["round"]), entry["speeds"]) for entry in speeds]
    except (KeyError, TypeError):
        found = []
    rounds = [round for round, _ in found]
    if not found or rounds != sorted(rounds):
        raise ValueError(
            f"speeds={in_error(speeds)} must be numbers, one for each worker, or what a run's "
            'ledger.speeds has: [{"round": 0, "speeds": [1.0, 1.0]}, ...] in the order of rounds'
        )
    return [(round, check_speeds(each)) for round, each in found]


def as_records(settled: Settled) -> list[dict[str, Any]]:
    """Speeds as a ledger has them."""
    return [{"round": round, "speeds": list(speeds)} for round, speeds in settled]

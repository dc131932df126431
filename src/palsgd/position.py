"""Where the workers of a run stand, compared in a small message of its own.

Workers that resume from states of different syncs, or whose two optimizers sync in another order,
would send messages of unequal size to each other, at which gloo ends the process. A message whose
size is always the same can be read by all, and tells them apart first.
"""

import weakref
from collections.abc import Generator
from typing import Any, ClassVar, NamedTuple

from torch import Tensor

from palsgd.errors import ConsensusError
from palsgd.rows import halves, joined, own_row, rows_of_all
from palsgd.transports.transport import Message, Transport

WARMUP, OPENING, SYNC, FINISH = PHASES = (
    "a step of the warm-up",
    "the start of the local phase",
    "sync",
    "finish()",
)
_NUMBERS = 6  # that a worker sends


class Position(NamedTuple):
    """What a worker is about to exchange."""

    phase: str
    clock: int
    sync: int  # how many syncs are behind it
    optimizer: int  # which of the process's optimizers, in the order in which they were built

    def __str__(self) -> str:
        if self.phase == FINISH:  # workers finish at any clock of a round
            return self.phase
        place = f"sync {self.sync}" if self.phase == SYNC else self.phase
        return f"{place} (clock {self.clock})"


class PositionCheck:
    """Whether the workers compare where they stand before the next exchange of this optimizer."""

    def __init__(self) -> None:
        self.optimizer = 0  # which of the optimizers of this process it is
        self.crowded = False  # do other optimizers use the same process group?
        self.due = False  # before the next exchange, as after a load?

    def compare(
        self, phase: str, clock: int, sync: int, row: tuple[int, int], like: Tensor
    ) -> Generator[Message, int, None]:
        """Raise unless all workers are about to exchange the same. This is done for the first
        exchange after a load and, if several optimizers share a process group, before each. `row`
        has the number of this worker and the number of workers."""
        worker, workers = row
        if workers == 1 or not (self.due or self.crowded):
            return
        clock = 0 if phase == FINISH else clock  # workers finish at any clock of a round
        values = encode(worker, workers, Position(phase, clock, sync, self.optimizer), like)
        # The message is not in the ledger, so that the ledger of a resumed run is that of a run
        # that was never interrupted.
        yield Message(values)
        check(values, workers)
        self.due = False


def encode(worker: int, workers: int, mine: Position, like: Tensor) -> Tensor:
    line = [PHASES.index(mine.phase), *halves(mine.clock), *halves(mine.sync), mine.optimizer]
    return own_row(worker, workers, line, like)


def check(mean: Tensor, workers: int) -> None:
    """Raise the same error on every worker unless all are at the same place."""
    found = [_position(line) for line in rows_of_all(mean, workers)]
    first, other = found[0], next((p for p in found if p != found[0]), None)
    if other is None:
        return
    number = found.index(other)
    if other.optimizer != first.optimizer:
        raise ConsensusError(
            f"the syncs of two optimizers in one process cross: worker 0 is at {first} of "
            f"optimizer {first.optimizer}, worker {number} at {other} of optimizer "
            f"{other.optimizer}; use draws='balanced', and step each optimizer equally often on "
            "all workers"
        )
    raise ConsensusError(
        f"checkpoints of different syncs: worker 0 is at {first}, worker {number} at {other}; load "
        "states that all workers saved where opt.may_save was True, as palsgd.checkpoint does"
    )


def _position(line: list[float]) -> Position:
    phase = PHASES[round(line[0]) % len(PHASES)]
    return Position(phase, joined(*line[1:3]), joined(*line[3:5]), round(line[5]))


class Company:
    """The workers of the optimizers of this process whose messages go through one channel."""

    _all: ClassVar["weakref.WeakKeyDictionary[Any, Company]"] = weakref.WeakKeyDictionary()

    def __init__(self) -> None:
        self.built = 0
        self.members: weakref.WeakSet[Any] = weakref.WeakSet()

    @classmethod
    def of(cls, channel: Any) -> "Company":
        return cls._all.setdefault(channel, cls())

    def check_others(self, member: Any) -> None:
        """Refuse an optimizer beside another one with a channel of its own, if the workers reach
        the syncs of the two in different orders. Each would wait for the other on another worker,
        and no message could tell."""
        others = [each for each in self._all.values() if each is not self]
        waiting = [one for each in others for one in each.members if not one.at.synced]
        if member.course.draws_alone and any(one.course.draws_alone for one in waiting):
            raise ValueError(
                "two optimizers in one process, each with a group of its own, would wait for each "
                f"other with draws={member.facts.draws!r}, as their syncs come in another order on "
                "every worker; use draws='balanced' for both"
            )

    def join(self, member: Any) -> int:
        """The number of a new member, from 0."""
        self.members.add(member)
        self.built += 1
        return self.built - 1


def join_company(worker: Any, transport: Transport) -> None:
    """Have the optimizers that use the same process group compare, before each sync, which of them
    it is of. The workers agree whether there are several, as one may have dropped an optimizer that
    another still holds."""
    channel = transport.channel
    if transport.workers == 1 or channel is transport:
        return  # nobody else uses its channel
    company = Company.of(channel)
    company.check_others(worker)
    worker.position.optimizer = company.join(worker)
    several = worker.warmup.template.new_tensor([float(len(company.members) > 1)])
    transport.mean(Message(several))
    if several.item() > 0:
        for member in company.members:
            member.position.crowded = True

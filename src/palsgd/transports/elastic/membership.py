"""Who takes part: the workers meet in the store before each exchange and vote after it.

A meeting is numbered. Every worker of the last one comes to it, unless it is gone, or late where
there is a deadline. The first who sees that nobody else can come proposes the list of those who
have; the first proposal counts, so all work with the same list. After the exchange they vote: it
counts if every worker that is still there has all of it. Otherwise nobody applies it, and those who
are left meet again.

Why a vote in the store, and not one more all-reduce: worker 2 may die while it sends the last piece
of an all-reduce. Worker 0 has that piece then and worker 1 has not, so worker 0 would apply the
sync and worker 1 would repeat it. The same may happen to the all-reduce of a vote. A key of the
store is set once, so the two cannot disagree.
"""

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple, NoReturn

from palsgd.errors import ConsensusError, SyncError
from palsgd.transports.elastic.board import Board, Start
from palsgd.transports.elastic.doorbell import Address, Doorbell, Lookout, answers
from palsgd.transports.requests import LeftOutError, RepeatError

START_S = 1800.0  # how long the workers that begin a run wait for each other, as torch does
_LOOK_S = 0.1  # between two looks whether those who have not come are gone
_KEPT = 64  # meetings whose keys stay in the store, for workers that are late
_APPLY, _REPEAT = "apply", "repeat"


@dataclass(frozen=True)
class Newcomer:
    """A worker that waits to be let in."""

    number: int  # that it is to have, as far as is known at this meeting
    wish: int | None  # the number that it would like to have
    address: Address
    ticket: int
    fresh: bool  # does it lack an inner state of its own?


@dataclass
class Roster:
    """The workers of a meeting, by their numbers."""

    members: dict[int, Address] = field(default_factory=dict)
    newcomers: list[Newcomer] = field(default_factory=list)  # who are let in after this sync
    heard: int = 0  # the last announcement that was read
    position: str = ""  # of the worker that proposed it

    def as_note(self) -> dict[str, Any]:
        return {
            "members": [[number, *self.members[number]] for number in sorted(self.members)],
            "newcomers": [[n.number, n.wish, *n.address, n.ticket, n.fresh]
                          for n in self.newcomers],
            "heard": self.heard,
            "position": self.position,
        }  # fmt: skip

    @classmethod
    def of_note(cls, note: dict[str, Any]) -> "Roster":
        return cls(
            {number: (host, port) for number, host, port in note["members"]},
            [Newcomer(number, wish, (host, port), ticket, fresh)
             for number, wish, host, port, ticket, fresh in note["newcomers"]],
            note["heard"],
            note["position"],
        )  # fmt: skip


class Welcome(NamedTuple):
    """Who gives the state of the run to whom."""

    company: list[int]  # the member that gives it, and the newcomers
    fresh: bool  # does a newcomer lack an inner state of its own?

    @property
    def source(self) -> int:
        return self.company[0]


class Membership:
    """This worker's place among the others."""

    def __init__(
        self,
        board: Board,
        start: Start,
        *,
        min_workers: int,
        deadline: float | None,
        timeout: float,
    ):
        self._board, self._wish = board, start.number
        self._min_workers, self._deadline, self._timeout = min_workers, deadline, timeout
        self._bell = Doorbell(board.host)
        # A newcomer does not know its number before it is let in.
        self.number, self.meeting = start.number or 0, 0
        self.roster = Roster()
        self.outside = True  # is this worker still to be let in?
        self._begin(start.founders or min_workers)

    @property
    def members(self) -> list[int]:
        return sorted(self.roster.members)

    # -- the beginning of a run ------------------------------------------------------------------

    def _begin(self, founders: int) -> None:
        """Wait for the workers that begin the run with this one. One that comes when they are
        complete is a newcomer."""
        board, place = self._board, self._board.count("founders")
        if place > founders:
            return
        number = place - 1 if self._wish is None else self._wish
        board.note(f"founder {place}", [number, *self._bell.address])
        found = [self._founder(place, founders) for place in range(1, founders + 1)]
        members = {number: (host, port) for number, host, port in found}
        if len(members) < founders:
            raise ValueError(
                f"the {founders} workers have the numbers {sorted(n for n, *_ in found)}; give "
                "every worker a RANK of its own"
            )
        self.number, self.roster, self.outside = number, Roster(members), False

    def _founder(self, place: int, founders: int) -> Any:
        key = f"founder {place}"
        found = self._awaited(lambda: self._board.read(key), time.monotonic() + START_S)
        if found is None:
            raise SyncError(
                f"only {place - 1} of {founders} workers have come within {START_S:.0f} s; start "
                "the others, or set WORLD_SIZE to the number of workers that begin the run"
            )
        return found

    def _awaited(self, look: Callable[[], Any], until: float) -> Any:
        """What `look` finds, as soon as it finds something; None if it finds nothing until then."""
        pause = 0.0005
        while (found := look()) is None and time.monotonic() < until:
            time.sleep(pause)
            pause = min(0.02, pause * 1.5)
        return found

    # -- a meeting -------------------------------------------------------------------------------

    def meet(self, position: str, *, patient: bool) -> None:
        """Find out with whom the next exchange is. `patient`: there is no deadline.

        Raises:
            LeftOutError: the others have gone on without this worker.
            SyncError: fewer workers are left than the run needs.
        """
        self._bell.answer()
        self.meeting += 1
        self._check_passed()
        self._take(Roster.of_note(self._come(position, patient)), position)

    def _come(self, position: str, patient: bool) -> dict[str, Any]:
        key, members = f"roster {self.meeting}", self.members
        self._board.note(_key("come", self._bell.address), self.meeting)
        if self._board.count(f"came {self.meeting}") == len(members):
            return self._board.decide(key, self._proposal(position, members, []))
        limited = self._deadline is not None and not patient
        until = time.monotonic() + (self._deadline or 0.0) if limited else None
        return self._decided(key, "come", partial(self._proposal, position), until)

    def _proposal(self, position: str, present: list[int], late: list[int]) -> dict[str, Any]:
        """The roster of a meeting to which these members have come. Newcomers that have waited
        since the last one are numbered anew: the worker whose place one of them takes may have been
        there then, and be gone now. One that is only late keeps its number."""
        old, heard = self.roster, self.roster.heard
        asking = [(n.wish, n.address, n.ticket, n.fresh) for n in old.newcomers]
        while (found := self._board.read(f"newcomer {heard + 1}")) is not None:
            heard += 1
            wish, host, port, fresh = found
            asking.append((wish, (host, port), heard, fresh))
        waiting: list[Newcomer] = []
        for wish, address, ticket, fresh in asking:
            if answers(address) is not False:
                number = _free(wish, [*present, *late, *(n.number for n in waiting)])
                waiting.append(Newcomer(number, wish, address, ticket, fresh))
        members = {number: old.members[number] for number in present}
        return Roster(members, waiting, heard, position).as_note()

    def _take(self, roster: Roster, position: str) -> None:
        if self.number not in roster.members:
            self.outside = True
            raise LeftOutError
        self.roster = roster
        self._board.note("latest", {"meeting": self.meeting, "roster": roster.as_note()})
        self._forget(self.meeting - _KEPT)
        if len(self.members) < self._min_workers:
            raise SyncError(
                f"{len(self.members)} of at least {self._min_workers} workers are left "
                f"({', '.join(map(str, self.members))}); the global model is unchanged. Start "
                "others from a checkpoint, or lower min_workers"
            )
        if roster.position != position:
            raise ConsensusError(
                f"the workers are not at the same sync: this is worker {self.number} at "
                f"{position}, another one is at {roster.position}; load states that all workers "
                "saved where opt.may_save was True, as palsgd.checkpoint does"
            )

    def _forget(self, meeting: int) -> None:
        """Delete the keys of an old meeting. Each member deletes some of them."""
        place, members = self.members.index(self.number), len(self.members)
        if meeting > 0:
            kinds = ("came", "roster", "votes", "verdict")[place::members]
            self._board.forget(*(f"{kind} {meeting}" for kind in kinds))

    def check_there(self, members: Iterable[int]) -> None:
        """Raise a RuntimeError if one of these members is gone already."""
        for number in members:
            if number != self.number and answers(self.roster.members[number]) is False:
                raise RuntimeError(f"worker {number} is gone")

    def _decided(
        self,
        key: str,
        stage: str,
        propose: Callable[[list[int], list[int]], Any],
        until: float | None,
    ) -> Any:
        """What is decided under `key`. This worker proposes it itself when all who have not come to
        the stage are gone, or when the time is over. `propose` is given those who have come and
        those who are only late."""
        late = self.members  # as far as is known before the first look
        with Lookout(self.roster.members, self._timeout) as lookout:
            while True:
                limit = time.monotonic() + _LOOK_S
                limit = limit if until is None else min(limit, until)
                found = self._awaited(lambda: self._board.read(key), limit)
                if found is not None:
                    return found
                over = until is not None and time.monotonic() >= until
                present = self._present(stage)
                if not over:  # a last look would cost a second if somebody gives no answer
                    absent = [n for n in self.members if n not in present]
                    gone = lookout.gone(absent)
                    late = [n for n in absent if n not in gone]
                self._check_passed()  # before it decides under a key that the others have forgotten
                if over or not late:
                    return self._board.decide(key, propose(present, late))

    def _present(self, stage: str) -> list[int]:
        """The workers that have come to a stage of this meeting."""
        keys = {number: _key(stage, address) for number, address in self.roster.members.items()}
        return [n for n, key in keys.items() if self._board.read(key) == self.meeting]

    def _check_passed(self) -> None:
        """A worker that is late by many meetings does not find their keys any more."""
        latest = self._board.read("latest")
        if latest is not None and latest["meeting"] > self.meeting + _KEPT // 2:
            self.outside = True
            raise LeftOutError

    # -- the vote --------------------------------------------------------------------------------

    def settle(self) -> None:
        """Agree whether the exchange of this meeting counts, of which this worker has all.

        Raises:
            RepeatError: it does not count, and those who are left meet again.
        """
        key = f"verdict {self.meeting}"
        self._board.note(_key("voted", self._bell.address), self.meeting)
        if self._board.count(f"votes {self.meeting}") == len(self.members):
            verdict = self._board.decide(key, _APPLY)
        else:
            until = time.monotonic() + self._timeout
            verdict = self._decided(key, "voted", lambda *_: _APPLY, until)
        if verdict == _REPEAT:
            raise RepeatError

    def fail(self) -> NoReturn:
        """Vote against the exchange of this meeting, of which this worker lacks a part.

        Raises:
            RepeatError: those who are left meet again.
            LeftOutError: the others had given this worker up, and have applied the exchange.
        """
        if self._board.decide(f"verdict {self.meeting}", _REPEAT) == _REPEAT:
            raise RepeatError
        self.outside = True
        raise LeftOutError

    # -- newcomers -------------------------------------------------------------------------------

    def admit(self) -> Welcome:
        """Let in those who wait. Every member tells them, as any member may be lost."""
        old, newcomers = self.roster, self.roster.newcomers
        members = old.members | {n.number: n.address for n in newcomers}
        self.roster = Roster(members, [], old.heard)
        company = [min(old.members), *(n.number for n in newcomers)]
        note = {"meeting": self.meeting, "company": company, "roster": self.roster.as_note()}
        for newcomer in newcomers:
            self._board.note(f"admitted {newcomer.ticket}", note | {"number": newcomer.number})
        return Welcome(company, any(n.fresh for n in newcomers))

    def join(self, *, fresh: bool) -> Welcome:
        """Wait until the others let this worker in."""
        self._bell.close()  # nobody waits for the worker that this was
        self._bell = Doorbell(self._board.host)
        wish = self._wish if fresh else self.number
        found = None
        while found is None:
            found = self._admission(self._announce([wish, *self._bell.address, fresh]))
        self.number, self.meeting = found["number"], found["meeting"]
        self.roster, self.outside = Roster.of_note(found["roster"]), False
        return Welcome(found["company"], fresh)

    def _announce(self, announcement: list[Any]) -> int:
        """Write the announcement under the next number that is free, its ticket.

        Members read on from the last ticket to the first that is not there. So a ticket is taken by
        writing the announcement: if a newcomer drew a number first, members that met before it
        wrote would read past it. An equal announcement that was not read yet is that of a process
        which is gone, as this one has its port now.
        """
        latest = self._board.read("latest")
        ticket = 1 if latest is None else latest["roster"]["heard"] + 1
        while self._board.decide(f"newcomer {ticket}", announcement) != announcement:
            ticket += 1
        return ticket

    def _admission(self, ticket: int) -> Any:
        """The admission of a ticket; None if the members have read on and did not see it."""
        key = f"admitted {ticket}"
        while True:
            found = self._awaited(lambda: self._board.read(key), time.monotonic() + 1.0)
            if found is not None:
                return found
            self._bell.answer()
            latest = self._board.read("latest")
            if latest is None:  # the first meeting has not been yet
                continue
            roster = Roster.of_note(latest["roster"])
            self._check_anybody_left(roster)
            if roster.heard >= ticket and all(n.ticket != ticket for n in roster.newcomers):
                return self._board.read(key)

    def _check_anybody_left(self, roster: Roster) -> None:
        if all(answers(address) is False for address in roster.members.values()):
            raise SyncError(
                f"none of the workers {', '.join(map(str, sorted(roster.members)))} of this run is "
                "left to let a newcomer in; start the run again from a checkpoint, with a new store"
            )


def _key(stage: str, address: Address) -> str:
    """Where a worker writes to which meeting it has come. The key has its address, not its number:
    one that is late writes there when another has its number already. No two that are alive have
    one address."""
    host, port = address
    return f"{stage} {host} {port}"


def _free(wish: int | None, taken: list[int]) -> int:
    """The number of a newcomer: the one that it would like to have, or the lowest that is free."""
    if wish is not None and wish not in taken:
        return wish
    return next(number for number in range(len(taken) + 1) if number not in taken)

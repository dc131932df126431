"""Exchanges between workers that may leave and come while training goes on.

Those who are there meet before an exchange, and repeat it if one of them is lost in it. A worker
that the others have gone on without joins them again, as a newcomer does. Where workers stay the
same, an exchange simply runs.
"""

from collections.abc import Callable, Generator
from typing import TypeVar

from palsgd.bookkeeping import Bookkeeping
from palsgd.checks import warn
from palsgd.course import Course
from palsgd.guard import Guard
from palsgd.transports.requests import (
    Admit,
    Exchange,
    Join,
    LeftOutError,
    Meet,
    RepeatError,
    Request,
    Settle,
)

_WELCOME = "the welcome of newcomers"  # where workers meet after they have let others in
_Outcome = TypeVar("_Outcome")


class Meetings:
    def __init__(self, course: Course, guard: Guard, books: Bookkeeping):
        self._course, self._guard, self._books = course, guard, books
        self._members = guard.members  # the workers that took part in the last exchange

    def together(
        self,
        where: str,
        exchange: Callable[[], Generator[Request, int, _Outcome]],
        *,
        patient: bool = False,
    ) -> Generator[Request, int, _Outcome]:
        """Run an exchange. If workers may leave, those who are there run it, and run it again if
        one of them is lost meanwhile. `patient`: there is no deadline."""
        if not self._guard.elastic:
            return (yield from exchange())
        while True:
            yield from self._meet(where, patient=patient)
            try:
                return (yield from exchange())
            except RepeatError:
                continue

    def _meet(self, where: str, *, patient: bool = False) -> Exchange:
        met = False
        while not met:
            try:
                yield Meet(where, patient)
                met = True
            except RepeatError:  # a worker was lost while the others connected
                continue
        self._note_members()

    def or_join(self, where: str, exchange: Exchange) -> Exchange:
        """Run an exchange; if the others have gone on without this worker, join them again."""
        try:
            yield from exchange
        except LeftOutError:
            at = self._course.at
            steps = at.clock - min(at.sent_at) if at.has_anchor else at.clock
            warn(
                f"worker {self._course.number} came too late to {where}: the others have gone on "
                f"without it, so it drops its {steps} steps since its last sync and goes on from "
                "their global model; raise the deadline if that happens often"
            )
            yield from self.join(fresh=False)

    def let_in(self) -> Exchange:
        """Give the state after this sync to newcomers, who train from here on. At the end of
        training nobody is let in."""
        over = self._course.at_end or self._guard.finished
        if self._guard.awaits_newcomers and not over:
            yield Admit()
            yield from self._welcome()

    def join(self, *, fresh: bool) -> Exchange:
        """Wait until the others let this worker in, and go on from their state. A fresh worker has
        no inner state of its own."""
        while True:
            yield Join(fresh)
            self._members = self._guard.members
            try:
                yield from self._welcome()
                return
            except LeftOutError:
                continue

    def _welcome(self) -> Exchange:
        """Meet those who were let in, and agree that all are connected. Otherwise a worker that has
        lost another one here would meet here again, while the others are on their way to the next
        sync."""

        def agree() -> Exchange:
            yield Settle()

        yield from self.together(_WELCOME, agree, patient=True)

    def _note_members(self) -> None:
        """Take notice of the workers that have left and come."""
        before, now = self._members, self._guard.members
        self._members = now
        if now == before and self._course.facts.workers == len(now):
            return
        self._course.regroup(self._guard.worker, len(now))
        left, joined = ([n for n in a if n not in b] for a, b in ((before, now), (now, before)))
        self._books.members_changed(left, joined)

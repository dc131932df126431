"""The transport of workers that may leave and come while training goes on."""

import math
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from typing import Any, NoReturn
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.distributed import ProcessGroup, Store

from palsgd.checks import check_int, check_number
from palsgd.errors import SyncError
from palsgd.transports.background import Background
from palsgd.transports.elastic import parcel
from palsgd.transports.elastic.board import Board, find_start
from palsgd.transports.elastic.generation import Generation
from palsgd.transports.elastic.membership import Membership
from palsgd.transports.requests import RepeatError
from palsgd.transports.transport import Message, Transport, check_agreement

_ATTEMPTS = 3  # failures of an exchange between workers that are all there, before it is given up


class ElasticTransport(Transport):
    """Training goes on without a worker that is dead or late, and lets newcomers in at a sync.

    Workers meet in a store, which must live outside of them: `python -m palsgd.transports.elastic
    HOST:PORT` holds one, and `MASTER_ADDR` and `MASTER_PORT` say where it is. A program that uses
    this transport does not call `init_process_group`, as a newcomer could not.

    A worker that dies is left out of the mean of the sync that it did not reach, and so is one that
    comes to it `deadline` seconds after the first. A late worker goes on from the global model of
    the others: it loses its steps since its last sync. A worker keeps its number, `worker`, as long
    as it takes part; data are cut by it. A newcomer takes the number that `RANK` says, or the
    lowest that is free.

    Args:
        group: the process group whose workers begin the run, if torch.distributed is initialised.
            Newcomers have none.
        min_workers: the run ends with a `SyncError` when fewer workers are left. Where neither a
            group nor `WORLD_SIZE` says how many workers begin the run, so many do.
        deadline: seconds from the first worker's arrival at a sync after which the others are left
            out; None: a sync waits for every worker that is alive.
        store: the `torch.distributed.Store` of the run, instead of the one that the environment
            names.
        timeout: seconds for which an exchange may stand still, and for which a machine may give no
            answer.

    Example:
        >>> import torch, palsgd
        >>> store = torch.distributed.HashStore()
        >>> transport = palsgd.ElasticTransport(min_workers=1, store=store)
        >>> transport.workers, transport.worker
        (1, 0)
    """

    elastic = True

    def __init__(
        self,
        group: ProcessGroup | None = None,
        *,
        min_workers: int = 1,
        deadline: float | None = None,
        store: Store | None = None,
        timeout: float = 30.0,
    ):
        check_int("min_workers", min_workers, least=1)
        for name, seconds in (("deadline", deadline), ("timeout", timeout)):
            if seconds is not None:
                check_number(name, seconds, "a number of seconds > 0", low=0.0, high=math.inf)
        start = find_start(group, store)
        self._timeout = timeout
        self._board = Board(start.store)
        self._membership = Membership(
            self._board, start, min_workers=min_workers, deadline=deadline, timeout=timeout
        )
        self._agreed = False
        self._now: Generation | None = None  # of the last meeting
        self._behind: Generation | None = None  # of the same workers, for the background
        self._background: Background | None = None
        self._device: torch.device | None = None  # of messages that travel in the background
        self._flying: WeakKeyDictionary[Message, Future[int]] = WeakKeyDictionary()
        self._failures = 0  # in a row, between the same workers

    # -- who takes part --------------------------------------------------------------------------

    @property
    def worker(self) -> int:  # type: ignore[override]
        return self._membership.number

    @property
    def workers(self) -> int:  # type: ignore[override]
        return max(1, len(self._membership.members))

    @property
    def members(self) -> tuple[int, ...]:
        return tuple(self._membership.members) or (self.worker,)

    @property
    def place(self) -> int:
        return self.members.index(self.worker)

    @property
    def outside(self) -> bool:
        """Is this worker still to be let in?"""
        return self._membership.outside

    @property
    def awaits_newcomers(self) -> bool:  # type: ignore[override]
        """Are newcomers let in after this sync?"""
        return bool(self._membership.roster.newcomers)

    def meet(self, position: str, *, patient: bool = False) -> None:
        before = self.members
        self._membership.meet(position, patient=patient)
        if self.members != before:
            self._break_up()
        if self._now is None:
            self._watched(self._gather_up)

    def _gather_up(self) -> int:
        """Make the groups of the workers of this meeting."""
        self._now = self._generation("now", self.members)
        if self._device is not None:
            self._behind = self._generation("behind", self.members)
        return 0

    def _generation(self, kind: str, members: Sequence[int]) -> Generation:
        """A group of these workers. gloo would wait for one that is gone until the time is over."""
        self._membership.check_there(members)
        name, place = f"{kind} {self._membership.meeting}", members.index(self.worker)
        return Generation(self._board.store, name, place, len(members), self._timeout)

    def _break_up(self) -> None:
        """Drop the groups. Workers that wait in one of them notice that its connections close. An
        exchange in the background that still waits keeps its thread and its group."""
        self._now = self._behind = None
        if any(not future.done() for future in self._flying.values()):
            self._background = None
        self._flying.clear()
        self._failures = 0

    def settle(self) -> None:
        try:
            self._membership.settle()
        except RepeatError:
            self._break_up()  # all workers make their groups anew
            raise
        self._failures = 0

    def _fail(self, error: RuntimeError) -> NoReturn:
        """This worker lacks a part of the exchange, so nobody may apply it."""
        if isinstance(error, torch.OutOfMemoryError):
            raise error
        failures, reason = self._failures + 1, str(error).strip().splitlines()[0]
        self._break_up()
        self._failures = failures
        if failures > _ATTEMPTS:
            raise SyncError(
                f"{self.workers} workers are all there and could not exchange in {failures} "
                f"attempts ({reason}); look at the links between them, or raise timeout"
            )
        self._membership.fail()

    # -- exchanges -------------------------------------------------------------------------------

    @property
    def _group(self) -> Generation:
        assert self._now is not None
        return self._now

    def mean(self, message: Message) -> None:
        self._group.mean(message)

    def scatter(self, rows: Tensor) -> Tensor:
        return self._group.scatter(rows)

    def gather(self, row: Tensor) -> Tensor:
        return self._group.gather(row)

    def exchange(self, message: Message) -> int:
        return self._watched(lambda: self._group.exchange(message))

    def _watched(self, call: Callable[[], int]) -> int:
        try:
            return call()
        except RuntimeError as error:
            failure = error.with_traceback(None)  # its frames would keep the connections open
        self._fail(failure)

    def prepare(self, device: torch.device) -> None:
        self._device = device

    def start(self, message: Message) -> None:
        assert self._behind is not None
        assert self._device is not None
        if self._background is None:
            self._background = Background(self._device)
        behind = self._behind
        self._flying[message] = self._background.submit(lambda: behind.exchange(message))

    def finish(self, message: Message) -> int:
        return self._watched(self._flying[message].result)

    # -- newcomers -------------------------------------------------------------------------------

    def admit(self, gift: Callable[[bool], Any]) -> None:
        """Let newcomers in. The lowest member sends them what `gift(fresh)` makes; `fresh`: does
        one of them lack an inner state of its own?"""
        welcome = self._membership.admit()
        self._break_up()
        if welcome.source != self.worker:
            return
        given = gift(welcome.fresh)
        with suppress(RuntimeError):  # whoever is lost is missed at the next meeting
            parcel.send(given, self._generation("welcome", welcome.company))

    def join(self, *, fresh: bool) -> Any:
        """Wait until the others let this worker in. Returns what they give to it."""
        while True:
            self._break_up()
            welcome = self._membership.join(fresh=fresh)
            try:
                return parcel.receive(self._generation("welcome", welcome.company), source=0)
            except RuntimeError:
                continue  # somebody was lost meanwhile

    # -- settings --------------------------------------------------------------------------------

    def agree(self, settings: dict[str, Any]) -> None:
        """Compare the settings with those of the worker that came first. Only a worker whose
        settings differ raises, and the others go on without it."""
        if self._agreed:
            raise ValueError(
                "an ElasticTransport is for one optimizer; make another one for the next optimizer"
            )
        self._agreed = True
        mine = {name: repr(value) for name, value in settings.items()}
        theirs = self._board.decide("settings", mine)
        check_agreement([theirs, mine], ["the first worker", f"worker {self.worker}"])

"""A line about those that an exchange waits for.

A rank that has waited for a second notes so in the store of the process group, in a thread of its
own. After ten seconds the thread reads who has not: those are waited for. An exchange that is
quicker costs nothing but the time of two assignments.
"""

import logging
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from palsgd.process_groups import ranks_of
from palsgd.transports.lost import is_lost_peer, lost_peer

log = logging.getLogger("palsgd")

NOTED_S = 1.0  # a rank that has waited for so long notes that it is there
PATIENCE_S = 10.0  # after so long it says who is not
_STORE_S = 2.0  # a store that does not answer within so long is taken for lost
_TICK_S = 0.25

Found = TypeVar("Found")


class Watch:
    """What this rank waits for in one process group. All its ranks count the exchanges alike."""

    def __init__(self, group: ProcessGroup | None):
        self.names = [f"rank {rank}" for rank in ranks_of(group)]
        self._own = dist.get_rank(group)
        self._store = _store_of(group)
        self._number = 0  # of exchanges so far
        self._came = 0.0  # when this rank came to the last one
        self._present: float | None = None  # since when this rank is in the exchange
        self._waiting: float | None = None  # since when the training loop waits for it
        self._event: Any = None  # on a GPU the exchange is over when this is
        self._noted = self._said = -1

    @contextmanager
    def present(self, values: Tensor | None = None) -> Iterator[None]:
        """Inside, this rank takes part in the next exchange. On a GPU it goes on to do so until
        the device has exchanged the `values`."""
        self._event, self._came = None, time.monotonic()
        self._present = self._came
        self._number += 1
        try:
            yield
        finally:
            if values is not None and values.is_cuda:
                self._event = torch.cuda.Event()
                self._event.record()
            else:
                self._present = None

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Inside, the training loop waits for the exchange."""
        self._waiting = time.monotonic()
        try:
            yield
        finally:
            self._waiting = None

    def look(self) -> None:
        """Note that this rank is there, or say who is not, if it is time to."""
        number, now = self._number, time.monotonic()
        if self._event is not None and self._event.query():
            self._event = self._present = None
        present, waiting = self._present, self._waiting
        if present is not None and now - present > NOTED_S and self._noted < number:
            self._noted = number
            self._answer(lambda: self._note(number))
        if waiting is not None and now - waiting > PATIENCE_S and self._said < number:
            missing = self._answer(lambda: self._missing(number))
            if missing != [] and self._waiting == waiting:
                self._said = number
                self._say(missing, now - waiting)

    @property
    def own(self) -> str:
        """The name of this rank."""
        return self.names[self._own]

    def lost(self) -> list[str]:
        """The names of those who did not come to the last exchange, which has failed; empty if
        nobody knows. One of two is always known. Among more, those who waited have noted so, unless
        all was over within a moment."""
        others = [name for name in self.names if name != self.own]
        if len(others) == 1:
            return others
        noted = time.monotonic() - self._came > 2 * (NOTED_S + _TICK_S)
        missing = self._answer(lambda: self._missing(self._number)) if noted else None
        return [self.names[index] for index in missing or []]

    def _say(self, missing: list[int] | None, seconds: float) -> None:
        names = ", ".join(self.names[index] for index in missing or [])
        whom = f"not there yet: {names}" if names else "who is not there cannot be told"
        log.warning(
            "palsgd: %s has waited for the others for %.0f s; %s",
            self.own, seconds, whom,
        )  # fmt: skip

    def _note(self, number: int) -> None:
        self._store.set(_key(self._own), str(number))

    def _missing(self, number: int) -> list[int]:
        """Those of the group that have not noted this exchange."""
        return [
            index
            for index in range(len(self.names))
            if index != self._own and self._last_noted(index) < number
        ]

    def _last_noted(self, index: int) -> int:
        key = _key(index)
        return int(self._store.get(key)) if self._store.check([key]) else -1

    def _answer(self, question: Callable[[], Found]) -> Found | None:
        """What the store answers. None: it is lost, or busy with a question of another thread."""
        found: list[Found] = []

        def ask() -> None:
            try:
                found.append(question())
            except Exception:  # whatever a store raises, there is no answer
                log.debug("palsgd: the store did not answer", exc_info=True)
                self._store = None  # it does not come back, and torch prints a page for each try

        if self._store is not None:
            asking = threading.Thread(target=ask, daemon=True)
            asking.start()
            asking.join(_STORE_S)
        return found[0] if found else None


def _key(index: int) -> str:
    return f"palsgd/waiting/{index}"


def _store_of(group: ProcessGroup | None) -> Any:
    from torch.distributed.distributed_c10d import _get_process_group_store

    whole: Any = group or dist.group.WORLD
    try:
        return _get_process_group_store(whole)
    except KeyError:  # a group that torch did not make; its questions have no answer
        return None


_watches: WeakKeyDictionary[ProcessGroup, Watch] = WeakKeyDictionary()
_looking: list[threading.Thread] = []
_lock = threading.Lock()


def watch_of(group: ProcessGroup | None) -> Watch:
    """The one watch of a process group. A thread looks at all of them, several times a second."""
    whole: Any = group or dist.group.WORLD
    with _lock:
        if whole not in _watches:
            _watches[whole] = Watch(group)
        if not any(thread.is_alive() for thread in _looking):  # none yet, or this is a fork
            _looking[:] = [threading.Thread(target=_look, daemon=True)]
            _looking[0].start()
        return _watches[whole]


@contextmanager
def waiting_for(group: ProcessGroup | None, at: str = "") -> Iterator[None]:
    """Inside, this rank exchanges with the others of the group and waits for them.

    Args:
        group: by default all ranks.
        at: in what, for the error.

    Raises:
        SyncError: one of them is lost.
    """
    watch, began = watch_of(group), time.monotonic()
    try:
        with watch.present(), watch.waiting():
            yield
    except RuntimeError as error:
        if not is_lost_peer(error):
            raise
        seconds = time.monotonic() - began
        raise lost_peer(
            error, who=watch.own, at=at, missing=watch.lost(), seconds=seconds
        ) from error


def barrier() -> None:
    """Wait until all ranks are here."""
    with waiting_for(None):
        dist.barrier()


def _look() -> None:
    while True:
        time.sleep(_TICK_S)
        with _lock:
            watches = list(_watches.values())
        for watch in watches:
            watch.look()
        del watches  # a group that is gone takes its watch along

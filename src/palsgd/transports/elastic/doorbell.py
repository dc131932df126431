"""Tells a worker that is gone from one that is late.

Each worker listens on a port for as long as it takes part. The operating system takes a call for a
process that computes or is stopped, and ends all calls as soon as the process has ended, however it
ended. So no worker has to say again and again that it is alive.
"""

import os
import socket
import time
import weakref
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Self

Address = tuple[str, int]

_ANSWER_S = 1.0  # how long a call may ring
_open: "weakref.WeakSet[Doorbell]" = weakref.WeakSet()


class Doorbell:
    """The port of this worker."""

    def __init__(self, reached_from: str):
        """`reached_from` is a host to which the other workers have a connection too."""
        self._socket = socket.create_server((_own_host(reached_from), 0), backlog=1024)
        self._socket.setblocking(False)
        self._calls: list[socket.socket] = []
        self.address: Address = self._socket.getsockname()[:2]
        weakref.finalize(self, _close, self._socket, self._calls)
        _open.add(self)

    def answer(self) -> None:
        """Take the calls so far, and drop those that are over, so that there is room for others. A
        worker that still waits for this one would take the end of its call for the end of this
        worker."""
        while True:
            try:
                call = self._socket.accept()[0]
            except OSError:
                break
            call.setblocking(False)
            self._calls.append(call)
        over = [call for call in self._calls if _is_over(call)]
        for call in over:
            call.close()
            self._calls.remove(call)

    def close(self) -> None:
        _close(self._socket, self._calls)


def _close(bell: socket.socket, calls: list[socket.socket]) -> None:
    bell.close()
    while calls:
        calls.pop().close()


def _is_over(call: socket.socket) -> bool:
    """Has the other side ended the call, or its process?"""
    try:
        return not call.recv(1)
    except BlockingIOError:
        return False
    except OSError:
        return True


def _own_host(peer: str) -> str:
    """The address of this machine on its way to `peer`."""
    family = socket.getaddrinfo(peer, 1, type=socket.SOCK_DGRAM)[0][0]
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect((peer, 1))  # sends nothing
        return str(probe.getsockname()[0])


def _close_in_child() -> None:
    """A process that was forked, such as a loader's, must not listen in its parent's place."""
    for bell in list(_open):
        bell.close()


os.register_at_fork(after_in_child=_close_in_child)


def answers(address: Address) -> bool | None:
    """Does somebody listen there? None if there is no answer at all, as from a machine that is off
    or a link that is cut."""
    call, listens = _called(address)
    if call is not None:
        call.close()
    return listens


def _called(address: Address) -> tuple[socket.socket | None, bool | None]:
    try:
        return socket.create_connection(address, timeout=_ANSWER_S), True
    except ConnectionRefusedError:
        return None, False
    except OSError:
        return None, None


class Lookout:
    """Finds out which workers are gone. One that gives no answer at all is gone after `patience`
    seconds."""

    def __init__(self, addresses: Mapping[int, Address], patience: float):
        self._addresses, self._patience = addresses, patience
        self._calls: dict[int, socket.socket] = {}
        self._silent_since: dict[int, float] = {}
        self._gone: set[int] = set()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        for call in self._calls.values():
            call.close()

    def gone(self, numbers: Iterable[int]) -> set[int]:
        """Those of them that are gone. All are called at once, as a call may ring for a second."""
        new = [n for n in numbers if n not in self._calls and n not in self._gone]
        since = time.monotonic()
        with ThreadPoolExecutor(max(1, len(new))) as pool:
            for number, answer in zip(new, pool.map(self._call, new), strict=True):
                self._keep(number, since, *answer)
        self._gone.update(n for n, call in self._calls.items() if _is_over(call))
        return self._gone.intersection(numbers)

    def _call(self, number: int) -> tuple[socket.socket | None, bool | None]:
        return _called(self._addresses[number])

    def _keep(
        self, number: int, since: float, call: socket.socket | None, listens: bool | None
    ) -> None:
        if call is not None:
            self._calls[number] = call
            call.setblocking(False)
            _keep_alive(call, self._patience)
        if listens is None:
            first = self._silent_since.setdefault(number, since)
            listens = time.monotonic() - first <= self._patience
        if not listens:
            self._gone.add(number)


def _keep_alive(call: socket.socket, patience: float) -> None:
    """Have the operating system end a call whose other machine gives no answer for so long."""
    third = max(1, round(patience / 3))
    call.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in (("TCP_KEEPIDLE", third), ("TCP_KEEPINTVL", third), ("TCP_KEEPCNT", 2)):
        if hasattr(socket, name):  # Linux
            call.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)

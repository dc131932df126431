"""Tells a worker that is gone from one that is late.

Each worker listens on a port for as long as it takes part. The operating system accepts a
connection for a process that computes or is stopped, and refuses one as soon as the process has
ended, however it ended. So no worker has to say again and again that it is alive.
"""

import os
import socket
import time
import weakref
from collections.abc import Mapping

Address = tuple[str, int]

_ANSWER_S = 1.0  # how long a connection may take
_open: "weakref.WeakSet[Doorbell]" = weakref.WeakSet()


class Doorbell:
    """The port of this worker."""

    def __init__(self, reached_from: str):
        """`reached_from` is a host to which the other workers have a connection too."""
        self._socket = socket.create_server((_own_host(reached_from), 0), backlog=1024)
        self._socket.setblocking(False)
        self.address: Address = self._socket.getsockname()[:2]
        weakref.finalize(self, self._socket.close)
        _open.add(self)

    def answer(self) -> None:
        """Accept and drop the connections so far, so that there is room for later ones."""
        while True:
            try:
                self._socket.accept()[0].close()
            except OSError:
                return

    def close(self) -> None:
        self._socket.close()


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
    try:
        socket.create_connection(address, timeout=_ANSWER_S).close()
    except ConnectionRefusedError:
        return False
    except OSError:
        return None
    return True


class Lookout:
    """Finds out which workers are gone. One that gives no answer at all is gone after `patience`
    seconds."""

    def __init__(self, addresses: Mapping[int, Address], patience: float):
        self._addresses, self._patience = addresses, patience
        self._silent_since: dict[int, float] = {}

    def gone(self, number: int) -> bool:
        answer = answers(self._addresses[number])
        if answer is None:
            since = self._silent_since.setdefault(number, time.monotonic())
            return time.monotonic() - since > self._patience
        self._silent_since.pop(number, None)
        return not answer

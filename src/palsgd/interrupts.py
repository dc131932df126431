"""How a process ends from outside: by Ctrl-C at any moment, by signals, and with its parent.

Ctrl-C is one line and exit code 130, no traceback. Python raises KeyboardInterrupt wherever the
program happens to be. In the first seconds that is inside an import, which turns it into a
traceback or into an ImportError of a module that is half there. So the process ends at once, unless
somebody awaits the exception and no import is under way.
"""

import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import FrameType

# What ends a process beside Ctrl-C, unless it has a handler.
ENDING = (signal.SIGTERM, signal.SIGHUP) if sys.platform != "win32" else (signal.SIGTERM,)

_PR_SET_PDEATHSIG = 1  # of the kernel's prctl
_awaited = False  # would somebody catch KeyboardInterrupt?


def install() -> None:
    """From now on Ctrl-C ends this process quietly, unless it was started to ignore it, as a
    background job of a script is."""
    if not _ignored():
        signal.signal(signal.SIGINT, _stop)


def handled_here() -> bool:
    """Is Ctrl-C left to this module, or to Python? A program may handle it itself."""
    return signal.getsignal(signal.SIGINT) in (_stop, signal.default_int_handler)


@contextmanager
def awaited() -> Iterator[None]:
    """Inside, Ctrl-C raises KeyboardInterrupt, which the caller catches; a second one ends the
    process at once."""
    global _awaited
    before, _awaited = _awaited, True
    try:
        yield
    finally:
        _awaited = before


def leave_to_parent() -> None:
    """In a worker process: Ctrl-C, which may reach it too, ends it without a word. One that is
    ignored stays so."""
    if not _ignored():
        signal.signal(signal.SIGINT, signal.SIG_DFL)


def end_with_parent() -> None:
    """From now on the kernel ends this process when its parent ends, also if that is killed.
    Otherwise the workers of a launcher that is killed train on. Only Linux can do this; elsewhere
    nothing changes."""
    if sys.platform == "linux":
        import ctypes

        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


def _ignored() -> bool:
    return signal.getsignal(signal.SIGINT) is signal.SIG_IGN


def _stop(number: int, frame: FrameType | None) -> None:
    global _awaited
    if _awaited and not _importing(frame):
        _awaited = False
        raise KeyboardInterrupt
    with suppress(OSError, ValueError):
        sys.stdout.flush()
    os.write(2, b"palsgd: stopped\n")
    os._exit(130)


def _importing(frame: FrameType | None) -> bool:
    while frame is not None:
        if frame.f_code.co_filename.startswith("<frozen importlib"):
            return True
        frame = frame.f_back
    return False

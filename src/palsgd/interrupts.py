"""Ctrl-C at any moment: one line, exit code 130, no traceback.

Python raises KeyboardInterrupt wherever the program happens to be. In the first seconds that is
inside an import, which turns it into a traceback or into an ImportError of a module that is half
there. So the process ends at once, unless somebody awaits the exception and no import is under way.
"""

import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import FrameType

_awaited = False  # would somebody catch KeyboardInterrupt?


def install() -> None:
    """From now on Ctrl-C ends this process quietly."""
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


@contextmanager
def starting_children() -> Iterator[None]:
    """Inside, processes are started with SIGINT blocked, so that it waits until the child calls
    `leave_to_parent`; Python would print a traceback there meanwhile. Only the calling thread is
    blocked, whose mask children inherit. Another one receives Ctrl-C for it."""
    if not hasattr(signal, "pthread_sigmask"):
        yield
        return
    over = threading.Event()
    threading.Thread(target=over.wait, daemon=True).start()
    before = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        over.set()


def leave_to_parent() -> None:
    """In a child process: Ctrl-C, which reaches it too, ends it without a word."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    if hasattr(signal, "pthread_sigmask"):
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGINT])


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

"""How a process ends from outside: by Ctrl-C at any moment, by signals, and with its parent.

Ctrl-C is one line and exit code 130, no traceback. SIGTERM and SIGHUP are the same to a command
that awaits them, with exit codes of their own. Python raises KeyboardInterrupt wherever the
program happens to be. In the first seconds that is inside an import, which turns it into a
traceback or into an ImportError of a module that is half there. So the process ends at once, unless
somebody awaits the exception. Then an import that is under way, as there are short ones in the
middle of a training, has a moment to end first.
"""

import _thread
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import FrameType

# What ends a process beside Ctrl-C, unless it has a handler.
ENDING = (signal.SIGTERM, signal.SIGHUP) if sys.platform != "win32" else (signal.SIGTERM,)

_PR_SET_PDEATHSIG = 1  # of the kernel's prctl
_IMPORT_S = 2.0  # so long may imports that are under way go on after a signal
_TICK_S = 0.02
_awaited = False  # would somebody catch KeyboardInterrupt?
_deadline: float | None = None  # for imports, once a signal waits for them
_sent_again = False  # is the next signal one that has waited?


def install() -> None:
    """From now on Ctrl-C ends this process quietly, unless it was started to ignore it, as a
    background job of a script is."""
    if not _ignored():
        signal.signal(signal.SIGINT, _stop)


def handled_here() -> bool:
    """Is Ctrl-C left to this module, or to Python? A program may handle it itself."""
    return signal.getsignal(signal.SIGINT) in (_stop, signal.default_int_handler)


class EndedError(KeyboardInterrupt):
    """A signal that means the same as Ctrl-C."""

    def __init__(self, number: int):
        super().__init__(f"signal {number}")
        self.code = 128 + number


def exit_code(stopped: KeyboardInterrupt) -> int:
    """What a process ends with that was stopped.

    Example:
        >>> exit_code(KeyboardInterrupt()), exit_code(EndedError(signal.SIGTERM))
        (130, 143)
    """
    return stopped.code if isinstance(stopped, EndedError) else 128 + signal.SIGINT


@contextmanager
def awaited(*, ending: bool = False) -> Iterator[None]:
    """Inside, Ctrl-C raises KeyboardInterrupt, which the caller catches; a second one ends the
    process at once. With `ending` so do SIGTERM and SIGHUP, as a KeyboardInterrupt that knows its
    exit code, unless the program handles or ignores them."""
    global _awaited, _deadline
    before, _awaited, _deadline = _awaited, True, None
    handlers = {number: signal.signal(number, _stop) for number in deadly()} if ending else {}
    try:
        yield
    finally:
        _awaited = before
        for number, handler in handlers.items():
            signal.signal(number, handler)


def deadly() -> list[signal.Signals]:
    """Signals that end this process and that nobody but this module handles. Only the main thread
    can do so."""
    if threading.current_thread() is not threading.main_thread():
        return []
    return [number for number in ENDING if signal.getsignal(number) in (signal.SIG_DFL, _stop)]


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
    stopped = KeyboardInterrupt() if number == signal.SIGINT else EndedError(number)
    importing, waits = _importing(frame), _may_wait()
    if _awaited and importing and waits:
        _thread.start_new_thread(_send_soon, (number, threading.get_ident()))
        return
    if _awaited and not importing:
        _awaited = False
        raise stopped
    with suppress(OSError, ValueError):
        sys.stdout.flush()
    os.write(2, b"palsgd: stopped\n")
    os._exit(exit_code(stopped))


def _may_wait() -> bool:
    """May the signal that has come wait for an import? The first one may, for a while, and not a
    second one beside it."""
    global _deadline, _sent_again
    first, again, _sent_again = _deadline is None, _sent_again, False
    if _deadline is None:
        _deadline = time.monotonic() + _IMPORT_S
    return first or (again and time.monotonic() < _deadline)


def _send_soon(number: int, main: int) -> None:
    """The same signal again, when the import may have ended. It is sent to the main thread, which
    it also wakes from a wait."""
    global _sent_again
    time.sleep(_TICK_S)
    _sent_again = True
    if sys.platform == "win32":
        signal.raise_signal(number)
    else:
        signal.pthread_kill(main, number)


def _importing(frame: FrameType | None) -> bool:
    while frame is not None:
        if frame.f_code.co_filename.startswith("<frozen importlib"):
            return True
        frame = frame.f_back
    return False

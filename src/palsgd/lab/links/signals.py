"""What becomes of signals while something must be undone that the kernel would keep."""

import contextlib
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from types import FrameType
from typing import NoReturn

from palsgd import interrupts


@contextlib.contextmanager
def signals_raise() -> Iterator[None]:
    """Signals that would end this process at once let it tidy up first; those that the program
    handles itself are left to it."""

    def leave(number: int, frame: FrameType | None) -> NoReturn:
        raise SystemExit(128 + number)

    with _handled(interrupts.deadly(), leave):
        yield


@contextlib.contextmanager
def interrupted_once() -> Iterator[None]:
    """Ctrl-C raises KeyboardInterrupt, and a second one does nothing: what the first began to undo
    is undone. A program that handles Ctrl-C itself goes on to do so."""
    told = False

    def stop(number: int, frame: FrameType | None) -> None:
        nonlocal told
        if not told:
            told = True
            raise KeyboardInterrupt

    with _handled([signal.SIGINT] if interrupts.handled_here() else [], stop):
        yield


@contextlib.contextmanager
def signals_wait() -> Iterator[None]:
    """What must not be left half done is not interrupted; the signal takes effect afterwards."""
    came: list[int] = []
    with _handled([signal.SIGINT, *interrupts.ENDING], lambda number, frame: came.append(number)):
        yield
    for number in came[:1]:
        signal.raise_signal(number)


@contextlib.contextmanager
def _handled(
    numbers: Sequence[signal.Signals], handler: Callable[[int, FrameType | None], None]
) -> Iterator[None]:
    if threading.current_thread() is not threading.main_thread():  # signals go to the main thread
        yield
        return
    before = {number: signal.signal(number, handler) for number in numbers}
    try:
        yield
    finally:
        for number, old in before.items():
            signal.signal(number, old)

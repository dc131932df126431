"""Progress on stderr: a bar on a terminal, a line every few seconds in a file, nothing when
quiet."""

import shutil
import sys
import time
from collections.abc import Callable
from types import TracebackType

FIRST_AFTER = 2.0  # seconds: nothing is shown for work that takes less
LINE_EVERY, DRAW_EVERY = 15.0, 0.2  # seconds, in a file and on a terminal
WIDTH = 30  # characters of the bar


class ProgressBar:
    """The progress of one piece of work, with rate and time left, on stderr. The bar is removed at
    the end."""

    def __init__(
        self, what: str, total: int, *, start: int = 0, unit: str = "steps", quiet: bool = False
    ):
        self._what, self._total, self._start, self._unit = what, total, start, unit
        self._began = time.monotonic()
        self._said: float | None = None
        self._tty, self._quiet, self._drawn = sys.stderr.isatty(), quiet, 0

    def __enter__(self) -> "ProgressBar":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def at(self, done: int, note: str = "") -> None:
        now = time.monotonic()
        if self._quiet or now - self._began < FIRST_AFTER:
            return
        every = DRAW_EVERY if self._tty else LINE_EVERY
        if self._said is None or now - self._said >= every:
            self._said = now
            self._show(f"{self._figures(done, now)} {note}".rstrip(), done)

    def close(self) -> None:
        if self._drawn:
            print("\r" + " " * self._drawn, end="\r", file=sys.stderr, flush=True)
            self._drawn = 0

    def _figures(self, done: int, now: float) -> str:
        rate = (done - self._start) / (now - self._began)
        left = (self._total - done) / rate if rate else float("inf")
        return f"{done}/{self._total} {self._unit}, {rate:.3g}/s, {left:.0f} s left"

    def _show(self, figures: str, done: int) -> None:
        if not self._tty:
            print(f"{self._what}: {figures}", file=sys.stderr, flush=True)
            return
        filled = WIDTH * done // self._total if self._total else 0
        bar = "#" * filled + "." * (WIDTH - filled)
        # The terminal wraps a line that is too long, and a wrapped line cannot be overwritten.
        text = f"{self._what} [{bar}] {figures}"[: shutil.get_terminal_size().columns - 1]
        print(f"\r{text:<{self._drawn}}", end="", file=sys.stderr, flush=True)
        self._drawn = len(text)


def file_progress(quiet: bool) -> Callable[[str, int, int], None]:
    """A function that is told what is read or fetched, the bytes so far and in all."""
    bars: dict[str, ProgressBar] = {}

    def at(what: str, done: int, total: int) -> None:
        if what not in bars:
            bars[what] = ProgressBar(what, total, unit="bytes", quiet=quiet)
        bars[what].at(done)
        if done >= total:
            bars[what].close()

    return at

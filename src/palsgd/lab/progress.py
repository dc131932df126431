"""How far it is: a bar on a terminal, a plain line now and then elsewhere, nothing when quiet."""

import sys
import time
from types import TracebackType
from typing import Any

FIRST_AFTER, LINE_EVERY = 2.0, 15.0  # seconds


class Bar:
    """Progress of one thing, with rate and time left; silent if it takes less than two seconds."""

    def __init__(
        self, what: str, total: int, *, start: int = 0, unit: str = "steps", quiet: bool = False
    ):
        self._what, self._total, self._start, self._unit = what, total, start, unit
        self._began = self._said = time.monotonic()
        self._rich: Any = None
        self._tty, self._quiet = sys.stderr.isatty(), quiet

    def __enter__(self) -> "Bar":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        if self._rich is not None:
            self._rich[0].stop()

    def at(self, done: int, note: str = "") -> None:
        now = time.monotonic()
        if self._quiet or now - self._began < FIRST_AFTER:
            return
        if self._tty:
            self._draw(done, note)
        elif now - self._said >= LINE_EVERY or self._said == self._began:
            self._said = now
            rate = (done - self._start) / (now - self._began)
            left = (self._total - done) / rate if rate else float("inf")
            print(
                f"{self._what}: {done}/{self._total} {self._unit}, {rate:.3g}/s, "
                f"{left:.0f} s left {note}".rstrip(),
                file=sys.stderr,
                flush=True,
            )

    def _draw(self, done: int, note: str) -> None:
        if self._rich is None:
            self._rich = _rich_bar(self._what, self._total, self._unit, self._began)
        progress, task = self._rich
        rate = (done - self._start) / (time.monotonic() - self._began)
        progress.update(task, completed=done, note=note, rate=f"{rate:.3g} {self._unit}/s")


def _rich_bar(what: str, total: int, unit: str, began: float) -> tuple[Any, Any]:
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
    from rich.progress import TimeRemainingColumn as Left

    columns = (
        TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(),
        TextColumn("{task.fields[rate]}"), Left(), TextColumn("{task.fields[note]}"),
    )  # fmt: skip
    progress = Progress(*columns, console=Console(stderr=True), transient=True)
    task = progress.add_task(what, total=total, note="", rate="")
    progress.start()
    return progress, task

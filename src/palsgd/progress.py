"""Progress on stderr: a bar on a terminal, a line every few seconds in a file, nothing when
quiet."""

import math
import shutil
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from types import TracebackType

FIRST_AFTER = 2.0  # seconds: nothing is shown for work that takes less
LINE_EVERY, DRAW_EVERY = 15.0, 0.2  # seconds, in a file and on a terminal
WIDTH = 30  # characters of the bar


@dataclass
class Whole:
    """Runs one after another, whose bars show one progress: which run it is, and the time that is
    left for all of them. `work` is in any unit that costs about equal time.

    The time that is left follows from what the work since `began` took, with everything between two
    bars: evaluations, and the start of the next run. A process that takes over has an own `began`.
    """

    runs: int = 1
    work: float = 1.0
    done_runs: int = 0
    done_work: float = 0.0
    began: float | None = field(default=None, compare=False)
    said: float | None = field(default=None, compare=False)
    begun_work: float = field(default=0.0, compare=False)  # what was done before `began`

    def begin(self, done: float) -> None:
        if self.began is None:
            self.began, self.begun_work = time.monotonic(), done

    def after(self, runs: int, work: float) -> "Whole":
        """For the process that does the runs after these."""
        return replace(
            self,
            done_runs=self.done_runs + runs,
            done_work=self.done_work + work,
            began=None,
            said=None,
        )

    def finished(self, runs: int, work: float) -> None:
        self.done_runs += runs
        self.done_work += work

    def left(self, done: float, now: float) -> float:
        """Seconds for the work beyond `done`."""
        assert self.began is not None
        since = done - self.begun_work
        return (now - self.began) * (self.work - done) / since if since > 0 else math.inf

    def words(self, runs: int) -> str:
        """Which of the runs it is; nothing where there is one."""
        if self.runs == 1:
            return ""
        first = self.done_runs + 1
        which = f"run {first}" if runs == 1 else f"runs {first} to {self.done_runs + runs}"
        return f", {which} of {self.runs}"


class ProgressBar:
    """The progress of one piece of work, with rate and time left, on stderr. The bar is removed at
    the end. As a part of a `whole`, of which it is `runs` with that much `work`, it shows how far
    that is."""

    def __init__(
        self,
        what: str,
        total: int,
        *,
        start: int = 0,
        unit: str = "steps",
        quiet: bool = False,
        whole: Whole | None = None,
        runs: int = 1,
        work: float = 1.0,
    ):
        self._whole = Whole() if whole is None else whole
        self._runs, self._work = runs, work
        self._what, self._total, self._start, self._unit = what, total, start, unit
        self._whole.begin(self._work_at(start))
        self._began = time.monotonic()
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
        self._whole.finished(self._runs, self._work)

    def at(self, done: int, note: str = "") -> None:
        whole, now = self._whole, time.monotonic()
        assert whole.began is not None
        if self._quiet or now - whole.began < FIRST_AFTER:
            return
        every = DRAW_EVERY if self._tty else LINE_EVERY
        if whole.said is None or now - whole.said >= every:
            whole.said = now
            self._show(f"{self._figures(done, now)} {note}".rstrip(), done)

    def close(self) -> None:
        if self._drawn:
            print("\r" + " " * self._drawn, end="\r", file=sys.stderr, flush=True)
            self._drawn = 0

    def _work_at(self, done: int) -> float:
        """Of the whole, when `done` of this piece is done."""
        share = done / self._total if self._total else 1.0
        return self._whole.done_work + self._work * share

    def _figures(self, done: int, now: float) -> str:
        rate = (done - self._start) / (now - self._began) if now > self._began else 0.0
        left = self._whole.left(self._work_at(done), now)
        of_all = " for all" if self._whole.runs > 1 else ""
        return f"{done}/{self._total} {self._unit}, {rate:.3g}/s, {span(left)} left{of_all}"

    def _show(self, figures: str, done: int) -> None:
        what = f"{self._what}{self._whole.words(self._runs)}"
        if not self._tty:
            print(f"{what}: {figures}", file=sys.stderr, flush=True)
            return
        filled = int(WIDTH * self._work_at(done) / self._whole.work)
        bar = "#" * filled + "." * (WIDTH - filled)
        # The terminal wraps a line that is too long, and a wrapped line cannot be overwritten.
        text = f"{what} [{bar}] {figures}"[: shutil.get_terminal_size().columns - 1]
        print(f"\r{text:<{self._drawn}}", end="", file=sys.stderr, flush=True)
        self._drawn = len(text)


def span(seconds: float) -> str:
    """A time for people."""
    if not math.isfinite(seconds):
        return "unknown time"
    if seconds < 300:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 3 * 3600 else f"{seconds / 3600:.1f} h"


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

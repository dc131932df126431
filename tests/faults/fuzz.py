"""Hostile and careless input by the thousand: settings, Python calls, command lines, files.

    make fuzz                                     10,000 cases by a fixed seed
    python tests/faults/fuzz.py --count 500 --kind calls --seed 3
    python tests/faults/fuzz.py --case calls:17    one case again, with its traceback

A case is one call with input that is right but for a few values, or with a file that was changed.
It may do what it says, or refuse the input: a ValueError of one line, an error of palsgd's own, the
TypeError for a missing or unknown argument, a disk's OSError; a command ends with 0, or with 1 or 2
and one line. Anything else is broken: other exceptions, texts of many lines, errors that come from
the inside of another library, more than some seconds of computing, more than some gigabytes.
"""

import argparse
import random
import resource
import signal
import sys
import tempfile
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parents[1]))

import fuzz_calls
import fuzz_commands
import fuzz_files

import palsgd
from support.patience import patient

SOURCE = str(Path(palsgd.__file__).parent)
MOST_SECONDS = 6.0  # of computing, of one case
PAGE_SECONDS = 60.0  # where a page with all its figures is made
TURNS = 20
MOST_MEMORY = 12 * 2**30
KINDS: dict[str, Callable] = {
    **fuzz_calls.KINDS,
    **fuzz_commands.KINDS,
    **fuzz_files.KINDS,
}
SHARES = {"settings": 6, "calls": 5, "commands": 2, "runs": 1.5, "pages": 0.01}  # of the cases


class Stopped(BaseException):
    """By SIGTERM: what was done so far is shown."""


class TooLong(BaseException):
    """The case computes for too long."""


@dataclass(frozen=True)
class Outcome:
    word: str
    broken: bool = False
    about: str = ""


def outcome_of(call: Callable[[], str | None], seconds: float = MOST_SECONDS) -> Outcome:
    """What became of a case, in a word or two."""
    try:
        with limited(patient(seconds)), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return Outcome(call() or "worked")
    except Stopped:
        raise
    except TooLong:
        return Outcome("took too long", True)
    except BaseException as error:
        return _of_error(error)


def _of_error(error: BaseException) -> Outcome:
    said, name = str(error), type(error).__name__
    about = f"{name}: {said[:300]}"
    if isinstance(error, palsgd.SyncError | palsgd.ConsensusError | palsgd.NonFiniteError):
        return Outcome("an error of palsgd's own")
    if type(error) is ValueError:
        if "\n" in said or len(said) > 1000:
            return Outcome("a long text", True, about)
        if not _raised_here(error):
            return Outcome("ValueError from elsewhere", True, f"{about} {_place(error)}")
        return Outcome("refused")
    if isinstance(error, TypeError) and (_is_of_the_call(error) or _raised_here(error)):
        return Outcome("refused as a call")
    if isinstance(error, OSError) and "\n" not in said:
        return Outcome("OSError")
    return Outcome(name, True, f"{about} {_place(error)}")


def _frames(error: BaseException) -> list[traceback.FrameSummary]:
    return list(traceback.extract_tb(error.__traceback__))


def _raised_here(error: BaseException) -> bool:
    """By a `raise` in the source, not by what the source called."""
    last = _frames(error)[-1]
    return last.filename.startswith(SOURCE) and (last.line or "").startswith("raise")


def _is_of_the_call(error: TypeError) -> bool:
    """Python's own, for arguments that a function does not have."""
    words = ("unexpected keyword", "missing", "positional argument", "multiple values")
    return any(word in str(error) for word in words)


def _place(error: BaseException) -> str:
    ours = [frame for frame in _frames(error) if frame.filename.startswith(SOURCE)]
    return f"at {Path(ours[-1].filename).name}:{ours[-1].lineno}" if ours else ""


@contextmanager
def limited(seconds: float) -> Iterator[None]:
    """Inside, TooLong is raised after so many seconds of computing, or many more at all, as other
    programs may want the machine too."""

    def stop(*_: object) -> None:
        raise TooLong

    signal.signal(signal.SIGPROF, stop)
    signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_PROF, seconds)
    signal.setitimer(signal.ITIMER_REAL, 60 * seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.setitimer(signal.ITIMER_REAL, 0)


def case(kind: str, number: int, seed: int, folder: Path) -> tuple[str, Callable[[], str | None]]:
    """A description of the case, and its call."""
    return KINDS[kind](random.Random(f"{seed} {kind} {number}"), folder)


def planned(kinds: list[str], count: int) -> Iterator[tuple[str, int]]:
    """The kinds and numbers of the cases, all kinds by turns."""
    whole = sum(SHARES.get(kind, 1) for kind in kinds)
    counts = {kind: max(1, round(count * SHARES.get(kind, 1) / whole)) for kind in kinds}
    for turn in range(TURNS):
        for kind, number in counts.items():
            for each in range(turn * number // TURNS, (turn + 1) * number // TURNS):
                yield kind, each


@dataclass
class Tally:
    """How many cases of each kind came out how, and a line for each that is broken."""

    counts: Counter = field(default_factory=Counter)
    broken: list[str] = field(default_factory=list)

    def add(self, kind: str, number: int, seed: int, folder: Path) -> None:
        about, call = case(kind, number, seed, folder)
        outcome = outcome_of(call, PAGE_SECONDS if kind == "pages" else MOST_SECONDS)
        self.counts[kind, outcome.word, outcome.broken] += 1
        if outcome.broken:
            line = f"{kind}:{number} {outcome.word}: {about[:160]} -> {outcome.about}"
            self.broken.append(line)

    def show(self) -> None:
        for (kind, word, bad), number in sorted(self.counts.items()):
            print(f"{kind:10} {'BROKEN ' if bad else ''}{word:28} {number:6}")
        print(f"{sum(self.counts.values())} cases, {len(self.broken)} broken")
        print(*self.broken, sep="\n", flush=True)


def stopped(*_: object) -> None:
    raise Stopped


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--count", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--kind", choices=KINDS, action="append")
    parser.add_argument("--case", help="one case again: kind:number")
    given = parser.parse_args()
    signal.signal(signal.SIGTERM, stopped)
    resource.setrlimit(resource.RLIMIT_AS, (MOST_MEMORY, resource.RLIM_INFINITY))
    with tempfile.TemporaryDirectory() as folder:
        if given.case:
            kind, number = given.case.split(":")
            about, call = case(kind, int(number), given.seed, Path(folder))
            print(about, flush=True)
            print(call())
            return 0
        tally = Tally()
        try:
            for kind, number in planned(given.kind or list(KINDS), given.count):
                tally.add(kind, number, given.seed, Path(folder))
        except Stopped:
            print("stopped:")
        tally.show()
    return 1 if tally.broken else 0


if __name__ == "__main__":
    sys.exit(main())

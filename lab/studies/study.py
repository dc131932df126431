"""What every study is, and what its command does.

    python lab/studies/small_cnn.py --plan
    python lab/studies/small_cnn.py --data DIR --device cuda --minutes 9
    python lab/studies/small_cnn.py --data DIR --record lab/records/DATE-small-cnn --minutes 0
    python lab/studies/small_cnn.py --tiny

A study is a list of parts, a part a list of calls of palsgd's lab. All that is computed lies in
files under --out. The same command goes on with what is not done.
"""

import argparse
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from calls import Call, tuning_file
from estimates import NOTHING, Estimate, estimate, reasons
from grid import Grid

from palsgd.lab.comparison import Comparison
from palsgd.lab.groups import group
from palsgd.lab.provenance import without_folders
from palsgd.lab.run_folder import find_runs
from palsgd.lab.run_set import FailedRunsError
from palsgd.lab.simulated_program import OutOfTimeError
from palsgd.lab.tuning.api import runs_beside

RUNS = Path("runs") / "studies"
FAILED = "failed.txt"


@dataclass(frozen=True)
class Part:
    name: str
    asks: str  # a question in one sentence
    calls: Sequence[Call]
    links: Sequence[str] = ()  # in place of the study's, where a step takes another time

    def estimate(self) -> Estimate:
        return sum(map(estimate, self.calls), NOTHING)


@dataclass(frozen=True)
class Claim:
    """A published figure, and how ours is read from the runs of a part."""

    paper: str
    part: str
    read: Callable[[Comparison], str]


@dataclass(frozen=True)
class Study:
    name: str  # of its file
    title: str
    parts: Callable[[bool], list[Part]]  # of the argument: tiny, for a CPU
    claims: Sequence[Claim]
    links: Sequence[str] = ()  # on which times are projected, with the seconds of a step assumed


class Place:
    """The folder of a study's runs: those that are judged, and the trials that choose settings."""

    def __init__(self, folder: Path):
        self.folder = folder

    def runs(self, part: Part) -> Path:
        return self.folder / "runs" / part.name

    def tuning(self, part: Part) -> Path:
        return self.folder / "tuning" / part.name

    def judged(self, part: Part) -> list[Path]:
        """The folders of runs that are judged, as far as they are there."""
        found = [call.judged(self.runs(part), self.tuning(part)) for call in part.calls]
        return [folder for folder in found if folder is not None and folder.exists()]

    def comparison(self, part: Part, link: str | None = None) -> Comparison | None:
        """Of the runs that have ended, as the archive of a record has them; None: none has."""
        folders = self.compared(part)
        return Comparison(group(find_runs(folders)), link) if folders else None

    def compared(self, part: Part) -> list[Path]:
        """The folders of the runs that are judged and have ended."""
        return _ended(self.judged(part))

    def grids(self, part: Part) -> dict[str, Comparison]:
        """The runs of each grid of a part, which chooses settings."""
        folders = {call.name: runs_beside(tuning_file(self.tuning(part), call.name))
                   for call in part.calls if isinstance(call, Grid)}  # fmt: skip
        return {name: Comparison(group(find_runs(ended))) for name, folder in folders.items()
                if (ended := _ended([folder]))}  # fmt: skip

    def ended(self, part: Part) -> list[Path]:
        """The folders of the runs of a part that have ended, trials included."""
        return _ended([*self.judged(part), self.tuning(part)])

    def done(self, part: Part) -> int:
        return len(self.ended(part))

    def failed(self, part: Part) -> list[str]:
        """The names of those that ended early."""
        return [each.name for each in self.ended(part) if (each / FAILED).exists()]

    def small_files(self, part: Part) -> list[Path]:
        """Those of runs that have ended and of searches: all but models and what is under way."""
        names = ("config.yaml", "metrics.jsonl", "summary.json", FAILED)
        files = [each / name for each in self.ended(part) for name in names]
        return sorted(
            [*(each for each in files if each.exists()), *self.tuning(part).rglob("tuned.yaml")]
        )


def _ended(places: Sequence[Path]) -> list[Path]:
    configs = [path for place in places for path in place.rglob("config.yaml")]
    names = ("summary.json", FAILED)
    return sorted(
        path.parent for path in configs if any((path.parent / name).exists() for name in names)
    )


def chosen_parts(study: Study, args: argparse.Namespace) -> list[Part]:
    """Those that the command names, as long as it says."""
    every = study.parts(args.tiny)
    names = [part.name for part in every]
    for name in args.part or ():
        if name not in names:
            raise ValueError(f"--part {name} is unknown; {study.name} has {', '.join(names)}")
    chosen = [part for part in every if not args.part or part.name in args.part]
    if args.length == 1:
        return chosen
    return [
        replace(part, calls=[call.shortened(args.length) for call in part.calls]) for part in chosen
    ]


def plan(study: Study, parts: Sequence[Part], place: Place, tiny: bool = False) -> str:
    """The parts with what they cost, before anything is run. The tiny version needs no GPU."""
    costs = {part.name: part.estimate() for part in parts}
    lines = [_row("part", "runs", "done", "programs", "examples", "GPU min", "question")]
    for part in parts:
        lines.append(_cost_row(part.name, costs[part.name], str(place.done(part)), part.asks, tiny))
    lines.append(_cost_row("in all", sum(costs.values(), NOTHING), "", "", tiny))
    if not tiny:
        lines.append("GPU minutes: of one NVIDIA H200, by bench/results/lab-h200.json")
        lines += reasons(call for part in parts for call in part.calls)
    return "\n".join([study.title, *lines])


def _cost_row(name: str, cost: Estimate, done: str, asks: str, tiny: bool) -> str:
    minutes = "none" if tiny else f"{cost.minutes:.1f}"
    return _row(
        name, str(cost.runs), done, str(cost.programs), f"{cost.examples:.3g}", minutes, asks
    )


def _row(name: str, runs: str, done: str, programs: str, examples: str, *rest: str) -> str:
    minutes, asks = rest
    return (
        f"{name:12} {runs:>5} {done:>5} {programs:>8} {examples:>9} {minutes:>8}  {asks}".rstrip()
    )


def run(parts: Sequence[Part], place: Place, args: argparse.Namespace) -> None:
    """Do what is not done, until it is or the time is over."""
    until = None if args.minutes is None else time.monotonic() + 60 * args.minutes
    if args.minutes == 0:  # a record of what is there needs no data
        return
    options = {"data": args.data, "device": args.device, "until": until, "quiet": args.quiet,
               "at_once": args.at_once}  # fmt: skip
    try:
        for part in parts:
            for call in (each for each in part.calls if not args.call or each.name in args.call):
                print(f"{part.name}: {type(call).__name__.lower()} {call.name}", flush=True)
                try:
                    call.do(place.runs(part), place.tuning(part), options)
                except FailedRunsError as error:  # a result too, which the record counts
                    print(f"{part.name}: {error}", flush=True)
    except OutOfTimeError:
        print("the time is over; the same command goes on")


def parser(study: Study) -> argparse.ArgumentParser:
    found = argparse.ArgumentParser(description=study.title)
    add = found.add_argument
    add("--plan", action="store_true", help="print runs and GPU minutes, and do nothing")
    add("--part", action="append", help="this part alone; may be given several times")
    add("--call", action="append", help="runs of this name alone, such as K4, without a record")
    add("--tiny", action="store_true", help="the smallest version: a CPU, data that come along")
    add("--length", type=float, default=1.0, help="share of the length of all runs")
    add("--minutes", type=float, help="end after so long, at a checkpoint")
    add("--data", help="folder of the data")
    add("--device", default="auto")
    add("--out", type=Path, help=f"folder of the runs; default: {RUNS}/NAME")
    add("--record", type=Path, help="write what is there so far into this folder")
    add("--without-runs", action="store_true", help="a record of runs that are easily made again")
    add("--quiet", action="store_true", help="no progress bars")
    add("--at-once", type=int, default=1, help="programs of a call, in as many processes")
    return found


def checked(args: argparse.Namespace) -> argparse.Namespace:
    if not 0 < args.length <= 1:
        raise ValueError(f"--length {args.length:g} must be above 0 and at most 1")
    if args.call and args.record:
        raise ValueError("--call runs a share of a part, and --record is of whole ones; give one")
    if args.minutes is not None and not 0 <= args.minutes < float("inf"):
        raise ValueError(f"--minutes {args.minutes:g} must be a number >= 0")
    if args.at_once < 1:
        raise ValueError(f"--at-once {args.at_once} must be a whole number >= 1")
    return args


def place_of(study: Study, args: argparse.Namespace) -> Place:
    """Runs of another size or length have a folder of their own."""
    size = "-tiny" if args.tiny else "" if args.length == 1 else f"-{args.length:g}"
    return Place(args.out or RUNS / f"{study.name}{size}")


def main(study: Study, words: Sequence[str] | None = None) -> int:
    args = parser(study).parse_args(words)
    if words is None:  # runs name their command, and a record names no folder of a machine
        sys.argv[:] = [without_folders(word, Path(__file__).parents[2]) for word in sys.argv]
    try:
        args = checked(args)
        parts, place = chosen_parts(study, args), place_of(study, args)
        print(plan(study, parts, place, args.tiny), flush=True)
        if args.plan:
            return 0
        if args.record is None:
            run(parts, place, args)
            return 0
        from recording import check_record, unpack_runs, write_record

        check_record(study, parts, args)
        unpack_runs(args.record, place)
        try:
            run(parts, place, args)
        finally:  # what was run before an error is not lost
            write_record(study, parts, place, args)
    except ValueError as error:
        print(f"{study.name}: {error}", file=sys.stderr)
        return 2
    return 0

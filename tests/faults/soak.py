"""Trains for a long time with a fault every minute, and says what grows.

    make soak
    python tests/faults/soak.py --minutes 60 --out runs/soak.json

Two workers train with a codec and a delay, and save as they go. They are stopped for a while; every
tenth fault asks one to leave or kills it, and both are started again and must go on from the newest
save. Meanwhile memory, open files and threads of both and the size of a save are sampled. The
second half of each stretch between two starts gives a slope; their mean is printed per hour with
its 95% interval.
"""

import argparse
import math
import os
import random
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # where the tests' helpers lie
os.environ |= {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}  # a thread would not be forked

from faults import chaos, crew, library_run, notes
from faults.crew import Member
from faults.damage import newest, step_of
from support.patience import patient

ENDS = ("terminate", "kill")  # in turn; faults between them only stop a worker for a while
TIMEOUT_S = 20.0  # of the process group
SAVE_EVERY = 200
_SETTLED = 0.5  # of a stretch is over before its samples count: memory grows while things begin
_LEAST_SAMPLES = 8


@dataclass(frozen=True)
class Sample:
    """What a process takes at an instant."""

    at: float
    memory_mb: float
    files: int
    threads: int

    @classmethod
    def of(cls, member: Member) -> "Sample | None":
        place = Path(f"/proc/{member.process.pid}")
        try:
            pages = int((place / "statm").read_text().split()[1])
            return cls(
                time.monotonic(),
                pages * os.sysconf("SC_PAGE_SIZE") / 1e6,
                len(os.listdir(place / "fd")),
                len(os.listdir(place / "task")),
            )
        except OSError:  # it has ended
            return None


@dataclass
class Stretch:
    """From one start of the workers to their end."""

    samples: dict[int, list[Sample]] = field(default_factory=lambda: {0: [], 1: []})
    saves: list[tuple[float, int]] = field(default_factory=list)  # when, and the bytes of a save

    def sample(self, members: Iterable[Member], folder: Path) -> None:
        for member in members:
            found = Sample.of(member)
            if found is not None:
                self.samples[member.worker].append(found)
        size = _size(folder)
        if size:
            self.saves.append((time.monotonic(), size))

    def slopes(self, name: str) -> Iterator[float]:
        """Per hour, of each worker; none if the stretch was too short to tell."""
        for samples in self.samples.values():
            yield from _slope([(each.at, float(getattr(each, name))) for each in samples])


def main() -> None:
    given = _arguments()
    chaos.preload()
    soak = Soak(given.every, given.ends, random.Random(given.seed))
    with tempfile.TemporaryDirectory(prefix="soak-") as folder:
        soak.run(Path(folder), 60 * given.minutes)
    found = soak.record() | {"machine": chaos.machine(), "minutes": given.minutes}
    print(shown(found))
    if given.out:
        chaos.write(given.out, found)
    sys.exit(bool(found["hangs"] or found["steps_lost"] or found["unclean"]))


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--minutes", type=float, default=60.0, help="so long")
    parser.add_argument("--every", type=float, default=60.0, help="seconds between faults")
    parser.add_argument("--ends", type=int, default=10, help="every so many faults end the workers")
    parser.add_argument("--seed", type=int, default=0, help="of the victims")
    parser.add_argument("--out", help="a file for the record")
    return parser.parse_args()


class Soak:
    """The supervisor: starts workers, disturbs them, and starts them again."""

    def __init__(self, every_s: float, ends: int, draw: random.Random):
        self._every, self._ends, self._draw = every_s, ends, draw
        self.stretches: list[Stretch] = []
        self.faults = self.hangs = self.lost = self.steps = 0
        self.unclean: list[str] = []

    def run(self, folder: Path, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            noted = Path(tempfile.mkdtemp(dir=folder, prefix="notes-"))
            promised = [step_of(save) for save in newest(folder / "saves")[:1]]
            members = self._start(folder, noted, resume=bool(promised))
            self.stretches.append(Stretch())
            try:
                self._disturb(members, folder / "saves", deadline)
                self._end(members)
            finally:
                crew.end(members)
            self._judge(noted, promised)

    def record(self) -> dict[str, Any]:
        sizes = [each for stretch in self.stretches for each in stretch.saves]
        grows = {
            name: _interval([slope for s in self.stretches for slope in s.slopes(name)])
            for name in ("memory_mb", "files", "threads")
        }
        growth = list(_slope([(at, float(size)) for at, size in sizes]))
        return {
            "faults": self.faults,
            "starts": len(self.stretches),
            "steps": self.steps,
            "hangs": self.hangs,
            "steps_lost": self.lost,
            "unclean": self.unclean,
            "grows_per_hour": grows,
            "save_bytes": [sizes[0][1], sizes[-1][1]] if sizes else None,
            "save_bytes_per_hour": growth[0] if growth else None,
        }

    def _start(self, folder: Path, noted: Path, *, resume: bool) -> list[Member]:
        order = library_run.Order(
            scenario="soak", folder=folder / "saves", notes=noted, store=noted / "store",
            timeout_s=patient(TIMEOUT_S), resume=resume, steps=10**9, save_every=SAVE_EVERY,
        )  # fmt: skip
        return crew.start(order, range(2))

    def _disturb(self, members: list[Member], saves: Path, deadline: float) -> None:
        """Faults in turn, up to the first that ends a worker."""
        due = time.monotonic() + self._every
        while all(member.process.is_alive() for member in members):
            self.stretches[-1].sample(members, saves)
            now = time.monotonic()
            if now >= deadline:
                members[0].signal(signal.SIGTERM)
                return
            if now >= due:
                due = now + self._every
                if self._strike(self._draw.choice(members)):
                    return
            time.sleep(min(1.0, self._every / 10))

    def _strike(self, victim: Member) -> bool:
        """Disturb a worker. Returns whether it ends."""
        self.faults += 1
        if self.faults % self._ends == 0:
            kind = ENDS[self.faults // self._ends % len(ENDS)]
            victim.signal(signal.SIGKILL if kind == "kill" else signal.SIGTERM)
            return True
        victim.signal(signal.SIGSTOP)
        time.sleep(min(2.0, self._every / 4))
        victim.signal(signal.SIGCONT)
        return False

    def _end(self, members: list[Member]) -> None:
        """All workers end within the timeout and five seconds of the first."""
        limit = time.monotonic() + patient(TIMEOUT_S + 5)
        for member in members:
            member.process.join(max(0.0, limit - time.monotonic()))
        self.hangs += any(member.process.is_alive() for member in members)

    def _judge(self, noted: Path, promised: Sequence[int]) -> None:
        lines = [line for worker in range(2) for line in notes.read(noted, worker)]
        resumed = [line["step"] for line in lines if line["what"] == "resumed"]
        self.lost += sum(max(0, step - min(resumed)) for step in promised if resumed)
        self.steps = max([self.steps, *(line["step"] for line in lines if line["what"] == "saved")])
        for line in lines:
            if line["what"] == "error" and line["kind"] != "SyncError":
                self.unclean.append(f"{line['kind']}: {line['message']}")


def _size(saves: Path) -> int:
    """The bytes of the newest save; 0 if it was removed meanwhile."""
    try:
        found = newest(saves)[:1]
        return sum(path.stat().st_size for each in found for path in each.rglob("*.safetensors"))
    except OSError:
        return 0


def _slope(points: list[tuple[float, float]]) -> Iterator[float]:
    """Least squares, per hour, without the beginning."""
    points = points[int(len(points) * _SETTLED) :]
    if len(points) >= _LEAST_SAMPLES:
        times, values = zip(*points, strict=True)
        yield 3600 * statistics.linear_regression(times, values).slope


def _interval(slopes: list[float]) -> dict[str, Any]:
    """The mean over stretches, and its 95% interval by Student's t."""
    if len(slopes) < 2:
        return {"stretches": len(slopes), "mean": slopes[0] if slopes else None, "interval": None}
    from scipy.stats import t

    mean, error = statistics.fmean(slopes), statistics.stdev(slopes) / math.sqrt(len(slopes))
    reach = float(t.ppf(0.975, len(slopes) - 1)) * error
    return {"stretches": len(slopes), "mean": mean, "interval": [mean - reach, mean + reach]}


def shown(found: dict[str, Any]) -> str:
    lines = [f"faults {found['faults']}, starts {found['starts']}, steps {found['steps']:,}"]
    lines.append(f"hangs {found['hangs']}, steps lost {found['steps_lost']}")
    lines += [f"unclean: {each}" for each in found["unclean"]]
    for name, grows in found["grows_per_hour"].items():
        mean, interval = grows["mean"], grows["interval"]
        if interval is None:
            lines.append(f"{name:<10} no interval, from {grows['stretches']} stretches")
        else:
            low, high = interval
            lines.append(f"{name:<10} {mean:+.3f} per hour, 95% {low:+.3f} to {high:+.3f}")
    if found["save_bytes"]:
        first, last = found["save_bytes"]
        lines.append(f"a save     {first:,} bytes at the start, {last:,} at the end")
    if found["save_bytes_per_hour"] is not None:
        lines.append(f"           {found['save_bytes_per_hour']:+,.0f} per hour in the second half")
    return "\n".join(lines)


if __name__ == "__main__":
    main()

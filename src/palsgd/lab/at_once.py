"""Simulated programs at once, each in a process of its own, on one device.

A program of few workers leaves most of a GPU idle while the host prepares its next step.
"""

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Self

import torch

from palsgd.lab import workloads
from palsgd.lab.device import chosen_device
from palsgd.lab.links.processes import end_group, module_path, tied
from palsgd.lab.links.signals import signals_wait
from palsgd.lab.order import Failure, failure_of
from palsgd.lab.run_folder import RunFolder, write_json
from palsgd.lab.settings import Settings
from palsgd.lab.simulated_program import Group, OutOfTimeError, in_turn
from palsgd.lab.warmups import given_up, warmup_name

LOOK_S = 0.05  # between two looks at whether a process has ended
WARMUPS = ".warmups"  # the folder of those in common, while processes simulate
MEMORY = 0.95  # of a GPU, for all processes; the rest is for what torch does not count


@dataclass(frozen=True, kw_only=True)
class Share:
    """What one process simulates, program after program."""

    runs: Mapping[str, Settings]  # finished ones too, if others shared a program with them
    waiting: Sequence[str]  # those that are not finished
    groups: Sequence[Group]
    out: Path
    data: str | None
    download: bool
    device: str
    quiet: bool
    until: float | None
    processes: int = 1  # so many share the device
    threads: int = 1  # of this one, if there are several
    warmups: Sequence[Path] = ()  # the files of those that are in common with other processes

    def parts(self) -> list["Share"]:
        """For several processes: a program each. Runs whose workers train one after another share
        none, though they are in a group."""
        return [self._of(group) for each in self.groups for group in self._programs(each)]

    def _programs(self, group: Group) -> list[Group]:
        kind = workloads.kind(self.runs[group.names[0]].workload)
        if group.resumed or not in_turn(kind, chosen_device(self.device), group.vectorize):
            return [group]
        return [group._replace(names=[name]) for name in group.names]

    def _of(self, group: Group) -> "Share":
        return replace(
            self,
            runs={name: self.runs[name] for name in group.names},
            waiting=[name for name in self.waiting if name in group.names],
            groups=[group],
        )

    def warmup_names(self) -> set[str]:
        """Those that its runs compute, unless others have."""
        names = [name for group in self.groups for name in group.names if not self._is_past(group)]
        waiting = [self.runs[name] for name in self.waiting if name in names]
        return {warmup_name(run) for run in waiting if run.warmup_steps}

    def _is_past(self, group: Group) -> bool:
        """Does it go on after its warm-up?"""
        first = group.names[0]
        saved = max(RunFolder(self.out / first).saved_steps, default=0) if group.resumed else 0
        return group.resumed and saved >= self.runs[first].warmup_steps

    def write(self, path: Path, command: list[str]) -> None:
        """`command` is the user's, which config.yaml names."""
        runs = {name: settings.as_dict() for name, settings in self.runs.items()}
        groups = [group._asdict() for group in self.groups]
        own = {"runs": runs, "groups": groups, "out": str(self.out), "command": command,
               "warmups": list(map(str, self.warmups))}  # fmt: skip
        write_json(path, vars(self) | own)

    @classmethod
    def read(cls, path: Path) -> tuple[Self, list[str]]:
        found = json.loads(path.read_text())
        command = found.pop("command")
        runs = {name: Settings.from_dict(each) for name, each in found["runs"].items()}
        groups = [Group(**each) for each in found["groups"]]
        places = {"out": Path(found["out"]), "warmups": [Path(each) for each in found["warmups"]]}
        return cls(**found | {"runs": runs, "groups": groups} | places), command


def simulate_at_once(shares: Sequence[Share], most: int, *, quiet: bool) -> None:
    """Simulate each share in a process of its own, at most so many at a time. After an error none
    begins any more. Those under way go on to their end, and then it is raised."""
    with tempfile.TemporaryDirectory() as folder, _made(shares[0].out / WARMUPS) as warmups:
        pool = _Pool(_with_files(shares, warmups), most, Path(folder), quiet=quiet)
        try:
            pool.run()
        finally:
            pool.end()
    if pool.errors:  # the end of the time is no news beside another error
        raise min(pool.errors, key=lambda error: isinstance(error, OutOfTimeError))


@contextmanager
def _made(folder: Path) -> Iterator[Path]:
    """A folder that is there inside alone. It is beside the runs, as warm-ups may be as large as
    their checkpoints."""
    folder.mkdir(mode=0o700, parents=True)
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _with_files(shares: Sequence[Share], folder: Path) -> list[Share]:
    """The shares, with files for warm-ups that several of them have in common."""
    names = Counter(name for share in shares for name in share.warmup_names())
    return [
        replace(share, warmups=sorted(folder / f"{name}.pt" for name in share.warmup_names()
                                      if names[name] > 1))
        for share in shares
    ]  # fmt: skip


class _Pool:
    """Processes for shares, begun in turn. One whose warm-up is being computed by another waits for
    it, and those behind it go first."""

    def __init__(self, shares: Sequence[Share], most: int, folder: Path, *, quiet: bool):
        size = min(most, len(shares))
        threads = max(1, torch.get_num_threads() // size)
        self._left = [replace(each, quiet=True, processes=size, threads=threads) for each in shares]
        self._size, self._folder, self._quiet = size, folder, quiet
        self._running: list[_Process] = []
        self._runs, self._done = sum(len(each.waiting) for each in shares), 0
        self.errors: list[Exception] = []

    def run(self) -> None:
        while self._running or (self._left and not self.errors):
            while (share := self._next()) is not None:
                self._left.remove(share)
                with signals_wait():  # none is started that `end` does not know
                    self._running.append(_Process(share, self._folder))
            time.sleep(LOOK_S)
            for process in [each for each in self._running if each.has_ended]:
                self._running.remove(process)
                self._take(process)

    def end(self) -> None:
        for process in self._running:
            process.end()

    def _next(self) -> Share | None:
        """The first that may begin now."""
        if self.errors or len(self._running) >= self._size:
            return None
        awaited = {path for each in self._running for path in _missing(each.share)}
        for share in self._left:
            if awaited.isdisjoint(share.warmups):
                return share
            awaited |= _missing(share)  # which are this one's to compute, as in one process
        return None

    def _take(self, process: "_Process") -> None:
        """What a process that has ended leaves."""
        process.end()
        error = process.error()
        if error is not None:
            self.errors.append(error)
            return
        self._done += len(process.share.waiting)
        if not self._quiet:
            print(f"{self._done} of {self._runs} runs are simulated", file=sys.stderr, flush=True)


def _missing(share: Share) -> set[Path]:
    """The warm-ups that it may still leave."""
    return {path for path in share.warmups if not (path.exists() or given_up(path).exists())}


class _Process:
    """A process that simulates a share. It is in a session of its own, so that Ctrl-C is left to
    this process, which ends it; and the kernel ends it if this one is killed."""

    def __init__(self, share: Share, folder: Path):
        self.share = share
        self._folder = Path(tempfile.mkdtemp(dir=folder))
        path = self._folder / "share.json"
        share.write(path, sys.argv)
        self._process = subprocess.Popen(
            tied([sys.executable, "-m", "palsgd.lab.at_once_main", str(path)]),
            env=os.environ | {"PYTHONPATH": module_path()},
            stdin=subprocess.DEVNULL,
            start_new_session=True,
        )

    @property
    def has_ended(self) -> bool:
        return self._process.poll() is not None

    def end(self) -> None:
        """With all processes that it has started."""
        end_group(self._process)

    def error(self) -> Exception | None:
        """Of a process that has ended, as this one raises it."""
        found = failure_of(self._folder, 0)
        if found is not None:
            return _raised_here(found[1])
        code = self._process.returncode
        if code == 0:
            return None
        how = f"{signal.Signals(-code).name} ended it" if code < 0 else f"exit code {code}"
        return RuntimeError(
            f"a process of the simulation died ({how}); the same command with --resume goes on"
        )


def _raised_here(failure: Failure) -> Exception:
    """As if it had been raised in this process; an error in this program with its traceback."""
    if failure.kind == OutOfTimeError.__name__:
        return OutOfTimeError()
    if failure.refuses_input:
        return ValueError(failure.message)
    if failure.expected:
        return RuntimeError(failure.message)
    print(failure.trace, file=sys.stderr)
    return RuntimeError(f"a process of the simulation failed: {failure.kind}: {failure.message}")

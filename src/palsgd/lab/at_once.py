"""Simulated programs at once, in several processes, on one device.

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
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO, Self

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

LOOK_S = 0.05  # between two looks at what a process has done
END_S = 10.0  # that processes which are free may take to end
WARMUPS = ".warmups"  # the folder of those in common, while processes simulate
MEMORY = 0.95  # of a GPU, for all processes; the rest is for what torch does not count


@dataclass(frozen=True, kw_only=True)
class Share:
    """What is simulated by one process, program after program."""

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
    """Simulate the shares by so many processes. After an error none begins any more. Those under
    way go on to their end, and then it is raised."""
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
    """Processes for shares, which begin in turn. One whose warm-up is being computed by another
    waits for it, and those behind it go first. A process that has done its share takes the next: to
    start, to load data and to compile take seconds."""

    def __init__(self, shares: Sequence[Share], most: int, folder: Path, *, quiet: bool):
        size = min(most, len(shares))
        threads = max(1, torch.get_num_threads() // size)
        self._left = [replace(each, quiet=True, processes=size, threads=threads) for each in shares]
        self._size, self._folder, self._quiet = size, folder, quiet
        self._processes: list[_Process] = []
        self._runs, self._done = sum(len(each.waiting) for each in shares), 0
        self.errors: list[Exception] = []

    def run(self) -> None:
        for _ in range(self._size):  # also those that have to wait, as to start takes seconds
            with signals_wait():  # none is started that `end` does not know
                self._processes.append(_Process(self._folder))
        while self._busy or (self._left and not self.errors):
            while (share := self._next()) is not None:
                self._left.remove(share)
                next(each for each in self._processes if each.share is None).begin(share)
            time.sleep(LOOK_S)
            for process in self._busy:
                self._look_at(process)
        until = time.monotonic() + END_S
        for process in self._processes:
            process.dismiss()
        for process in self._processes:
            process.wait(until)

    def end(self) -> None:
        for process in self._processes:
            process.end()

    @property
    def _busy(self) -> list["_Process"]:
        return [each for each in self._processes if each.share is not None]

    def _next(self) -> Share | None:
        """The first that may begin now."""
        if self.errors or len(self._busy) == len(self._processes):
            return None
        awaited = {path for each in self._busy for path in each.may_leave()}
        for share in self._left:
            if awaited.isdisjoint(share.warmups):
                return share
            # which are this one's to compute, as in one process
            awaited |= {path for path in share.warmups if not path.exists()}
        return None

    def _look_at(self, process: "_Process") -> None:
        """Has it done its share, or ended?"""
        if (share := process.done()) is not None:
            self._done += len(share.waiting)
            self._drop_warmups(share)
            if not self._quiet:
                print(f"{self._done} of {self._runs} runs are simulated", file=sys.stderr)
        elif process.has_ended:
            self._processes.remove(process)
            process.end()
            self.errors.append(process.error())

    def _drop_warmups(self, done: Share) -> None:
        """Those that no other share needs."""
        others = [*self._left, *(each.share for each in self._busy if each.share is not None)]
        for path in set(done.warmups).difference(*(share.warmups for share in others)):
            path.unlink(missing_ok=True)


class _Process:
    """A process that simulates shares, one after another. It is in a session of its own, so that
    Ctrl-C is left to this process, which ends it; and the kernel ends it if this one is killed."""

    def __init__(self, folder: Path):
        self.share: Share | None = None
        self._past: set[Path] = set()  # warm-ups of the share that it will not leave
        self._folder = Path(tempfile.mkdtemp(dir=folder))
        self._file = self._folder / "share.json"  # which it deletes when the share is done
        self._process = subprocess.Popen(
            tied([sys.executable, "-m", "palsgd.lab.at_once_main", str(self._file)]),
            env=os.environ | {"PYTHONPATH": module_path()},
            stdin=subprocess.PIPE,
            start_new_session=True,
        )

    def begin(self, share: Share) -> None:
        self.share, self._past = share, set[Path]()
        share.write(self._file, sys.argv)
        with suppress(BrokenPipeError):  # it has ended, which is seen at the next look
            self._input.write(b"\n")
            self._input.flush()

    def may_leave(self) -> set[Path]:
        """The warm-ups that it may still leave."""
        assert self.share is not None
        for path in set(self.share.warmups) - self._past:
            if given_up(path).exists():  # by this one, as no other is computing it
                given_up(path).unlink()
                self._past.add(path)
        return {path for path in self.share.warmups if not path.exists()} - self._past

    def done(self) -> Share | None:
        """The share, if it is done. Then the process is free."""
        if self._file.exists():
            return None
        share, self.share = self.share, None
        return share

    @property
    def has_ended(self) -> bool:
        return self._process.poll() is not None

    def dismiss(self) -> None:
        """Let a process that is free end by itself: one that is killed on a GPU which several share
        may take others with it."""
        with suppress(BrokenPipeError):
            self._input.close()

    def wait(self, until: float) -> None:
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout=max(0.0, until - time.monotonic()))

    def end(self) -> None:
        """With all processes that it has started."""
        end_group(self._process)

    def error(self) -> Exception:
        """Of a process that has ended before its share was done, as this one raises it."""
        found = failure_of(self._folder, 0)
        if found is not None:
            return _raised_here(found[1])
        code = self._process.returncode
        how = f"{signal.Signals(-code).name} ended it" if code < 0 else f"exit code {code}"
        return RuntimeError(
            f"a process of the simulation died ({how}); the same command with --resume goes on"
        )

    @property
    def _input(self) -> IO[bytes]:
        assert self._process.stdin is not None
        return self._process.stdin


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

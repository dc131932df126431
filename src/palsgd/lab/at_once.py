"""Simulated programs at once, each in a process of its own, on one device.

A program of few workers leaves most of a GPU idle while the host prepares its next step.
"""

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Self

import torch

from palsgd.lab.links.processes import end_group, module_path, tied
from palsgd.lab.links.signals import signals_wait
from palsgd.lab.order import Failure, failure_of
from palsgd.lab.run_folder import write_json
from palsgd.lab.settings import Settings
from palsgd.lab.simulated_program import Group, OutOfTimeError
from palsgd.lab.warmups import warmup_of

LOOK_S = 0.05  # between two looks at whether a process has ended
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

    def parts(self) -> list["Share"]:
        """For several processes: as many parts as can be simulated apart."""
        return [self._of(groups) for groups in _apart(self)]

    def _of(self, groups: Sequence[Group]) -> "Share":
        names = [name for group in groups for name in group.names]
        return replace(
            self,
            runs={name: self.runs[name] for name in names},
            waiting=[name for name in self.waiting if name in names],
            groups=groups,
        )

    def write(self, path: Path, command: list[str]) -> None:
        """`command` is the user's, which config.yaml names."""
        runs = {name: settings.as_dict() for name, settings in self.runs.items()}
        groups = [group._asdict() for group in self.groups]
        own = {"runs": runs, "groups": groups, "out": str(self.out), "command": command}
        write_json(path, vars(self) | own)

    @classmethod
    def read(cls, path: Path) -> tuple[Self, list[str]]:
        found = json.loads(path.read_text())
        command = found.pop("command")
        runs = {name: Settings.from_dict(each) for name, each in found["runs"].items()}
        groups = [Group(**each) for each in found["groups"]]
        return cls(**found | {"runs": runs, "groups": groups, "out": Path(found["out"])}), command


def _apart(share: Share) -> list[list[Group]]:
    """The groups, in their order. Those whose runs have a warm-up in common stay together: the
    first of them computes it for the others."""
    found: list[tuple[set[int], set[Any]]] = []  # numbers of groups, with what they share
    for number, group in enumerate(share.groups):
        waiting = [share.runs[name] for name in group.names if name in share.waiting]
        keys = {warmup_of(each) for each in waiting if each.warmup_steps}
        joined = [each for each in found if each[1] & keys]
        found = [each for each in found if not each[1] & keys]
        numbers = {number}.union(*(theirs for theirs, _ in joined))
        found.append((numbers, keys.union(*(theirs for _, theirs in joined))))
    found.sort(key=lambda each: min(each[0]))
    return [[share.groups[number] for number in sorted(numbers)] for numbers, _ in found]


def simulate_at_once(shares: Sequence[Share], most: int, *, quiet: bool) -> None:
    """Simulate each share in a process of its own, at most so many at a time. After an error none
    begins any more. Those under way go on to their end, and then it is raised."""
    with tempfile.TemporaryDirectory() as folder:
        pool = _Pool(shares, min(most, len(shares)), Path(folder), quiet=quiet)
        try:
            pool.run()
        finally:
            pool.end()
    if pool.errors:  # the end of the time is no news beside another error
        raise min(pool.errors, key=lambda error: isinstance(error, OutOfTimeError))


class _Pool:
    """Processes for shares, begun in turn."""

    def __init__(self, shares: Sequence[Share], size: int, folder: Path, *, quiet: bool):
        threads = max(1, torch.get_num_threads() // size)
        self._left = [replace(each, quiet=True, processes=size, threads=threads) for each in shares]
        self._size, self._folder, self._quiet = size, folder, quiet
        self._running: list[_Process] = []
        self._runs, self._done = sum(len(each.waiting) for each in shares), 0
        self.errors: list[Exception] = []

    def run(self) -> None:
        while self._running or self._may_begin:
            while self._may_begin and len(self._running) < self._size:
                with signals_wait():  # none is started that `end` does not know
                    self._running.append(_Process(self._left.pop(0), self._folder))
            time.sleep(LOOK_S)
            for process in [each for each in self._running if each.has_ended]:
                self._running.remove(process)
                self._take(process)

    def end(self) -> None:
        for process in self._running:
            process.end()

    @property
    def _may_begin(self) -> bool:
        return bool(self._left) and not self.errors

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

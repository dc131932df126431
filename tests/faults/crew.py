"""The processes of one run: forked, watched, woken up, and gone afterwards."""

import contextlib
import multiprocessing
import os
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from support.namespaces import enter_network

_FORK = multiprocessing.get_context("fork")


@dataclass(frozen=True)
class Member:
    """A process, and what it is."""

    worker: int
    process: BaseProcess

    @property
    def stopped(self) -> bool:
        """Has SIGSTOP stopped it?"""
        try:
            text = Path(f"/proc/{self.process.pid}/stat").read_text()
        except OSError:
            return False
        return text.rpartition(")")[2].split()[0] == "T"

    def signal(self, number: int) -> None:
        assert self.process.pid is not None
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.process.pid, number)


@dataclass(frozen=True)
class Ended:
    """How the processes of a run came to an end."""

    codes: tuple[int | None, ...]  # by worker; below 0: the signal that ended it
    hung: bool  # were they ended from here, as their time was over?


def start(order: Any, workers: Sequence[int], *, networks: Sequence[str] = ()) -> list[Member]:
    """Fork a process for each of the workers, which calls `order.work`. What it prints is kept with
    the notes."""
    found = []
    for worker in workers:
        inside = networks[worker] if networks else None
        process = _FORK.Process(target=_begin, args=(order, worker, inside))
        process.start()
        found.append(Member(worker, process))
    return found


def _begin(order: Any, worker: int, inside: str | None) -> None:
    for name, number in (("out", 1), ("err", 2)):
        file = os.open(order.notes / f"{worker}.{name}", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(file, number)
    if inside is not None:
        enter_network(inside)
    order.work(worker)


def wait(crew: list[Member], *, limit_s: float, when_stopped: Callable[[Member], None]) -> Ended:
    """Until all have ended, or the time is over. A member that has stopped itself is handed to
    `when_stopped` once."""
    deadline, seen = time.monotonic() + limit_s, set[int]()
    try:
        while any(member.process.is_alive() for member in crew):
            if time.monotonic() > deadline:
                return _ended(crew, hung=True)
            for member in crew:
                if member.worker not in seen and member.stopped:
                    seen.add(member.worker)
                    when_stopped(member)
            if _only_stopped_ones(crew):
                break
            time.sleep(0.005)
        return _ended(crew, hung=False)
    finally:
        end(crew)


def end(crew: list[Member]) -> None:
    for member in crew:
        member.signal(signal.SIGKILL)
        member.process.join()


def _only_stopped_ones(crew: list[Member]) -> bool:
    """Are those that are left stopped for good?"""
    return all(member.stopped for member in crew if member.process.is_alive())


def _ended(crew: list[Member], *, hung: bool) -> Ended:
    return Ended(tuple(member.process.exitcode for member in crew), hung)

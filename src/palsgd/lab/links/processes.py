"""One process per worker: started together, ended together."""

import contextlib
import math
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import IO

from palsgd.interrupts import ENDING

_TIED = str(Path(__file__).with_name("die_with_parent.py"))


@dataclass(frozen=True)
class Finished:
    """How one worker's process ended."""

    worker: int
    returncode: int
    stdout: str
    stderr: str

    def check(self) -> None:
        if self.returncode:
            raise self.as_error()

    def as_error(self) -> "WorkerError":
        last = self.stderr.strip().splitlines()[-1:] or ["what it said is above, if anything"]
        said = f"worker {self.worker} failed with exit code {self.returncode}: {last[0]}"
        return WorkerError(said, self.worker, self.returncode)


class WorkerError(RuntimeError):
    """A worker failed, and all were ended."""

    def __init__(self, message: str, worker: int, returncode: int | None):
        super().__init__(message)
        self.worker = worker
        self.returncode = returncode  # negative: the signal that ended it; None: it did not end


class AskedToLeaveError(Exception):
    """This process received a signal to end, and its workers have left."""

    def __init__(self, number: int):
        super().__init__(f"signal {number}")
        self.signal = number


def tied(command: Sequence[str]) -> list[str]:
    """The command in a process that the kernel kills when this one ends, however it ends."""
    return [sys.executable, "-S", "-E", _TIED, str(os.getpid()), *command]


def module_path() -> str:
    """PYTHONPATH for a process that finds the modules that this one finds, wherever it looks for
    them."""
    return os.pathsep.join(path for path in sys.path if path)


def end_group(process: subprocess.Popen[bytes]) -> None:
    """End the process and all processes it started that are still in its process group, which it
    leads."""
    with contextlib.suppress(ProcessLookupError):
        if hasattr(os, "killpg"):
            os.killpg(process.pid, signal.SIGKILL)
        else:
            process.kill()
    process.wait()


def environment(rank: int, workers: int, address: str, port: int, interface: str) -> dict[str, str]:
    """The environment variables of torch.distributed, in which each worker is a machine of its
    own."""
    inherited = {key: value for key, value in os.environ.items() if "TORCHELASTIC" not in key}
    return inherited | {
        "RANK": str(rank),
        "LOCAL_RANK": "0",
        "WORLD_SIZE": str(workers),
        "LOCAL_WORLD_SIZE": "1",
        "MASTER_ADDR": address,
        "MASTER_PORT": str(port),
        "GLOO_SOCKET_IFNAME": interface,
        "OMP_NUM_THREADS": str(max(1, (os.cpu_count() or 1) // workers)),
        # in a namespace addresses have no names, which torch would mention
        "TORCH_CPP_LOG_LEVEL": os.environ.get("TORCH_CPP_LOG_LEVEL", "ERROR"),
    }


def run_together(
    commands: Sequence[Sequence[str]],
    environments: Sequence[Mapping[str, str]],
    *,
    timeout: float = math.inf,
    cwd: Path | str | None = None,
    echo: bool | str = False,
    leave_s: float | None = None,
    settle_s: float = math.inf,
    lost: Callable[[Finished], bool] | None = None,
) -> list[Finished]:
    """Run the command in all workers until all have ended well. If one fails or the time is over,
    all are ended; once one has ended well, the others have `settle_s` seconds. With `echo` the
    first worker's stderr is this process's; with "all" that of all workers, and their stdout. With
    `leave_s`, SIGTERM and SIGHUP to this process ask the workers to leave, which have so many
    seconds for it. With `lost` the others go on without a worker that fails, as long as one is
    left; it is called with that worker, and says whether it is started again."""
    with contextlib.ExitStack() as stack:
        asked = stack.enter_context(_asked_to_leave(leave_s))

        def start(number: int) -> _Worker:
            shown = echo == "all" or (echo is True and number == 0)
            out, err = (stack.enter_context(tempfile.TemporaryFile()) for _ in range(2))
            process = subprocess.Popen(
                commands[number], env=environments[number], cwd=cwd, stdin=subprocess.DEVNULL,
                stdout=None if echo == "all" else out, stderr=None if shown else err,
                start_new_session=True,
            )  # fmt: skip
            worker = _Worker(number, process, out, err)
            stack.callback(end_group, process)
            return worker

        started = [start(number) for number in range(len(commands))]
        if lost is None:
            _wait(started, timeout, settle_s, asked)
        else:
            _wait_for_one(started, settle_s, asked, lambda each: lost(each) and start(each.worker))
        return [worker.finished() for worker in started if worker.process.poll() is not None]


def run_on_loopback(
    command: Sequence[str],
    workers: int,
    *,
    timeout: float = math.inf,
    echo: bool | str = False,
    env: Mapping[str, str] | None = None,
    leave_s: float | None = None,
    settle_s: float = math.inf,
    lost: Callable[[Finished], bool] | None = None,
) -> list[Finished]:
    """Run the same processes without links, all on this machine's loopback interface."""
    interface = "lo0" if sys.platform == "darwin" else "lo"
    with _store_on_loopback() as port:
        environments = [
            environment(rank, workers, "127.0.0.1", port, interface)
            | {"TORCHELASTIC_USE_AGENT_STORE": "True"}  # that store, and none of the first rank's
            | dict(env or {})
            for rank in range(workers)
        ]
        return run_together(
            [tied(command)] * workers, environments, timeout=timeout, echo=echo, leave_s=leave_s,
            settle_s=settle_s, lost=lost,
        )  # fmt: skip


@contextlib.contextmanager
def _store_on_loopback() -> Iterator[int]:
    """The store through which the workers of this machine find each other; its port. torch's own
    would listen on all interfaces, and answers everybody who can reach it."""
    from torch.distributed import TCPStore

    with socket.create_server(("127.0.0.1", 0)) as listening:
        port = int(listening.getsockname()[1])
        store = TCPStore(  # it closes the socket when it is gone
            "127.0.0.1", port, is_master=True, wait_for_workers=False,
            master_listen_fd=listening.detach(),
        )  # fmt: skip
    yield port
    del store


@contextlib.contextmanager
def _asked_to_leave(leave_s: float | None) -> Iterator["_Asked"]:
    """Inside, SIGTERM and SIGHUP are noted, to be passed on to the workers."""
    asked = _Asked(leave_s or 0.0)
    if leave_s is None or threading.current_thread() is not threading.main_thread():
        yield asked
        return
    heard = [number for number in ENDING if signal.getsignal(number) is not signal.SIG_IGN]
    before = {number: signal.signal(number, asked.note) for number in heard}
    try:
        yield asked
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


class _Asked:
    """Whether this process was asked to end, and what that means for its workers."""

    def __init__(self, leave_s: float):
        self.signal: int | None = None  # the first one
        self._leave_s, self._came, self._passed_on, self._until = leave_s, 0, 0, math.inf

    def note(self, number: int, frame: FrameType | None) -> None:
        self.signal = self.signal or number
        self._came += 1

    def pass_on(self, workers: Iterable["_Worker"]) -> None:
        """Ask the workers to leave, as often as this process was asked."""
        if self._came > self._passed_on:
            self._passed_on, self._until = self._came, time.monotonic() + self._leave_s
            for worker in workers:
                worker.process.terminate()

    @property
    def over(self) -> bool:
        """Have the workers had their time?"""
        return time.monotonic() > self._until


@dataclass(frozen=True)
class _Worker:
    number: int
    process: subprocess.Popen[bytes]
    out: IO[bytes]
    err: IO[bytes]

    def finished(self) -> Finished:
        texts = []
        for file in (self.out, self.err):
            file.seek(0)
            texts.append(file.read().decode(errors="replace"))
        return Finished(self.number, self.process.wait(), *texts)


def _wait(workers: list[_Worker], timeout: float, settle_s: float, asked: _Asked) -> None:
    deadline, settled = time.monotonic() + timeout, math.inf
    running = list(workers)
    while running and not asked.over:
        asked.pass_on(running)
        for worker in [each for each in running if each.process.poll() is not None]:
            running.remove(worker)
            if asked.signal is None:
                worker.finished().check()
            settled = min(settled, time.monotonic() + settle_s)
        if running and time.monotonic() > min(deadline, settled):
            names = ", ".join(str(worker.number) for worker in running)
            late = f"after {timeout:g} s; give it more time or less to do"
            if settled < deadline:
                late = f"{settle_s:g} s after another one had; look at what holds it"
            raise WorkerError(f"worker {names} had not finished {late}", running[0].number, None)
        time.sleep(0.02)
    if asked.signal is not None and (running or any(each.process.poll() for each in workers)):
        raise AskedToLeaveError(asked.signal)


def _wait_for_one(
    workers: list[_Worker],
    settle_s: float,
    asked: _Asked,
    again: Callable[[Finished], "_Worker | bool"],
) -> None:
    """Wait until all workers have ended, of which one must have ended well. `again` is called with
    one that failed, and starts another in its place, or none."""
    settled, well, last = math.inf, False, None
    running = list(workers)
    while running and not asked.over and time.monotonic() < settled:
        asked.pass_on(running)
        for worker in [each for each in running if each.process.poll() is not None]:
            running.remove(worker)
            last = worker.finished()
            if not last.returncode:
                well, settled = True, min(settled, time.monotonic() + settle_s)
            elif asked.signal is None and isinstance(other := again(last), _Worker):
                running.append(other)
        time.sleep(0.02)
    if asked.signal is not None and not (well and not running):
        raise AskedToLeaveError(asked.signal)
    if not well and last is not None:
        last.check()

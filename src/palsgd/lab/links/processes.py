"""One process per worker: started together, ended together."""

import contextlib
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO

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
            last = self.stderr.strip().splitlines()[-1:] or ["what it said is above, if anything"]
            raise RuntimeError(
                f"worker {self.worker} failed with exit code {self.returncode}: {last[0]}"
            )


def tied(command: Sequence[str]) -> list[str]:
    """The command in a process that the kernel kills when this one ends, however it ends."""
    return [sys.executable, "-S", "-E", _TIED, str(os.getpid()), *command]


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
    timeout: float,
    cwd: Path | str | None = None,
    echo: bool = False,
) -> list[Finished]:
    """Run the command in all workers until all have ended well. If one fails or the time is over,
    all are ended. With `echo` the first worker's stderr is this process's."""
    with contextlib.ExitStack() as stack:
        started: list[_Worker] = []
        for number, (words, env) in enumerate(zip(commands, environments, strict=True)):
            shown = echo and number == 0
            out, err = (stack.enter_context(tempfile.TemporaryFile()) for _ in range(2))
            process = subprocess.Popen(
                words, env=env, cwd=cwd, stdin=subprocess.DEVNULL, stdout=out,
                stderr=None if shown else err, start_new_session=True,
            )  # fmt: skip
            started.append(_Worker(number, process, out, err))
            stack.callback(started[-1].end)
        _wait(started, timeout)
        return [worker.finished() for worker in started]


def run_on_loopback(
    command: Sequence[str], workers: int, *, timeout: float, echo: bool = False
) -> list[Finished]:
    """Run the same processes without links, all on this machine's loopback interface."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    interface = "lo0" if sys.platform == "darwin" else "lo"
    environments = [
        environment(rank, workers, "127.0.0.1", port, interface) for rank in range(workers)
    ]
    return run_together([tied(command)] * workers, environments, timeout=timeout, echo=echo)


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

    def end(self) -> None:
        """End the process and all processes it started that are still in its process group."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()


def _wait(workers: list[_Worker], timeout: float) -> None:
    deadline = time.monotonic() + timeout
    running = list(workers)
    while running:
        for worker in [each for each in running if each.process.poll() is not None]:
            running.remove(worker)
            worker.finished().check()
        if running and time.monotonic() > deadline:
            names = ", ".join(str(worker.number) for worker in running)
            raise RuntimeError(
                f"worker {names} had not finished after {timeout:g} s; give it more time or less "
                "to do"
            )
        time.sleep(0.02)

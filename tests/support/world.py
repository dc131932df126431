"""Real worker processes over gloo, kept alive between tests so that each costs milliseconds."""

import multiprocessing
import os
import pickle
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

from support.patience import patient
from support.warm import server

# Once in some ten thousand times gloo does not connect its processes on loopback, and says that a
# peer has closed the connection. Nothing of a job has run by then, so it is tried again.
_UNCONNECTED, _TRIES = "Unconnected", 3


@dataclass(frozen=True)
class Outcome:
    """What one worker's call came to."""

    value: Any = None
    error: str | None = None  # the exception's class name
    message: str = ""
    trace: str = ""
    seconds: float = 0.0


class World:
    """`run(job, workers=K, ...)` calls `job(**kwargs)` in K processes joined in a gloo group."""

    def __init__(self, *, fresh: bool | None = None) -> None:
        """`fresh`: are all workers interpreters of their own? None: the first one is, whose hashes
        then are others than those of the rest. The rest fork from a process that has imported what
        they need, so that they may be killed in every call and cost little."""
        self._fresh = fresh
        self._workers: list[tuple[Any, Any]] = []
        # Has the stores of all calls. A process drops its store when it collects its garbage,
        # perhaps in a later call, and opens the file once more then; were the folder removed
        # meanwhile, the process would end, or the removal fail.
        self._folder: tempfile.TemporaryDirectory[str] | None = None
        self._calls = 0

    def run(
        self, job: Callable[..., Any], *, workers: int, timeout: float = 60, **kwargs: Any
    ) -> list:
        outcomes = self.outcomes(job, workers=workers, timeout=timeout, **kwargs)
        for rank, outcome in enumerate(outcomes):
            if outcome.error:
                raise AssertionError(f"worker {rank}: {outcome.trace}")
        return [outcome.value for outcome in outcomes]

    def outcomes(
        self, job: Callable[..., Any], *, workers: int, timeout: float = 60, **kwargs: Any
    ) -> list[Outcome]:
        """Like `run`, with exceptions returned instead of raised. The limit is for patience 1."""
        for _ in range(_TRIES):
            found = self._called(job, workers, patient(timeout), kwargs)
            if all(outcome.error != _UNCONNECTED for outcome in found):
                break
            self.close()
        return found

    def _called(
        self, job: Callable[..., Any], workers: int, timeout: float, kwargs: dict[str, Any]
    ) -> list[Outcome]:
        while len(self._workers) < workers:
            self._start()
        self._folder = self._folder or tempfile.TemporaryDirectory(ignore_cleanup_errors=True)
        self._calls += 1
        for rank in range(workers):
            call = (job, kwargs, rank, workers, f"{self._folder.name}/{self._calls}", timeout)
            self._workers[rank][1].send_bytes(pickle.dumps(call))
        deadline = time.monotonic() + timeout + patient(60)
        pipes = [pipe for _, pipe in self._workers[:workers]]
        return [self._collect(pipe, deadline) for pipe in pipes]

    def close(self) -> None:
        for process, pipe in self._workers:
            pipe.close()
            process.join(timeout=patient(10))
            if process.is_alive():
                process.kill()
                process.join()
        self._workers = []
        if self._folder is not None:
            self._folder.cleanup()
            self._folder = None

    def _start(self) -> None:
        fresh = not self._workers if self._fresh is None else self._fresh
        context = multiprocessing.get_context("spawn") if fresh else server()
        ours, theirs = context.Pipe()
        process = context.Process(target=_serve, args=(theirs,), daemon=True)
        process.start()
        theirs.close()
        self._workers.append((process, ours))

    def _collect(self, pipe: Any, deadline: float) -> Outcome:
        try:
            if pipe.poll(max(0.0, deadline - time.monotonic())):
                return pickle.loads(pipe.recv_bytes())
            outcome = Outcome(error="Hang", message="no answer", trace="the worker hangs")
        except (EOFError, OSError):
            outcome = Outcome(error="Exit", message="the process ended", trace="the worker exited")
        self.close()  # the others may be stuck with it; the next call starts new processes
        return outcome


def _serve(pipe: Any) -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    import torch

    torch.set_num_threads(1)
    while True:
        try:
            call = pickle.loads(pipe.recv_bytes())
        except EOFError:
            return
        began = time.monotonic()
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            warnings.filterwarnings("ignore", category=DeprecationWarning, module="torch")
            outcome = _perform(*call)
        outcome = Outcome(**{**outcome.__dict__, "seconds": time.monotonic() - began})
        pipe.send_bytes(pickle.dumps(outcome))


def _perform(job: Any, kwargs: Any, rank: int, size: int, store: str, timeout: float) -> Outcome:
    import torch.distributed as dist

    try:
        dist.init_process_group(
            "gloo",
            init_method=Path(store).as_uri(),
            rank=rank,
            world_size=size,
            timeout=timedelta(seconds=timeout),
        )
    except RuntimeError as error:
        return Outcome(error=_UNCONNECTED, message=str(error), trace=traceback.format_exc())
    try:
        return Outcome(value=job(**kwargs))
    except BaseException as error:
        trace = traceback.format_exc()
        return Outcome(error=type(error).__name__, message=str(error), trace=trace)
    finally:
        dist.destroy_process_group()

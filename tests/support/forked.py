"""Workers that are forked from this process, so that each costs milliseconds and may be killed.

They talk through pipes, by a transport that has `mean` and nothing else. They must not use autograd
if this process has used a GPU; gradients are set by hand.
"""

import gc
import os
import pickle
import signal
import socket
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Generator
from functools import cache
from pathlib import Path
from typing import Any

import torch

import palsgd
from support.patience import patient
from support.world import Outcome

KILLED = 86  # the exit status of a worker that ends itself in the middle of something


class Piped(palsgd.Transport):
    """Worker 0 has a pipe to each of the others, adds up what they send, and sends the mean."""

    def __init__(self, worker: int, workers: int, pipes: list[Any]):
        self.worker, self.workers, self._pipes = worker, workers, pipes

    def mean(self, message: palsgd.Message) -> None:
        try:
            self._average(message.values)
        except OSError as error:
            raise RuntimeError("the worker at the other end is gone") from error

    def _average(self, values: torch.Tensor) -> None:
        if self.worker:
            self._pipes[self.worker][1].sendall(values.numpy().tobytes())
            values.copy_(self._receive(self._pipes[self.worker][1], values))
            return
        for pipe, _ in self._pipes[1:]:
            values += self._receive(pipe, values)
        values /= self.workers
        for pipe, _ in self._pipes[1:]:
            pipe.sendall(values.numpy().tobytes())

    def _receive(self, pipe: Any, like: torch.Tensor) -> torch.Tensor:
        data = bytearray()
        while len(data) < like.nbytes:
            piece = pipe.recv(like.nbytes - len(data))
            if not piece:
                raise RuntimeError("the worker at the other end is gone")
            data += piece
        return torch.frombuffer(data, dtype=like.dtype) if data else like.clone()


def forked(job: Callable[..., Any], *, workers: int, **kwargs: Any) -> list[Outcome]:
    """What `job(transport, **kwargs)` comes to in each of `workers` processes."""
    _import_all()
    pipes = [socket.socketpair() for _ in range(workers)]
    answers = [os.pipe() for _ in range(workers)]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of threads, of which torch has some
        children = [_fork(job, k, pipes, answers, kwargs) for k in range(workers)]
    for pair in pipes:
        for pipe in pair:
            pipe.close()
    found = []
    for (reads, writes), child in zip(answers, children, strict=True):
        os.close(writes)
        with os.fdopen(reads, "rb") as file:
            said = file.read()  # ends when the child does
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        gone = Outcome(error="Exit", message=f"status {status}", trace=f"status {status}")
        found.append(pickle.loads(said) if said else gone)
    return found


@cache
def _import_all() -> None:
    """Take a step and save, as a first step imports modules for seconds, in every child again."""
    model = torch.nn.Linear(1, 1)
    inner = torch.optim.AdamW(model.parameters())
    opt = palsgd.DiLoCo(model, inner, sync_every=1, transport=palsgd.Alone())
    model.weight.grad = torch.ones(1, 1)
    opt.step()
    with tempfile.TemporaryDirectory() as folder:
        palsgd.checkpoint.save(folder, model, opt)


def values_of(outcomes: list[Outcome]) -> list[Any]:
    for worker, outcome in enumerate(outcomes):
        assert outcome.error is None, f"worker {worker}: {outcome.trace}"
    return [outcome.value for outcome in outcomes]


def driven(transport: palsgd.Transport, exchange: Generator[palsgd.Message, int, Any]) -> Any:
    """What a generator of messages returns."""
    sent = None
    while True:
        try:
            sent = transport.exchange(exchange.send(sent))
        except StopIteration as end:
            return end.value


def _fork(job: Any, worker: int, pipes: list[Any], answers: list[Any], kwargs: Any) -> int:
    child = os.fork()
    if child:
        return child
    try:
        gc.disable()  # a collection would copy all memory that is shared with the parent
        for k, (near, far) in enumerate(pipes):  # else nobody would notice that a peer is gone
            if worker != 0:
                near.close()
            if k != worker or worker == 0:
                far.close()
        for k, (reads, writes) in enumerate(answers):
            os.close(reads)
            if k != worker:
                os.close(writes)
        _limit(patient(60))
        outcome = _perform(job, Piped(worker, len(pipes), pipes), kwargs)
        with os.fdopen(answers[worker][1], "wb") as file:
            file.write(pickle.dumps(outcome))
    finally:
        os._exit(0)


def _limit(seconds: float) -> None:
    """A worker that hangs is ended."""
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.setitimer(signal.ITIMER_REAL, seconds)


def _perform(job: Any, transport: Piped, kwargs: Any) -> Outcome:
    began = time.monotonic()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            return Outcome(value=job(transport, **kwargs), seconds=time.monotonic() - began)
    except BaseException as error:
        trace = traceback.format_exc()
        return Outcome(error=type(error).__name__, message=str(error), trace=trace)


class Death:
    """Ends this process before the `count`-th call of a function, or after it or the next one that
    succeeds."""

    def __init__(self, place: Any, name: str, count: int, *, after: bool = False):
        self._call, self._left, self._after = getattr(place, name), count, after
        setattr(place, name, self)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self._left -= 1
        if self._left == 0 and not self._after:
            os._exit(KILLED)
        found = self._call(*args, **kwargs)
        if self._left <= 0:
            os._exit(KILLED)
        return found


def tree(folder: Path) -> set[str]:
    """The names of everything in a folder."""
    return {str(path.relative_to(folder)) for path in Path(folder).rglob("*")}

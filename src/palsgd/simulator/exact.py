"""The exact engine: the optimizers' own code, workers advanced one after another."""

import math
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from palsgd.errors import NonFiniteError, SyncError
from palsgd.ledger import Ledger
from palsgd.optimizer import LocalOptimizer
from palsgd.simulator.batches import Batches, check_loss, moved
from palsgd.simulator.record import Recorder
from palsgd.simulator.result import Result
from palsgd.transport import ambient, check_agreement

Randomness = dict[str, Any]  # the state of torch's generators, on a device


class SimulatedTransport:
    """A place among K workers. The engine averages; nothing is ever asked of it here."""

    def __init__(self, worker: int, workers: int, settings: list[dict[str, Any]]):
        self.worker, self.workers, self._settings = worker, workers, settings

    def average(self, tensors: list[Tensor]) -> int:
        raise RuntimeError("a simulated worker is driven by palsgd.simulate, not by opt.step()")

    def combine(self, values: Tensor) -> None:
        pass

    def agree(self, settings: dict[str, Any]) -> None:
        self._settings.append(settings)
        check_agreement(self._settings, [f"worker {k}" for k in range(len(self._settings))])


def built(
    method: Callable[[nn.Module], LocalOptimizer], model: nn.Module, transport: SimulatedTransport
) -> LocalOptimizer:
    with ambient(transport):
        opt = method(model)
    if not isinstance(opt, LocalOptimizer):
        raise ValueError(
            f"method(model) must return a palsgd optimizer, got {type(opt).__name__}; use "
            "lambda model: palsgd.DiLoCo(model, SGD(model.parameters(), 0.1), sync_every=32)"
        )
    return opt


class Note(NamedTuple):
    """What a worker has to say about an exchange. The first are many steps further when the last
    is through, so the ledger is a copy."""

    loss: float  # mean since the last exchange
    distance: float
    ledger: Ledger


class Worker:
    """One simulated process: model, optimizer, data, and random numbers of its own."""

    def __init__(
        self,
        model: nn.Module,
        method: Callable[[nn.Module], LocalOptimizer],
        transport: SimulatedTransport,
        loss: Callable[[nn.Module, Any], Tensor],
        batches: Batches,
        rng: Randomness,
    ):
        self.opt = built(method, model, transport)
        self.model = model
        self.losses: list[Tensor] = []  # since the last exchange
        self.metrics: list[Any] = []
        self.notes: list[Note] = []  # one per exchange
        self._worker, self._loss, self._batches = transport.worker, loss, batches
        self._rng = rng
        self._life: Generator[list[Tensor], int, None] | None = None

    def advance(self, steps: int, sent: int) -> list[Tensor] | None:
        """Run to the next mean that is due; None at the end of training."""
        with own_randomness(self._rng):
            if self._life is None:
                self._life = self._train(steps)
                return next(self._life, None)
            try:
                return self._life.send(sent)
            except StopIteration:
                return None

    def _train(self, steps: int) -> Generator[list[Tensor], int, None]:
        core, opt = self.opt._core, self.opt
        core.end = steps
        yield from torch.no_grad()(core.skip_idle_rounds)()
        while core.clock < steps:
            loss = self._loss(self.model, moved(self._batches.next(), core.replica.device))
            check_loss(loss, self._worker, core.gradient_steps)
            loss.backward()
            self.losses.append(loss.detach().reshape(()))
            yield from torch.no_grad()(core.step)()
            opt.zero_grad()


def run_exact(
    *,
    models: list[nn.Module],
    steps: int,
    loss: Callable[[nn.Module, Any], Tensor],
    batches: list[Batches],
    method: Callable[[nn.Module], LocalOptimizer],
    rngs: list[Randomness],
    recorder: Recorder,
) -> Result:
    settings: list[dict[str, Any]] = []
    crew = [
        Worker(
            model,
            method,
            SimulatedTransport(k, len(models), settings),
            loss,
            batches[k],
            rngs[k],
        )
        for k, model in enumerate(models)
    ]
    for worker in crew:
        worker.opt.after_exchange(partial(_note, recorder, crew, worker))
    recorder.begin(steps)
    sent, requests = 0, [worker.advance(steps, 0) for worker in crew]
    while any(request is not None for request in requests):
        sent = mean_(requests, crew[0].opt.clock)
        requests = [worker.advance(steps, sent) for worker in crew]
    recorder.end()
    return Result(
        model=crew[0].model,
        engine="exact",
        history=recorder.history,
        ledgers=[worker.opt.ledger for worker in crew],
        optimizers=[worker.opt for worker in crew],
    )


def _note(recorder: Recorder, crew: list[Worker], worker: Worker) -> None:
    """One worker is through an exchange; with the last one, the exchange is history."""
    if worker is crew[0]:  # the model that is returned is the model that is evaluated
        worker.metrics.append(recorder.metric(worker.opt.clock, worker.opt.anchor_weights))
    loss, ledger = _mean_loss(worker), worker.opt.ledger
    worker.notes.append(Note(loss, ledger.distance, replace(ledger, history=[])))
    if worker is crew[-1]:
        notes = [each.notes.pop(0) for each in crew]
        recorder.add(
            clock=worker.opt.clock,
            round=worker.opt.rounds,
            losses=[note.loss for note in notes],
            distance=[note.distance for note in notes],
            ledger=notes[0].ledger,
            metric=crew[0].metrics.pop(0),
        )


def _mean_loss(worker: Worker) -> float:
    """Over the gradient steps since the last exchange."""
    if not worker.losses:
        return math.nan
    losses = torch.stack(worker.losses).double().cpu()
    worker.losses.clear()
    if worker.opt.config["on_nonfinite"] == "raise":
        check_losses([losses], [worker.opt.gradient_steps], [worker.opt.transport.worker])
    return float(losses.mean())


def check_losses(losses: list[Tensor], gradient_steps: list[int], workers: list[int]) -> None:
    """Raise for a loss that is not finite, with the worker and the gradient step it came from."""
    for found, total, worker in zip(losses, gradient_steps, workers, strict=True):
        bad = (~found.isfinite()).nonzero()
        if len(bad):
            step = total - len(found) + int(bad[0])
            raise NonFiniteError(
                f"the loss of worker {worker} is {float(found[bad[0]])} at gradient step {step}; "
                "lower the learning rate or clip gradients, or pass on_nonfinite='skip'"
            )


def mean_(requests: list[list[Tensor] | None], clock: int) -> int:
    """Replace what each worker brought by the mean of all, as an all-reduce would."""
    absent = [k for k, request in enumerate(requests) if request is None]
    if absent:
        raise SyncError(f"worker {absent[0]} ended before the exchange at clock {clock}")
    lists = [request for request in requests if request is not None]
    sizes = [[t.numel() for t in request] for request in lists]
    odd = next((k for k, found in enumerate(sizes) if found != sizes[0]), None)
    if odd is not None:
        raise SyncError(
            f"workers 0 and {odd} bring messages of {sizes[0]} and {sizes[odd]} elements to the "
            f"exchange at clock {clock}; every worker must run the same method and model"
        )
    if len(lists) == 1:
        return 0
    for tensors in zip(*lists, strict=True):
        total = tensors[0].clone()
        for tensor in tensors[1:]:
            total += tensor
        total /= len(tensors)
        for tensor in tensors:
            tensor.copy_(total)
    return sum(t.nbytes for t in lists[0])


def seeded(seed: int, device: torch.device) -> Randomness:
    """The state of torch's generators right after torch.manual_seed(seed)."""
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        torch.manual_seed(seed)
        return _rng_state(device)


def _rng_state(device: torch.device) -> Randomness:
    cuda = torch.cuda.get_rng_state(device) if device.type == "cuda" else None
    return {"cpu": torch.get_rng_state(), "cuda": cuda, "device": device}


@contextmanager
def own_randomness(state: Randomness) -> Iterator[None]:
    """torch's generators as this worker left them, and back: nobody else draws from them."""
    outside = _rng_state(state["device"])
    _set_rng(state)
    try:
        yield
    finally:
        state.update(_rng_state(state["device"]))
        _set_rng(outside)


def _set_rng(state: Randomness) -> None:
    torch.set_rng_state(state["cpu"])
    if state["cuda"] is not None:
        torch.cuda.set_rng_state(state["cuda"], state["device"])

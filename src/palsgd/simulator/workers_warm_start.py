"""The end of a warm-up, for workers that train one after another: what the first run that computes
it leaves, and how others start there. The stacked engine has its own form of it (warm_start.py)."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from palsgd.inner import parts_of
from palsgd.simulator.saved import cloned, copy_tensors, tensors_of

if TYPE_CHECKING:
    from palsgd.simulator.exact import Exact, Randomness, SimulatedWorker


@dataclass(frozen=True, kw_only=True)
class WorkerWarmUp:
    """What one worker has after its warm-up."""

    buffers: dict[str, Tensor]
    batches: Any  # its place in its data
    rng: "Randomness"

    @classmethod
    def of(cls, worker: "SimulatedWorker", rng: "Randomness") -> "WorkerWarmUp":
        buffers = {name: b.clone() for name, b in worker.model.named_buffers()}
        return cls(buffers=buffers, batches=worker.batches.state(), rng=rng)


@dataclass(frozen=True, kw_only=True)
class WorkersWarmUp:
    """What a run has after its warm-up."""

    steps: int
    params: dict[str, Tensor]  # the one model that its workers have
    inner: list[dict[str, Any]]  # the state of the inner optimizer, for each parameter
    workers: list[WorkerWarmUp]
    history: dict[str, Any]
    rates: list[float]  # of the next step
    seconds: float

    @classmethod
    def of(cls, engine: "Exact", workers: list[WorkerWarmUp]) -> "WorkersWarmUp":
        first, recorder = engine.workers[0], engine.recorders[0]
        params = {name: p.detach().clone() for name, p in first.model.named_parameters()}
        return cls(
            steps=engine.clock,
            params=params,
            inner=[cloned(dict(part.state.get(p, {}))) for part, p in _trained(first)],
            workers=workers,
            history=recorder.state(),
            rates=first.opt._worker.inner.rates(),
            seconds=recorder.watch.seconds(),
        )

    @torch.no_grad()
    def give(self, engine: "Exact") -> None:
        """Let a run that has not begun start here. What it has sent until then is its own: a header
        may be longer than that of the run which computed the warm-up."""
        pairs = zip(engine.workers, self.workers, strict=True)
        sent, *_ = [self._give(worker, found) for worker, found in pairs]
        recorder = engine.recorders[0]
        recorder.load(self.history)
        recorder.watch.set(self.seconds)
        for entry in recorder.history:
            entry["bytes_sent"] = sent[entry["clock"]]

    def _give(self, worker: "SimulatedWorker", found: WorkerWarmUp) -> list[int]:
        """Returns what the worker has sent at every clock so far."""
        own, sent = worker.opt._worker, [0]
        for _ in range(self.steps):
            own.pass_warmup_step()
            sent.append(own.ledger.bytes_sent)
        check_rates(own.inner.rates(), self.rates)
        copy_tensors({**self.params, **found.buffers}, tensors_of(worker.model))
        for (part, p), state in zip(_trained(worker), self.inner, strict=True):
            if state:
                part.state[p] = cloned(state)
        worker.batches.load(found.batches)
        worker.rng.update(cloned(found.rng))
        return sent


def check_rates(rates: list[float], wanted: list[float]) -> None:
    """Refuse a run whose warm-up, by its learning rates, is not the one that it was to share."""
    if rates != wanted:
        raise ValueError(
            f"a run has the learning rates {rates} after its warm-up, and that which it shares "
            f"ends with {wanted}; give it a SharedWarmUp of its own"
        )


def _trained(worker: "SimulatedWorker") -> list[tuple[Optimizer, Tensor]]:
    """The parameters, each with the optimizer that trains it."""
    parts = parts_of(worker.opt.inner)
    return [(part, p) for part in parts for group in part.param_groups for p in group["params"]]

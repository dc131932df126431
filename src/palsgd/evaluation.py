"""The global model in place of the local one, for an evaluation, and the way back.

An inner optimizer may have a training and an evaluation mode of its own, with `train()` and
`eval()`, as schedule-free optimizers do: their evaluation weights are made of the model and of
inner state. Both calls are passed on, so that the global model is shown in evaluation mode.
"""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from palsgd.checks import warn
from palsgd.driver import Driver
from palsgd.errors import SyncError
from palsgd.parts import flattened, unflattened
from palsgd.transports.requests import Exchange, LeftOutError, Settle
from palsgd.transports.transport import Message
from palsgd.worker import Worker


def parts_with_modes(inner: Optimizer) -> list[Any]:
    """The inner optimizers that have `train()` and `eval()`. A wrapper that passes both on, as
    accelerate's does, has them if the optimizer inside it does."""
    parts = getattr(inner, "parts", [inner])
    found = []
    for part in parts:
        inside = getattr(part, "optimizer", None)
        asked = inside if isinstance(inside, Optimizer) else part
        if callable(getattr(asked, "train", None)) and callable(getattr(asked, "eval", None)):
            found.append(part)
    return found


def check_modes(inner: Optimizer, average_state: tuple[str, ...] | None) -> None:
    """Refuse an inner optimizer whose evaluation weights would differ between workers."""
    parts = parts_with_modes(inner)
    if parts and average_state is None:
        raise ValueError(
            f"inner={type(parts[0]).__name__} has train() and eval(): its evaluation weights are "
            "made of the model and of inner state, which differs between workers; name the state "
            "to be averaged at each sync, such as average_state=('z',), or give "
            "average_state=() if there is none"
        )


class Evaluation:
    """Keeps the local model, its buffers and the inner optimizer's averaged state while the model
    holds the global ones."""

    def __init__(self, worker: Worker):
        self._worker, self._modes = worker, parts_with_modes(worker.inner.optimizer)
        averaged = worker.changes and worker.changes.averaged
        self._held = worker.inner.replica.local() + worker.warmup.buffers.all()
        if self._modes and averaged:
            self._held += averaged.held()
        with torch.no_grad():
            self._kept = self._aside()
        self._hidden: list[tuple[dict[str, Any], str, Any]] = []

    def _aside(self) -> list[Tensor]:
        """Copies of the tensors, which are kept while the model shows others."""
        syncer = self._worker._syncer
        copy = torch.clone if syncer is None else syncer.anchor.home.aside
        return [copy(tensor) for tensor in self._held]

    def show(self) -> Exchange:
        """Put the global model into the local one. In the warm-up every local model is the global
        model."""
        worker = self._worker
        if worker.at.has_anchor:
            yield from _show_global_model(worker)
            averaged = worker.syncer.changes.averaged
            if self._modes and averaged:
                self._hidden = averaged.hide_unknown()
                averaged.copy_to_local()
        for part in self._modes:
            part.eval()

    def end(self) -> None:
        """Restore what was there before, bit for bit."""
        for part in self._modes:
            part.train()
        for state, name, tensor in self._hidden:
            state[name] = tensor
        with torch.no_grad():
            torch._foreach_copy_(self._held, self._kept)
        self._worker.books.meter.skip()

    @contextmanager
    def interrupted(self) -> Iterator[None]:
        """Inside, the model and the inner state are those of training, for example to be saved."""
        shown, hidden = self._aside(), self._hidden
        self.end()
        try:
            yield
        finally:
            for part in self._modes:
                part.eval()
            for state, name, _ in hidden:
                del state[name]
            with torch.no_grad():
                torch._foreach_copy_(self._held, shown)


class EvaluationMode:
    """Which model the model's tensors hold: the local one, or the global one for an evaluation."""

    def __init__(self, worker: Worker, driver: Driver):
        self._worker, self._driver = worker, driver
        self.shows_global = False
        self._evaluation: Evaluation | None = None  # between eval() and train()

    @property
    def lasts(self) -> bool:
        """Was it begun, and not ended?"""
        return self._evaluation is not None

    def begin(self) -> None:
        if self._evaluation is not None:
            return
        if self.shows_global:
            raise RuntimeError("eval() inside anchor_weights(): leave the with block first")
        self.warn_of_stale_buffers()
        self._evaluation = self._shown()
        self.shows_global = True

    def end(self) -> None:
        if self._evaluation is not None:
            self._evaluation.end()
            self.forget()

    def forget(self) -> None:
        """The model is loaded, so what it held before must not come back."""
        self._evaluation, self.shows_global = None, False

    @contextmanager
    def inside(self) -> Iterator[None]:
        """Inside, the model holds the global weights and buffers."""
        if self._evaluation is not None:  # eval() shows them already
            yield
            return
        evaluation = self._shown()
        outside, self.shows_global = self.shows_global, True
        try:
            yield
        finally:
            self.shows_global = outside
            evaluation.end()

    def interrupted(self) -> AbstractContextManager[None]:
        """Inside, the model and the inner optimizer are as training left them."""
        return nullcontext() if self._evaluation is None else self._evaluation.interrupted()

    def _shown(self) -> Evaluation:
        evaluation = Evaluation(self._worker)
        try:
            self._driver.run(evaluation.show())
        except BaseException:
            evaluation.end()
            raise
        return evaluation

    def warn_of_stale_buffers(self) -> None:
        if self._worker.at.has_anchor and not self._worker.warmup.buffers.current:
            warn(
                "buffers='recompute' and they were not recomputed since the last sync: the global "
                "weights are shown with this worker's own buffers; call recompute_buffers(batches)"
            )


def _show_global_model(worker: Worker) -> Exchange:
    """Put the global model and its buffers into the local ones."""
    syncer, own = worker.syncer, None
    if worker.method.overrides("global_model"):
        own = worker.method.global_model(syncer.view.whole())
    if own is None:
        syncer.anchor.copy_to_local()
    else:
        values = flattened(own, syncer.memory.template)
        syncer.count_message((yield Message(values)))
        local = [t.detach() for t in worker.inner.replica.local()]
        torch._foreach_copy_(local, unflattened(values, local))
    syncer.buffers.copy_to_local()


def average_buffers(worker: Worker) -> Exchange:
    """Average the recomputed buffers over the workers into the global model's buffers."""
    where = "recompute_buffers()"
    try:
        yield from worker.meetings.together(where, partial(_averaged, worker), patient=True)
    except LeftOutError:
        raise SyncError(
            f"the others have gone on without worker {worker.course.number} while it was in "
            f"{where}; start this worker again"
        ) from None


def _averaged(worker: Worker) -> Exchange:
    warmup, workers = worker.warmup, worker.facts.workers
    values = warmup.buffers.encode(warmup.guard.place, warmup.template)
    worker.books.count_message((yield Message(values)))
    if warmup.guard.elastic:
        yield Settle()
    warmup.buffers.decode(values, workers, workers)

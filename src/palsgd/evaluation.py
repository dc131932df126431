"""The global model in place of the local one, for an evaluation, and the way back.

An inner optimizer may have a training and an evaluation mode of its own, with `train()` and
`eval()`, as schedule-free optimizers do: their evaluation weights are made of the model and of
inner state. Both calls are passed on, so that the global model is shown in evaluation mode.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.optim import Optimizer

from palsgd.worker import Exchange, Worker


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
        averaged = worker._syncer and worker._syncer.averaged
        self._held = worker.inner.replica.local() + worker.warmup.buffers.all()
        if self._modes and averaged:
            self._held += averaged.held()
        with torch.no_grad():
            self._kept = [worker.aside(t) for t in self._held]
        self._hidden: list[tuple[dict[str, Any], str, Any]] = []

    def show(self) -> Exchange:
        """Put the global model into the local one. In the warm-up every local model is the global
        model."""
        worker = self._worker
        if worker.at.has_anchor:
            yield from worker.show_global_model()
            averaged = worker.syncer.averaged
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
        self._worker.meter.skip()

    @contextmanager
    def interrupted(self) -> Iterator[None]:
        """Inside, the model and the inner state are those of training, for example to be saved."""
        shown, hidden = [self._worker.aside(t) for t in self._held], self._hidden
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

"""The batches of one worker, with errors that name the worker."""

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree


class DryError(ValueError):
    """A worker's data ended before its training."""


class Batches:
    """The batches of one worker. At the end of a list or loader they start again from its
    beginning."""

    def __init__(self, data: Callable[[int], Iterable[Any]], worker: int):
        self._source, self._worker = data(worker), worker
        self._iterator: Iterator[Any] = iter(self._source)
        self._taken = 0
        self._held: list[Any] | None = None

    def peek(self) -> Any:
        """The next batch. The following call of `next` returns it too."""
        if self._held is None:
            self._held = [self.next()]
        return self._held[0]

    def next(self) -> Any:
        if self._held is not None:
            (batch,), self._held = self._held, None
            return batch
        try:
            batch = next(self._iterator)
        except StopIteration:
            batch = self._again()
        self._taken += 1
        return batch

    def _again(self) -> Any:
        # iter() of an iterator is that iterator, which has ended
        self._iterator = iter(self._source)
        try:
            return next(self._iterator)
        except StopIteration:
            raise DryError(
                f"the data of worker {self._worker} ran dry after {self._taken} batches; let "
                "data(worker) return an endless iterator, or a list or loader that can start over"
            ) from None


def moved(batch: Any, device: torch.device) -> Any:
    return pytree.tree_map_only(Tensor, lambda t: t.to(device, non_blocking=True), batch)


def check_loss(loss: Any, worker: int | None, step: int) -> None:
    whose = "" if worker is None else f" of worker {worker}"
    if not isinstance(loss, Tensor) or loss.numel() != 1:
        kind = f"shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else type(loss).__name__
        raise ValueError(
            f"the loss{whose} at gradient step {step} must be one number, got {kind}; "
            "reduce it, for instance with .mean()"
        )

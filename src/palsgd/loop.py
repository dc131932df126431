"""The training loop's batches, which end at a given clock and not with the data."""

from collections.abc import Iterable, Iterator
from typing import Any, TypeVar

from palsgd.checks import check_int
from palsgd.optimizer import LocalOptimizer

Batch = TypeVar("Batch")


def until(loader: Iterable[Batch], opt: LocalOptimizer, *, steps: int) -> Iterator[Batch]:
    """Batches from `loader`, epoch after epoch, until `opt.clock` shows `steps`.

    Every worker stops at the same clock, whatever its loader's length and however many of its steps
    were mixing steps, so none waits for a sync that another will not reach. If `steps` cuts a round
    short, that round is synced at the end. After a resume the epoch that samplers are given
    continues; the loader must restore the place within the epoch.

    Args:
        loader: the batches of this worker; it is iterated again when it ends.
        opt: a palsgd optimizer, which the loop steps once for each batch.
        steps: the clock at which training ends, steps without data included.

    Raises:
        ValueError: `steps` is no whole number >= 0, or a pass over the loader gave no batch.

    Example:
        >>> import torch, palsgd
        >>> model = torch.nn.Linear(2, 1)
        >>> inner = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> opt = palsgd.LocalSGD(model, inner, sync_every=4, transport=palsgd.Alone())
        >>> for batch in palsgd.until([torch.ones(1, 2)], opt, steps=6):
        ...     model(batch).sum().backward()
        ...     opt.step()
        ...     opt.zero_grad()
        >>> opt.clock, opt.synced
        (6, True)
    """
    steps, worker = check_int("steps", steps), opt._worker
    opt.run_until(steps)
    while opt.clock < steps:
        _set_epoch(loader, worker.at.epoch)
        empty = True
        for batch in loader:
            empty = False
            yield batch
            if opt.clock >= steps:
                return
        if empty:
            raise ValueError(
                f"the loader ran dry at clock {opt.clock} of {steps} (pass {worker.at.epoch} over "
                "it gave no batch); give a loader that can be iterated again, such as a "
                "DataLoader or a list"
            )
        worker.at.epoch += 1


def _set_epoch(loader: Any, epoch: int) -> None:
    """Set the epoch of a DistributedSampler, so that it shuffles again."""
    for part in (getattr(loader, "sampler", None), getattr(loader, "batch_sampler", None)):
        set_epoch = getattr(part, "set_epoch", None)
        if set_epoch is not None:
            set_epoch(epoch)

"""The training loop's batches, which end at a given clock and not with the data."""

import math
from collections.abc import Iterable, Iterator
from typing import Any, TypeVar

from palsgd.checks import below, check_int, check_number, in_error, warn
from palsgd.feed import END
from palsgd.optimizer import LocalOptimizer

Batch = TypeVar("Batch")
ACCUMULATED = 256  # batches for one step: more than anybody adds up


def until(
    loader: Iterable[Batch],
    opt: LocalOptimizer,
    *,
    steps: int | None = None,
    epochs: float | None = None,
) -> Iterator[Batch]:
    """Batches from `loader`, epoch after epoch, until `opt.clock` shows `steps`.

    Every worker stops at the same clock, whatever its loader's length and however many of its steps
    were mixing steps, so none waits for a sync that another will not reach. If the end cuts a round
    short, that round is synced there. It ends earlier if `opt.leaving`: a worker was asked to stop.

    A run may be given in stages: the next call with the same loader goes on where the last one
    stopped in it. `set_epoch` is called on the loader, its dataset and its samplers, and on those
    of a loader that it keeps inside, as a progress bar does. A loader with `state_dict` and
    `load_state_dict` is saved and resumed with the optimizer; any other begins the epoch anew in
    which the state was saved.

    Args:
        loader: the batches of this worker; it is iterated again when it ends.
        opt: a palsgd optimizer, which the loop steps once for each batch.
        steps: the clock at which training ends, steps without data included.
        epochs: instead of `steps`, passes over the loader, counted from the start of training. The
            clock at the end is the warm-up and then the other batches over 1 - p, rounded up, so a
            worker may take some batches more or fewer. All workers need loaders of one length.

    Raises:
        TypeError: `opt` is no palsgd optimizer.
        ValueError: not exactly one of `steps` and `epochs` is given, it is no number >= 0, loaders
            differ in length, or a pass over the loader gave no batch.

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
    opt = _palsgd_optimizer(opt)
    if epochs is not None and steps is not None:
        both = f"steps={in_error(steps)} and epochs={in_error(epochs)}"
        raise ValueError(f"{both} are both given; give one of them")
    if epochs is None:
        steps = check_int("steps", steps)
    else:
        check_number("epochs", epochs, "a number >= 0", low=below(0.0))
    return _batches(loader, opt, steps, epochs)


def _palsgd_optimizer(opt: Any) -> LocalOptimizer:
    """The optimizer, or the one inside a framework's proxy of it."""
    inside = getattr(opt, "optimizer", None)
    found = inside if isinstance(inside, LocalOptimizer) else opt
    if not isinstance(found, LocalOptimizer):
        raise TypeError(
            f"until() got {type(opt).__name__} as its optimizer, which has no clock; give the "
            "palsgd optimizer around it: opt = palsgd.PALSGD(model, inner), then "
            "until(loader, opt, steps=...)"
        )
    return found


def _batches(
    loader: Iterable[Batch], opt: LocalOptimizer, steps: int | None, epochs: float | None
) -> Iterator[Batch]:
    if steps is None:
        assert epochs is not None
        steps = _clock_after_passes(opt, loader, epochs)
    _check_warmup(opt, steps)
    opt.run_until(steps)
    idle = _Idle(opt)
    while opt.clock < steps and not opt.leaving:
        batch = opt._worker.feed.next(loader, opt._worker.at)
        if batch is END:
            raise ValueError(
                f"the loader ran dry at clock {opt.clock} of {steps} (pass {opt._worker.at.epoch} "
                "over it gave no batch); give a loader that can be iterated again, such as a "
                "DataLoader or a list"
            )
        idle.count()
        yield batch


class _Idle:
    """Batches that no step has used yet. It says once if a loop steps at none of them, as that loop
    would never end."""

    def __init__(self, opt: LocalOptimizer):
        self._opt, self._told = opt, False
        self._since()

    def _since(self) -> None:
        self._clock, self._epoch, self._batches = self._opt.clock, self._opt._worker.at.epoch, 0

    def count(self) -> None:
        if self._opt.clock != self._clock:
            self._since()
        self._batches += 1
        whole_pass = self._opt._worker.at.epoch > self._epoch + 1
        if whole_pass and self._batches > ACCUMULATED and not self._told:
            self._told = True
            warn(
                f"the clock is still at {self._clock} after {self._batches} batches, more than a "
                "whole pass over the loader, and so the loop will not end; call opt.step() once "
                "for each batch, or for each few whose gradients add up"
            )


def _clock_after_passes(opt: LocalOptimizer, loader: Any, epochs: float) -> int:
    """The clock after so many passes over the loader, whose length is the same on all workers."""
    try:
        length = len(loader)
    except TypeError:
        raise ValueError(
            f"epochs={epochs!r} needs a loader with a length, which {type(loader).__name__} has "
            "not; give steps= instead"
        ) from None
    opt.transport.agree({"epochs": epochs, "len(loader)": length})
    return clock_after(opt, math.ceil(epochs * length))


def clock_after(opt: LocalOptimizer, batches: int) -> int:
    """The clock after so many batches: each is a step in the warm-up, and a share 1 - p of the
    steps after it."""
    warmup = opt.schedule.warmup
    if batches <= warmup:
        return batches
    local = (batches - int(warmup)) / opt.method.gradient_share
    return int(warmup) + math.ceil(round(local, 6))  # 90 / 0.9 is not always 100


def _check_warmup(opt: LocalOptimizer, steps: int) -> None:
    warmup = opt.schedule.warmup
    if opt.clock < steps < warmup < math.inf:
        warn(
            f"the warm-up lasts {int(warmup)} steps and the run {steps}: no local step will be "
            "made, so this is plain DDP; use fewer warmup_steps, or more steps"
        )

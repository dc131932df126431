"""The tensors that the rules of a method work on, and the arithmetic that rules share."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from palsgd.method import Rate

# The attributes of `w` beside its functions. No state of a method may have one of these names.
RESERVED = frozenset(
    ["local", "anchor", "grad", "groups", "inner", "rates", "initial_rates", "rate_sums"]
) | {"gradient_steps", "worker", "workers", "round", "clock", "length", "pull_powers"}


class WorkerTensors:
    """The tensors that the slots of a `Method` work on, called `w` there.

    Every attribute is a list of tensors, the same tensor of the model at the same index, unless
    said otherwise. Tensors of stacked workers have a leading worker axis. The anchor and the global
    states are common to all workers, so they have no such axis and broadcast. Attributes are looked
    up when they are first used.

    Attributes:
        local: the local model; in `apply`, as it was when it was sent.
        anchor: the last global model, in full precision.
        grad: the gradients, in `before_gradient` only.
        groups: for each parameter group, the indices of its tensors.
        inner: `inner[name]` is the list of the inner optimizer's tensors of that name, or empty.
        gradient_steps: the number of gradient steps since these tensors' last sync. It exists at a
            sync only, and so do `rate_sums` and `rates`.
        rate_sums: for each tensor, the sum of the (divided) learning rates of those steps.
        rates: for each tensor, the (undivided) learning rate of the last step before the sync,
            which all workers have in common.
        initial_rates: each group's `initial_lr`, or its learning rate when it was built.
        worker, workers: numbers; of stacked workers `worker` is a tensor with one entry for each.
        round: the number of the round; not in `global_model`.
        clock: steps so far, in `before_gradient` and `after_gradient` only, and so is `length`. In
            `after_gradient` the step and the steps without data that follow it are counted. Of
            stacked workers it is a number if all have the same clock, else a tensor.
        length: the number of steps of the round, H.
        pull_powers: in `after_gradient` only, one number per step without data: the power of what
            its pull leaves, which is 1 unless `draws="paced"` makes a worker mix more often than
            the fastest one. Of stacked workers it is a number if all have the same, else a tensor.
    """

    def __init__(self, sources: Mapping[str, Callable[[], Any]], **known: Any):
        self._sources = sources
        vars(self).update(known)

    def __getattr__(self, name: str) -> Any:
        source = self.__dict__.get("_sources", {}).get(name)
        if source is None:
            raise AttributeError(f"the method's tensors have no {name!r} at this point")
        found = vars(self)[name] = source()
        return found

    def group(self, index: int) -> tuple[list[Tensor], list[Tensor]]:
        """The local tensors of a parameter group and the anchor's, side by side."""
        members = self.groups[index]
        if len(members) == len(self.local):
            return self.local, self.anchor
        return [self.local[i] for i in members], [self.anchor[i] for i in members]

    def mix_group(self, group: int, weight: Rate) -> None:
        """Pull the local tensors of a parameter group towards the anchor, in place:
        x <- x + weight (anchor - x)."""
        rows = vars(self).get("_mix_rows")  # of stacked workers: it mixes their rows without copies
        if rows is None or "local" in vars(self):
            mix_(*self.group(group), weight)
        else:
            rows(group, weight)

    def group_of(self) -> list[int]:
        """The parameter group of each tensor."""
        found = [0] * len(self.local)
        for group, members in enumerate(self.groups):
            for i in members:
                found[i] = group
        return found

    def norm(self, tensors: Sequence[Tensor]) -> Any:
        """The norm of tensors like the model: a float, or one entry per stacked worker. For a
        sharded worker it is the norm over all shards."""
        return self._norm(tensors)


class Reduced:
    """The reduced payload of a sync: `reduced[name]` is the list of tensors of the part `name`.

    A part that is gathered has a leading axis over all workers, with zeros for a worker that was
    left out. A part is missing in the rounds in which it is not sent.
    """

    def __init__(
        self, parts: Mapping[str, list[Tensor]], scalars: Mapping[str, float], contributors: int
    ):
        self._parts, self.scalars, self.contributors = parts, scalars, contributors

    def __getitem__(self, name: str) -> list[Tensor]:
        return self._parts[name]

    def __contains__(self, name: str) -> bool:
        return name in self._parts


_LARGE = 1 << 20  # a tensor of so many elements has its own kernel; smaller ones share one


def mix_(local: Sequence[Tensor], anchor: Sequence[Tensor], weight: Rate) -> None:
    """Pull each local tensor towards the anchor: x <- x + weight (anchor - x), in place."""
    if isinstance(weight, Tensor):
        for x, a in zip(local, anchor, strict=True):
            x.copy_(torch.lerp(x.to(a.dtype), a, column(weight, x, a.dtype)))
        return
    small_local, small_anchor = [], []
    for x, a in zip(local, anchor, strict=True):
        if x.dtype != a.dtype:  # a low-precision model is mixed in the anchor's precision
            x.copy_(torch.lerp(x.to(a.dtype), a, weight))
        elif x.numel() >= _LARGE:
            x.lerp_(a, weight)
        else:
            small_local.append(x)
            small_anchor.append(a)
    if small_local:
        torch._foreach_lerp_(small_local, small_anchor, weight)


def column(value: Any, like: Tensor, dtype: torch.dtype | None = None) -> Any:
    """One value per stacked worker, shaped to multiply `like`; a plain number is returned
    unchanged."""
    if not isinstance(value, Tensor):
        return value
    moved = value.to(like.device, dtype or like.dtype, non_blocking=True)
    return moved.view(-1, *[1] * (like.dim() - 1))


def bounds(value: Rate) -> tuple[float, float]:
    """The smallest and the largest entry of a tensor; for a plain number, that number twice."""
    if isinstance(value, Tensor):
        return float(value.min()), float(value.max())
    return float(value), float(value)


def at_most_one(value: Rate) -> Rate:
    return value.clamp(max=1.0) if isinstance(value, Tensor) else min(value, 1.0)


def lowest(values: Sequence[Rate]) -> Rate:
    """The smallest of several rates, worker by worker where they are stacked."""
    return _extreme(values, torch.minimum, min)


def highest(values: Sequence[Rate]) -> Rate:
    return _extreme(values, torch.maximum, max)


def _extreme(values: Sequence[Rate], stacked: Callable, plain: Callable) -> Rate:
    if not any(isinstance(value, Tensor) for value in values):
        return plain(values)
    found = torch.as_tensor(values[0], dtype=torch.float64)
    for value in values[1:]:
        found = stacked(found, torch.as_tensor(value, dtype=torch.float64))
    return found

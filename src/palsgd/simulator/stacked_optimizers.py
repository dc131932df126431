"""Inner optimizers for K workers at once: every tensor has a leading worker axis.

torch's own optimizers have one learning rate for all rows. Within a round the clocks of the workers
differ, and so do their learning rates. Under independent draws their numbers of gradients differ
too. So each scalar of an update is a column here, with one entry per worker.
"""

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

State = list[list[Tensor]]  # for each parameter, tensors with the worker axis
PIECE = 2**20  # bytes of a tensor; a CPU's cache holds the handful that an update works on


class StackedSGD:
    def __init__(self, group_of: list[int], groups: list[dict[str, Any]]):
        self._group_of, self._groups = group_of, groups

    def place_of(self, name: str) -> int | None:
        """The index, in a parameter's state, of the tensor that torch calls `name`; None: there is
        none."""
        return 0 if name == "momentum_buffer" else None

    def new_state(self, param: Tensor, group: int) -> list[Tensor]:
        """The momentum and, with dampening, a flag that says whether there is a momentum yet, as
        the first momentum is the gradient itself."""
        settings = self._groups[group]
        if not settings["momentum"]:
            return []
        seen = torch.zeros(len(param), dtype=torch.float64, device=param.device)
        return (
            [torch.zeros_like(param), seen] if settings["dampening"] else [torch.zeros_like(param)]
        )

    def step(
        self,
        params: list[Tensor],
        grads: list[Tensor],
        rates: list[Tensor],
        state: State,
        compiled: bool = False,
    ) -> None:
        """`rates[g]` has the learning rate of parameter group g, one entry per worker."""
        for i, (x, g, kept) in enumerate(zip(params, grads, state, strict=True)):
            settings, lr = self._groups[self._group_of[i]], column(rates[self._group_of[i]], x)
            damping = None
            if settings["momentum"] and settings["dampening"]:
                damping = column(1 - settings["dampening"] * kept[1], g)
                kept[1].fill_(1.0)
            update_rows(
                sgd_update, compiled, (x, g, kept[0] if kept else None, lr, damping),
                settings["momentum"], settings["weight_decay"], settings["nesterov"],
            )  # fmt: skip


def sgd_update(
    x: Tensor,
    g: Tensor,
    velocity: Tensor | None,
    lr: Tensor,
    damping: Tensor | None,
    momentum: float,
    decay: float,
    nesterov: bool,
) -> None:
    if decay:
        g = g + decay * x
    if velocity is not None:
        velocity.mul_(momentum).add_(g if damping is None else g * damping)
        g = g + momentum * velocity if nesterov else velocity
    x.sub_(lr * g)


class StackedAdam:
    def __init__(self, group_of: list[int], groups: list[dict[str, Any]], decoupled: bool):
        self._group_of, self._groups, self._decoupled = group_of, groups, decoupled
        self._betas = torch.tensor([groups[g]["betas"] for g in group_of], dtype=torch.float64)

    def place_of(self, name: str) -> int | None:
        return {"exp_avg": 0, "exp_avg_sq": 1}.get(name)

    def new_state(self, param: Tensor, group: int) -> list[Tensor]:
        self._betas = self._betas.to(param.device)
        steps = torch.zeros(len(param), dtype=torch.float64, device=param.device)
        return [torch.zeros_like(param), torch.zeros_like(param), steps]

    def step(
        self,
        params: list[Tensor],
        grads: list[Tensor],
        rates: list[Tensor],
        state: State,
        compiled: bool = False,
    ) -> None:
        torch._foreach_add_([kept[2] for kept in state], 1)
        scales, sizes = self._corrections(torch.stack([kept[2] for kept in state]), rates)
        for i, (x, g, (first, second, _)) in enumerate(zip(params, grads, state, strict=True)):
            settings, lr = self._groups[self._group_of[i]], rates[self._group_of[i]]
            (beta1, beta2), decay = settings["betas"], settings["weight_decay"]
            shrink = column(1 - lr * decay, x) if decay and self._decoupled else None
            scale, size = column(scales[i], x), column(sizes[i], x)
            update_rows(
                adam_update, compiled, (x, g, first, second, scale, size, shrink),
                beta1, beta2, settings["eps"], 0.0 if self._decoupled else decay,
            )  # fmt: skip

    def _corrections(self, steps: Tensor, rates: list[Tensor]) -> tuple[Tensor, Tensor]:
        """1 / sqrt(1 - beta2^t) and lr / (1 - beta1^t), with a row per parameter and a column per
        worker. All are computed at once, as hundreds of small kernels would take longer than the
        step itself."""
        lr = torch.stack([rates[group] for group in self._group_of])
        betas = self._betas
        return (1 - betas[:, 1:] ** steps).rsqrt(), lr / (1 - betas[:, :1] ** steps)


def adam_update(
    x: Tensor,
    g: Tensor,
    first: Tensor,
    second: Tensor,
    scale: Tensor,
    size: Tensor,
    shrink: Tensor | None,
    beta1: float,
    beta2: float,
    eps: float,
    decay: float,
) -> None:
    """x -= size * first / (sqrt(second) * scale + eps), where size is lr / (1 - beta1^t) and scale
    is 1 / sqrt(1 - beta2^t)."""
    if shrink is not None:
        x.mul_(shrink)
    elif decay:
        g = g + decay * x
    first.lerp_(g, 1 - beta1)
    second.mul_(beta2).addcmul_(g, g, value=1 - beta2)
    away = second.sqrt().mul_(scale).add_(eps)
    x.sub_(size * first / away)


def update_rows(
    update: Callable[..., None], compiled: bool, tensors: Sequence[Tensor | None], *rest: Any
) -> None:
    """Update one parameter. Each of the tensors has a row per worker.

    On a CPU a few rows are updated at a time. Each operator then finds in the cache what the one
    before it has written, and its result needs no fresh memory. Updates are elementwise, so the
    result is the same to the last bit.
    """
    x = tensors[0]
    assert x is not None
    if compiled:
        update, size = compiled_update(update), len(x)  # one kernel reads each element once
    else:
        size = len(x) if x.device.type != "cpu" else max(1, PIECE // max(1, x[0].nbytes))
    flat = [None if each is None else rows(each) for each in tensors]
    if size >= len(x):
        update(*flat, *rest)
        return
    for at in range(0, len(x), size):
        update(*(None if each is None else each[at : at + size] for each in flat), *rest)


@cache
def compiled_update(update: Callable[..., None]) -> Callable[..., None]:
    """The update of one parameter as one kernel, the same for all sizes. A program of all
    parameters at once would take torch.compile half a minute."""
    return torch.compile(update, dynamic=True)


def rows(x: Tensor) -> Tensor:
    """One row per worker. Weights and state of a stack are contiguous, so these are views of
    them."""
    return x.reshape(len(x), -1)


def stacked_optimizer(
    inner: Optimizer, group_of: list[int]
) -> tuple[StackedSGD | StackedAdam | None, str]:
    """The stacked form of an optimizer, or None and the reason why there is none."""
    name, groups = type(inner).__name__, inner.param_groups
    if any(group.get(flag) for group in groups for flag in ("maximize", "amsgrad")):
        return None, f"{name} with maximize or amsgrad has no stacked twin"
    if type(inner) is torch.optim.SGD:
        return StackedSGD(group_of, groups), ""
    if type(inner) in (torch.optim.Adam, torch.optim.AdamW):
        decoupled = type(inner) is torch.optim.AdamW or groups[0].get("decoupled_weight_decay")
        return StackedAdam(group_of, groups, bool(decoupled)), ""
    return None, f"the inner optimizer {name} has no stacked twin (SGD, Adam and AdamW have)"


def column(values: Tensor, like: Tensor) -> Tensor:
    """One value per worker, shaped to multiply `like`. A low-precision model is multiplied by
    32-bit values, as torch's optimizers do."""
    wide = torch.promote_types(like.dtype, torch.float32)
    return values.to(wide).view(-1, *[1] * (like.dim() - 1))

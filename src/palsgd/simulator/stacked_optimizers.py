"""Inner optimizers for K workers at once: every tensor has a leading worker axis.

torch's own optimizers have one learning rate for all rows. Within a round the clocks of the workers
differ, and so do their learning rates. Under independent draws their numbers of gradients differ
too. So each scalar of an update is a column here, with one entry per worker.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

State = list[list[Tensor]]  # for each parameter, tensors with the worker axis
Step = Callable[[list[Tensor], list[Tensor], list[Tensor], State], None]


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
        self, params: list[Tensor], grads: list[Tensor], rates: list[Tensor], state: State
    ) -> None:
        """`rates[g]` has the learning rate of parameter group g, one entry per worker."""
        for i, (x, g, kept) in enumerate(zip(params, grads, state, strict=True)):
            settings = self._groups[self._group_of[i]]
            mu = settings["momentum"]
            if settings["weight_decay"]:
                g = g + settings["weight_decay"] * x
            if mu:
                damped = g
                if settings["dampening"]:
                    damped = g * column(1 - settings["dampening"] * kept[1], g)
                    kept[1].fill_(1.0)
                kept[0].mul_(mu).add_(damped)
                g = g + mu * kept[0] if settings["nesterov"] else kept[0]
            x.sub_(column(rates[self._group_of[i]], x) * g)


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
        self, params: list[Tensor], grads: list[Tensor], rates: list[Tensor], state: State
    ) -> None:
        torch._foreach_add_([kept[2] for kept in state], 1)
        scales, sizes = self._corrections(torch.stack([kept[2] for kept in state]), rates)
        for i, (x, g, (first, second, _)) in enumerate(zip(params, grads, state, strict=True)):
            settings, lr = self._groups[self._group_of[i]], rates[self._group_of[i]]
            beta1, beta2 = settings["betas"]
            decay = settings["weight_decay"]
            if decay and self._decoupled:
                x.mul_(column(1 - lr * decay, x))
            elif decay:
                g = g + decay * x
            first.lerp_(g, 1 - beta1)
            second.mul_(beta2).addcmul_(g, g, value=1 - beta2)
            # x -= lr / (1 - beta1^t) * first / (sqrt(second) / sqrt(1 - beta2^t) + eps)
            away = second.sqrt().mul_(column(scales[i], x)).add_(settings["eps"])
            x.sub_(column(sizes[i], x) * first / away)

    def _corrections(self, steps: Tensor, rates: list[Tensor]) -> tuple[Tensor, Tensor]:
        """1 / sqrt(1 - beta2^t) and lr / (1 - beta1^t), with a row per parameter and a column per
        worker. All are computed at once, as hundreds of small kernels would take longer than the
        step itself."""
        lr = torch.stack([rates[group] for group in self._group_of])
        betas = self._betas
        return (1 - betas[:, 1:] ** steps).rsqrt(), lr / (1 - betas[:, :1] ** steps)


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

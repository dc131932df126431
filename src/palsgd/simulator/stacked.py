"""Inner optimizers for K workers at once: every tensor has a leading worker axis.

Torch's own optimizers would do for workers in lock step, but workers drift apart within a round:
their clocks, and so their learning rates, differ, and under independent draws the number of
gradients each has seen. So the scalars of an update are vectors here, one entry per worker.
"""

from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

Rates = list[list[float]]  # of the workers that step, for each parameter group


class StackedSGD:
    def __init__(self, group_of: list[int], groups: list[dict[str, Any]]):
        self._group_of, self._groups = group_of, groups

    def new_state(self, param: Tensor, group: int) -> list[Tensor]:
        """The momentum, and whether there is one yet (the first is the gradient undamped)."""
        if not self._groups[group]["momentum"]:
            return []
        seen = torch.zeros(len(param), dtype=torch.float64, device=param.device)
        return [torch.zeros_like(param), seen]

    def step(
        self, params: list[Tensor], grads: list[Tensor], rates: Rates, state: list[list[Tensor]]
    ) -> None:
        for i, (x, g, kept) in enumerate(zip(params, grads, state, strict=True)):
            settings = self._groups[self._group_of[i]]
            if settings["weight_decay"]:
                g = g.add(x, alpha=settings["weight_decay"])
            if settings["momentum"]:
                momentum, seen = kept
                damped = 1 - settings["dampening"] * seen
                momentum.mul_(settings["momentum"]).add_(g * column(damped, g))
                seen.fill_(1.0)
                g = (
                    g.add(momentum, alpha=settings["momentum"])
                    if settings["nesterov"]
                    else momentum
                )
            subtract_scaled_(x, g, rates[self._group_of[i]])


class StackedAdam:
    def __init__(self, group_of: list[int], groups: list[dict[str, Any]], decoupled: bool):
        self._group_of, self._groups, self._decoupled = group_of, groups, decoupled

    def new_state(self, param: Tensor, group: int) -> list[Tensor]:
        steps = torch.zeros(len(param), dtype=torch.float64, device=param.device)
        return [torch.zeros_like(param), torch.zeros_like(param), steps]

    def step(
        self, params: list[Tensor], grads: list[Tensor], rates: Rates, state: list[list[Tensor]]
    ) -> None:
        for i, (x, g, (first, second, steps)) in enumerate(zip(params, grads, state, strict=True)):
            settings, lr = self._groups[self._group_of[i]], rates[self._group_of[i]]
            beta1, beta2 = settings["betas"]
            decay = settings["weight_decay"]
            steps += 1
            if decay and self._decoupled:
                subtract_scaled_(x, x, [rate * decay for rate in lr])
            elif decay:
                g = g.add(x, alpha=decay)
            first.lerp_(g, 1 - beta1)
            second.mul_(beta2).addcmul_(g, g, value=1 - beta2)
            # x -= lr / (1 - beta1^t) * first / (sqrt(second) / sqrt(1 - beta2^t) + eps)
            scale = (1 - beta2**steps).sqrt().reciprocal()
            size = torch.tensor(lr, dtype=torch.float64, device=x.device) / (1 - beta1**steps)
            denominator = second.sqrt().mul_(column(scale, x)).add_(settings["eps"])
            x.sub_(first.div(denominator).mul_(column(size, x)))


def stacked_optimizer(
    inner: Optimizer, group_of: list[int]
) -> tuple[StackedSGD | StackedAdam | None, str]:
    """The stacked twin of an optimizer, or None and the reason why there is none."""
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
    """One value per worker, shaped to multiply `like`."""
    return values.to(like.dtype).view(-1, *[1] * (like.dim() - 1))


def subtract_scaled_(x: Tensor, by: Tensor, scales: list[float]) -> None:
    if all(scale == scales[0] for scale in scales):
        x.sub_(by, alpha=scales[0])
    else:
        values = torch.tensor(scales, dtype=torch.float64, device=x.device)
        x.sub_(by * column(values, x))

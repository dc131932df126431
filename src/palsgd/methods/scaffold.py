"""SCAFFOLD, option II (Karimireddy et al., Stochastic Controlled Averaging for Federated Learning,
2020).

Each worker keeps a control c_k, its mean gradient of the last round, and all share the mean c of
the controls. The difference c - c_k corrects every gradient for the drift towards the worker's own
data:

    g_k <- g_k - c_k + c                                  before the inner step
    c_k <- c_k - c + (x - x_k) / S_k,  c <- mean_k c_k    at a sync, with x as it was
    x   <- x + lr mean_k (x_k - x)

S_k is the sum of the learning rates of the gradient steps that the worker took since the last sync;
without such a step c_k stays. The paper writes c <- c + mean_k (change of c_k), which is the same
as long as c is the mean of the c_k. The form here sets c to that mean at every sync. Otherwise a
worker that was left out once would make all later gradients wrong by a constant.

(x - x_k) / S_k is a mean gradient where the inner step is x_k <- x_k - lr g, so the inner optimizer
must be SGD without momentum; weight decay is part of the gradient. A parameter should have a
gradient in every step or in none, as S_k also counts the steps in which the parameter has none.
Steps without data, if PALSGD is composed with it, shrink x - x_k and so the controls.

The controls are a second part of every payload. They are sent in full precision also with
`compress`, as an error in c would be in every gradient. The controls of each of the `fragments`
change at that fragment's sync. `delay` is refused, as the steps between sending and applying would
use the old controls. A worker that is left out starts again from c_k = c, that is without a
correction, and c is the mean over the others.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor
from torch.optim import SGD, Optimizer

from palsgd.checks import check_number
from palsgd.method import Method, Part, Payload, Rate
from palsgd.outer import plain_average
from palsgd.registry import Row
from palsgd.tensors import Reduced, WorkerTensors, column


@dataclass(frozen=True, kw_only=True)
class SCAFFOLDMethod(Method):
    """`g_k <- g_k - c_k + c` before each inner step. c_k is a worker's mean gradient of the last
    round, and c the mean of them.

    Args:
        lr: of the global step, `x <- x + lr mean_k (x_k - x)`.
    """

    lr: float = 1.0

    local_state = ("control",)
    global_state = ("mean_control",)
    refuses: ClassVar[Mapping[str, str]] = {
        "outer": "its global step is x <- x + lr mean(x_k - x); give lr=",
        "delay": "steps taken while a sync travels would have the controls of the round before",
    }

    def __post_init__(self) -> None:
        check_number("lr", self.lr, "a finite number > 0", low=0.0)

    def check_run(self, inner: Optimizer, workers: int) -> None:
        for part in getattr(inner, "parts", [inner]):
            check_plain_sgd(part)

    def before_gradient(self, w: WorkerTensors) -> None:
        torch._foreach_add_(w.grad, torch._foreach_sub(w.mean_control, w.control))

    def payload(self, w: WorkerTensors) -> Payload:
        return Payload((Part("model"), Part("control", new_controls(w), coded=False)))

    def apply(self, w: WorkerTensors, reduced: Reduced, outer: Optimizer) -> None:
        torch._foreach_copy_(w.control, new_controls(w))
        torch._foreach_copy_(w.mean_control, reduced["control"])
        torch._foreach_sub_(w.anchor, reduced["model"], alpha=float(self.lr))

    def join(self, w: WorkerTensors) -> None:
        torch._foreach_copy_(w.control, w.mean_control)


def check_plain_sgd(inner: Optimizer) -> None:
    reason = ""
    if not isinstance(inner, SGD):
        reason = f"with {type(inner).__name__} the displacement over the rates is no gradient"
    elif any(group["momentum"] for group in inner.param_groups):
        reason = "with momentum the displacement over the rates is several times the gradient"
    elif any(group["maximize"] for group in inner.param_groups):
        reason = "with maximize=True the displacement has the sign of the gradient"
    if reason:
        raise ValueError(
            f"SCAFFOLD reads a worker's mean gradient from how far its model has moved: {reason}; "
            "use torch.optim.SGD(model.parameters(), lr=...) as inner"
        )


def new_controls(w: WorkerTensors) -> list[Tensor]:
    """c_k - c + (x - x_k) / S_k, tensor by tensor."""
    tensors = zip(w.control, w.mean_control, w.anchor, w.local, w.rate_sums, strict=True)
    return [new_control(*each) for each in tensors]


def new_control(own: Tensor, mean: Tensor, x: Tensor, x_k: Tensor, rate_sum: Rate) -> Tensor:
    total = column(rate_sum, x_k, x.dtype)
    if not isinstance(total, Tensor):
        return own - mean + (x - x_k) / total if total else own.clone()
    return torch.where(total > 0, own - mean + (x - x_k) / total, own)


ROW = Row(
    name="scaffold",
    title="SCAFFOLD",
    method=SCAFFOLDMethod,
    summary="control variates take the drift towards a worker's own data out of each gradient",
    colours=("#855a00", "#e0b14a"),
    dashes=(7, 1.5, 1.5, 1.5),
    outer=plain_average,
    fixed_outer=True,
)

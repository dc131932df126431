"""FedProx (Li et al., Federated Optimization in Heterogeneous Networks, 2020).

Every gradient is that of the loss plus (mu / 2) |x_k - x|^2, so it holds the local model near the
last global one, x:

    g_k <- g_k + mu (x_k - x),  x_k <- InnerOPT(x_k, g_k)

At a sync the local models are averaged, or another outer step is taken with outer=. The term is
added to the gradient after clipping and before the inner step, so that an adaptive inner optimizer
scales it, and weight decay stays where the inner optimizer has it.

It keeps no state. With `delay` and `fragments` x is the present anchor, which changes when a mean
is applied. Compression and workers that are left out do not change the rule.
"""

from dataclasses import dataclass

import torch

from palsgd.checks import below, check_number
from palsgd.method import Method
from palsgd.outer import plain_average
from palsgd.registry import Row
from palsgd.tensors import WorkerTensors


@dataclass(frozen=True, kw_only=True)
class FedProxMethod(Method):
    """`g_k <- g_k + mu (x_k - x)` before each inner step, with x the last global model.

    Args:
        mu: the weight of the proximal term; 0 is Local SGD.
    """

    mu: float = 0.01

    def __post_init__(self) -> None:
        check_number("mu", self.mu, "a finite number >= 0", low=below(0.0))

    def before_gradient(self, w: WorkerTensors) -> None:
        torch._foreach_add_(w.grad, torch._foreach_sub(w.local, w.anchor), alpha=float(self.mu))


ROW = Row(
    name="fedprox",
    title="FedProx",
    method=FedProxMethod,
    summary="the gradient of a proximal term holds local models near the last global one",
    colours=("#7a3b9e", "#c795e6"),
    dashes=(7, 2),
    outer=plain_average,
)

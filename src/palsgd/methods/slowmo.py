"""SlowMo (Wang, Tantia, Ballas and Rabbat, Improving Communication-Efficient Distributed SGD with
Slow Momentum, 2019).

The global step is heavy ball in units of the inner learning rate a:

    D = mean_k (x - x_k),  u <- b u + D / a,  x <- x - s a u,  x_k <- x

a is the learning rate of each tensor's group in the last step before the sync. At a constant rate
this is an outer heavy ball with learning rate s and momentum b; under a schedule the term a u
shrinks with a, while the momentum of an outer optimizer keeps the displacements of earlier, larger
rates. Where a is 0, D / a has no value: then x <- x - s D, and u decays.

At a sync the momentum of an inner SGD (`momentum_buffer`) is zeroed, since u holds it already;
Adam's moments are kept. Both are what the paper recommends.

u is common to all workers. With `delay` a is the rate at sending, and the inner momentum is zeroed
when the mean arrives. Each of the `fragments` has its own part of u, and its part of the inner
momentum is zeroed at its own sync. `compress` changes only D. If a worker is left out, D is the
mean over the workers that took part.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from torch.optim import Optimizer

from palsgd.checks import below, check_number
from palsgd.method import Method
from palsgd.outer import plain_average
from palsgd.registry import Row
from palsgd.tensors import Reduced, WorkerTensors


@dataclass(frozen=True, kw_only=True)
class SlowMoMethod(Method):
    """`u <- b u + D / a` and `x <- x - s a u` at a sync, with D the mean displacement and a the
    inner learning rate.

    Args:
        momentum: b of the rule.
        lr: s, a factor of the inner learning rate.
    """

    momentum: float = 0.5
    lr: float = 1.0

    global_state = ("velocity",)
    refuses: ClassVar[Mapping[str, str]] = {
        "outer": "slow momentum is its outer step; give momentum= and lr="
    }

    def __post_init__(self) -> None:
        words = "a number >= 0 and < 1"
        check_number("momentum", self.momentum, words, low=below(0.0), high=1.0)
        check_number("lr", self.lr, "a finite number > 0", low=0.0)

    def apply(self, w: WorkerTensors, reduced: Reduced, outer: Optimizer) -> None:
        tensors = zip(w.anchor, w.velocity, reduced["model"], w.rates, strict=True)
        for x, velocity, displacement, rate in tensors:
            velocity.mul_(self.momentum)
            if rate:
                velocity.add_(displacement, alpha=1 / rate)
                x.sub_(velocity, alpha=self.lr * rate)
            else:
                x.sub_(displacement, alpha=self.lr)
        for buffer in w.inner["momentum_buffer"]:
            buffer.zero_()


ROW = Row(
    name="slowmo",
    title="SlowMo",
    method=SlowMoMethod,
    summary="an outer heavy ball in units of the inner learning rate",
    colours=("#00798a", "#54d3e0"),
    dashes=(5, 1.5, 1, 1.5),
    outer=plain_average,
    fixed_outer=True,
)

"""EASGD (Zhang, Choromanska and LeCun, Deep Learning with Elastic Averaging SGD, 2015).

Workers keep models of their own, and an elastic force ties them to a centre x. At a sync x_k and x
change at once, each by the values before the sync:

    x_k <- x_k - e (x_k - x),  x <- x + e sum_k (x_k - x)

The sum of all local models and the centre does not change. The rate e is 0.9 / K unless it is
given; above 2 / (K + 1) the exchange overshoots further each time, and is refused. With momentum in
the inner optimizer this is EAMSGD. The centre is the global model: `opt.anchor_weights()` shows it,
and the local models differ from it also at the end of training.

Each worker keeps the change of its model as a state from the arrival of the mean to the end of the
sync. Each of the `fragments` has its own exchange. With `compress` the centre moves by the decoded
mean and a local model by its exact share, so that the sum changes only by what is still unsent.
`delay` is refused. A worker that is left out starts again from the centre, which changes the sum.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch.optim import Optimizer

from palsgd.checks import below, check_number
from palsgd.method import Method
from palsgd.outer import plain_average
from palsgd.registry import Row
from palsgd.tensors import Reduced, WorkerTensors


@dataclass(frozen=True, kw_only=True)
class EASGDMethod(Method):
    """`x_k <- x_k - e (x_k - x)` and `x <- x + e sum_k (x_k - x)` at a sync, with x the centre.

    Args:
        rate: e; None: 0.9 / K, with K workers. It is at most 2 / (K + 1).
    """

    rate: float | None = None

    local_state = ("force",)
    refuses: ClassVar[Mapping[str, str]] = {
        "outer": "the centre moves by the elastic force",
        "delay": "the force is between the models as they are at one time",
    }

    def __post_init__(self) -> None:
        if self.rate is not None:
            check_number("rate", self.rate, "a finite number >= 0, or None", low=below(0.0))

    def check_run(self, inner: Optimizer, workers: int) -> None:
        if self.elasticity(workers) * (workers + 1) > 2:
            raise ValueError(
                f"rate={self.rate:g} makes {workers} workers and their centre swing apart; use "
                f"rate <= {2 / (workers + 1):.6g}, or None for {0.9 / workers:.6g}"
            )

    def elasticity(self, workers: int) -> float:
        return 0.9 / workers if self.rate is None else self.rate

    def apply(self, w: WorkerTensors, reduced: Reduced, outer: Optimizer) -> None:
        rate = self.elasticity(w.workers)
        torch._foreach_copy_(w.force, torch._foreach_sub(w.local, w.anchor))
        torch._foreach_mul_(w.force, rate)
        torch._foreach_sub_(w.anchor, reduced["model"], alpha=rate * reduced.contributors)

    def restart(self, w: WorkerTensors) -> None:
        torch._foreach_sub_(w.local, w.force)


ROW = Row(
    name="easgd",
    title="EASGD",
    method=EASGDMethod,
    summary="an elastic force between local models, which workers keep, and a centre",
    colours=("#b5307b", "#f58cc0"),
    dashes=(3, 1.5),
    outer=plain_average,
    fixed_outer=True,
)

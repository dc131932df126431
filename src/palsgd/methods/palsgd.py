"""PALSGD (Pseudo-Asynchronous Local SGD, TMLR 2025).

With probability p a step of worker k pulls its model towards the last global one, which costs no
gradient and no message; otherwise it takes a gradient step, with the learning rate over 1 - p:

    x_k <- x_k - beta (x_k - x),  beta = lr eta / p      with probability p
    x_k <- InnerOPT(x_k, gradient, lr / (1 - p))         otherwise

Every H steps there is an outer step, as in DiLoCo, which is the case p = 0.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from palsgd.checks import check_mix_prob, check_mix_rate
from palsgd.method import Facts, Method, Rate, Rates
from palsgd.outer import nesterov
from palsgd.registry import Row
from palsgd.schedule import round_plan
from palsgd.tensors import WorkerTensors, at_most_one, bounds, highest, lowest


@dataclass(frozen=True, kw_only=True)
class PALSGDMethod(Method):
    mix_prob: float  # p
    mix_rate: float  # eta

    only_when_mixing = True

    def __post_init__(self) -> None:
        check_mix_prob(self.mix_prob)
        check_mix_rate(self.mix_rate)

    @property
    def gradient_share(self) -> float:
        return 1.0 - self.mix_prob

    def plan(self, worker: int, round: int, length: int, facts: Facts) -> list[bool]:
        return round_plan(
            seed=facts.seed,
            worker=worker,
            round=round,
            sync_every=length,
            mix_prob=self.mix_prob,
            draws=facts.draws,
            stops=facts.stops,
        )

    def check(self, rates: Sequence[float]) -> None:
        if self.mix_prob:
            self.betas(rates)

    def after_gradient(
        self, w: WorkerTensors, rate: Rates | None, mixing: Sequence[Rates]
    ) -> tuple[Rate, Rate] | None:
        betas = [self.betas(step) for step in mixing]
        for group, steps in enumerate(zip(*betas, strict=True)):
            w.mix_group(group, collapsed(steps))
        every = [beta for step in betas for beta in step]
        return lowest(every), highest(every)

    def betas(self, rates: Rates) -> list[Rate]:
        """The weight of one mixing step for each parameter group: lr * eta / p."""
        return [self._beta(group, rate) for group, rate in enumerate(rates)]

    def _beta(self, group: int, rate: Rate) -> Rate:
        beta = rate * self.mix_rate / self.mix_prob
        low, high = bounds(beta)
        # a mix_rate of exactly p / lr may give a beta one ulp above 1
        if low >= 0 and high <= 1 + 1e-9:
            return at_most_one(beta)
        lr, wrong = (bounds(rate)[1], high) if high > 1 else (bounds(rate)[0], low)
        raise ValueError(
            f"mix_rate={self.mix_rate:g} gives beta={wrong:.4g}, outside [0, 1], for param group "
            f"{group} (lr={lr:g}, mix_prob={self.mix_prob:g}); use "
            + (f"mix_rate <= {self.mix_prob / lr:.12g}" if lr > 0 else "a learning rate >= 0")
        )


def collapsed(betas: Sequence[Rate]) -> Rate:
    """The weight of several mixing steps in a row as one interpolation.

    One step leaves x - a = (1 - beta)(x0 - a), with a the anchor. After all of them
    x - a = prod(1 - beta_i) (x0 - a), which is one step of weight 1 - prod(1 - beta_i);
    for m steps at a constant learning rate it is 1 - (1 - beta)^m.
    """
    if len(betas) == 1:
        return betas[0]
    left: Rate = 1.0
    for beta in betas:
        left = left * (1.0 - beta)
    return 1.0 - left


ROW = Row(
    name="palsgd",
    title="PALSGD",
    method=PALSGDMethod,
    summary="DiLoCo that replaces a share p of the gradient steps by pulls to the anchor",
    colours=("#d55e00", "#ff9152"),
    outer=nesterov,
    mixes=True,
    default=True,
)

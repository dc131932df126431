"""PALSGD (Pseudo-Asynchronous Local SGD, TMLR 2025).

With probability p a step of worker k pulls its model towards the last global one, which costs no
gradient and no message; otherwise it takes a gradient step, with the learning rate over 1 - p:

    x_k <- x_k - beta (x_k - x)                          with probability p
    x_k <- InnerOPT(x_k, gradient, lr / (1 - p))         otherwise

The weight beta comes from one of two settings. `pull` is the share of a displacement, present at
the start of a round, that the mean number of mixing steps of the round takes back, whatever the
learning rate; `mix_rate` is the eta of the paper's Algorithm 1, whose pull follows the learning
rate:

    beta = 1 - (1 - pull)^(1 / (p H))        beta = lr eta / p

Every H steps there is an outer step, as in DiLoCo, which is the case p = 0.

With paced draws the workers may be unevenly fast. In a stretch of L steps in which the fastest
worker mixes m times, worker k takes g_k gradients and mixes m_k = L - g_k times, with

    g_k = max(1, round((L - m) v_k / max v))    lr_k = lr min(L / g_k, 3)
    beta_k = 1 - (1 - beta)^(m / m_k)

so that the rates of a stretch add up to the same, and its mixing steps pull alike, on all workers.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from palsgd.checks import check_mix_prob, check_mix_rate, check_pull
from palsgd.method import Facts, Method, Rate, Rates
from palsgd.outer import nesterov
from palsgd.registry import Row
from palsgd.schedule import StepPace
from palsgd.tensors import WorkerTensors, at_most_one, bounds, highest, lowest

OfClock = float | Callable[[int], float]  # a number, or a function of the clock

DEFAULT_PULL = 0.5
WEAK = 0.01  # a pull per round that is too weak to matter


@dataclass(frozen=True, kw_only=True)
class PALSGDMethod(Method):
    mix_prob: float = 0.1  # p
    mix_rate: OfClock | None = None  # eta
    pull: OfClock | None = None  # over a round; 0.5 if neither is given

    only_when_mixing = True

    def __post_init__(self) -> None:
        check_mix_prob(self.mix_prob)
        if self.mix_rate is not None and self.pull is not None:
            raise ValueError(
                f"mix_rate={_shown(self.mix_rate)!r} and pull={_shown(self.pull)!r} both say how "
                "strong a mixing step is; give one of them"
            )
        if self.mix_rate is None and self.pull is None:
            object.__setattr__(self, "pull", DEFAULT_PULL)
        for setting, check in ((self.mix_rate, check_mix_rate), (self.pull, check_pull)):
            if setting is not None and not callable(setting):
                check(setting)

    @property
    def gradient_share(self) -> float:
        return 1.0 - self.mix_prob

    def settings(self) -> dict[str, Any]:
        """A function of the clock is shown by its name, as workers and saved states compare it."""
        return {name: _shown(value) for name, value in super().settings().items()}

    def plan(self, worker: int, round: int, length: int, facts: Facts) -> list[bool]:
        return facts.drawn(worker, round, length, self.mix_prob)

    def pace(self, worker: int, round: int, length: int, facts: Facts) -> Sequence[StepPace] | None:
        return facts.pace(worker, round, length, self.mix_prob)

    def check(self, rates: Sequence[float]) -> None:
        if self.mix_prob and self.mix_rate is not None and not callable(self.mix_rate):
            self.betas(rates, clock=0, length=1)

    def check_step(self, rates: Sequence[float], clock: int, length: int) -> None:
        if self.mix_prob:
            self.betas(rates, clock=clock, length=length)

    @property
    def foreseeable(self) -> bool:
        return bool(self.mix_prob) and (self.mix_rate is not None or callable(self.pull))

    def doubts(self, rates: Sequence[float], length: int) -> list[str]:
        if not self.mix_prob or self.mix_rate is None or callable(self.mix_rate):
            return []
        p, beta = self.mix_prob, max(map(float, self.betas(rates, clock=0, length=length)))
        found = round_pull(beta, p, length)
        if not 0 < found < WEAK:  # a mix_rate of 0 is a control that somebody meant
            return []
        return [
            f"mix_rate={self.mix_rate:g} gives beta={beta:.2g}, so all the mixing of a round pulls "
            f"a worker back by {100 * found:.2g}%, at the price of {100 * p:.3g}% of its "
            f"gradients; use pull={DEFAULT_PULL:g} instead of mix_rate, or palsgd.DiLoCo"
        ]

    def after_gradient(
        self, w: WorkerTensors, rate: Rates | None, mixing: Sequence[Rates]
    ) -> tuple[Rate, Rate] | None:
        if not self.mix_prob:  # the steps that paced draws leave out pull nothing
            return None
        first = w.clock - len(mixing)  # the clock at which the first of these steps began
        betas = [
            [weakened(beta, power) for beta in self.betas(step, first + i, w.length)]
            for i, (step, power) in enumerate(zip(mixing, w.pull_powers, strict=True))
        ]
        for group, steps in enumerate(zip(*betas, strict=True)):
            w.mix_group(group, collapsed(steps))
        every = [beta for step in betas for beta in step]
        return lowest(every), highest(every)

    def betas(self, rates: Rates, clock: Any, length: int) -> list[Rate]:
        """The weight of one mixing step for each parameter group. The step begins at `clock`, in a
        round of `length` steps."""
        if self.mix_rate is None:
            pull = _at(self.pull, clock, check_pull)
            return [step_beta(pull, self.mix_prob, length)] * len(rates)
        eta = _at(self.mix_rate, clock, check_mix_rate)
        return [self._beta(group, rate, eta) for group, rate in enumerate(rates)]

    def _beta(self, group: int, rate: Rate, eta: Rate) -> Rate:
        beta = rate * eta / self.mix_prob
        low, high = bounds(beta)
        # a mix_rate of exactly p / lr may give a beta one ulp above 1
        if low >= 0 and high <= 1 + 1e-9:
            return at_most_one(beta)
        lr, wrong = (bounds(rate)[1], high) if high > 1 else (bounds(rate)[0], low)
        raise ValueError(
            f"mix_rate={bounds(eta)[1]:g} gives beta={wrong:.4g}, outside [0, 1], for param group "
            f"{group} (lr={lr:g}, mix_prob={self.mix_prob:g}); use "
            + (f"mix_rate <= {self.mix_prob / lr:.12g}" if lr > 0 else "a learning rate >= 0")
        )


def step_beta(pull: Rate, mix_prob: float, length: int) -> Rate:
    """The weight of a mixing step such that the p H mixing steps that a round has on average leave
    1 - pull of a displacement."""
    return 1.0 - (1.0 - pull) ** (1.0 / (mix_prob * length))


def weakened(beta: Rate, power: Rate) -> Rate:
    """The weight of a mixing step that leaves (1 - beta)^power of a displacement. A slower worker
    of paced draws has more mixing steps; with such weights they pull no more than the fewer steps
    of the fastest worker."""
    if isinstance(power, Tensor):  # worker by worker, as torch's powers are rounded otherwise
        betas = torch.as_tensor(beta, dtype=torch.float64).expand_as(power).tolist()
        pairs = zip(betas, power.tolist(), strict=True)
        return torch.tensor([weakened(*pair) for pair in pairs], dtype=torch.float64)
    return beta if power == 1 else 1.0 - (1.0 - beta) ** power


def round_pull(beta: float, mix_prob: float, length: int) -> float:
    """The inverse: the pull of a round whose mixing steps have the weight beta."""
    return 1.0 - (1.0 - min(beta, 1.0)) ** (mix_prob * length)


def _at(setting: Any, clock: Any, check: Callable[[float], None]) -> Rate:
    """The value of a setting at a clock, or at the clock of each stacked worker."""
    if not callable(setting):
        return setting
    if isinstance(clock, Tensor):
        return torch.tensor([_at(setting, c, check) for c in clock.tolist()], dtype=torch.float64)
    value = float(setting(clock))
    check(value)
    return value


def _shown(setting: Any) -> Any:
    if not callable(setting):
        return setting
    named = getattr(setting, "func", setting)  # of a functools.partial
    return getattr(named, "__qualname__", type(named).__name__)


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

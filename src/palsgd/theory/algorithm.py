"""PALSGD as Theorem 2 has it, for many runs at once: inner SGD, outer SGD with learning rate 1.

The state is one tensor (runs, workers, dim) in float64. The rules are those of `palsgd.PALSGD`;
tests compare the two step by step. xhat is the mean of the anchors x^(t) with the weights w_t = (1
- mu alpha)^-(t+1).
"""

from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Generator, Tensor

from palsgd.schedule import Schedule
from palsgd.theory.problems import Problem
from palsgd.theory.theorem import Setting

Uniforms = Callable[..., Tensor]

# Called after each step with the clock before it, the local models before and after it (before
# a sync, which leaves their mean as it is), and the anchor. Shapes (runs, workers or 1, dim).
Watch = Callable[[int, Tensor, Tensor, Tensor], None]


class Source(Protocol):
    """The source of the random numbers of all runs."""

    runs: int

    def coins(self, round: int) -> Tensor:
        """True where a worker mixes: (H, runs, workers)."""

    def sample(self) -> Any:
        """The next step's data, for each run and worker; not used where it mixes."""


class RandomSource:
    def __init__(
        self, problem: Problem, setting: Setting, *, runs: int, seed: int,
        device: torch.device | str = "cpu",
    ):  # fmt: skip
        self.problem, self.setting, self.runs = problem, setting, runs
        self._generator = Generator(device).manual_seed(seed)

    def coins(self, round: int) -> Tensor:
        s = self.setting
        return plans(s.draws, s.mix_prob, s.sync_every, self.runs, s.workers, self._uniforms)

    def sample(self) -> Any:
        return self.problem.draw(self.runs, self.setting.workers, self._generator)

    def _uniforms(self, *shape: int) -> Tensor:
        device = self._generator.device
        return torch.rand(*shape, generator=self._generator, dtype=torch.float64, device=device)


def plans(
    draws: str, mix_prob: float, sync_every: int, runs: int, workers: int, uniforms: Uniforms
) -> Tensor:
    """`palsgd.round_plan` of all runs and workers at once, from the same uniform numbers."""
    if draws == "independent":
        return uniforms(sync_every, runs, workers) < mix_prob
    common = uniforms(sync_every, runs, 1) < mix_prob
    if draws == "shared":
        return common.expand(-1, -1, workers)
    order = uniforms(sync_every, runs, workers).argsort(dim=0, stable=True)
    return order.argsort(dim=0) < common.sum(dim=0)


@dataclass
class Outcome:
    average: Tensor  # xhat: (runs, dim)
    at: dict[int, Tensor] = field(default_factory=dict)  # xhat after fewer steps


def run(
    problem: Problem,
    setting: Setting,
    start: Tensor,
    source: Source,
    *,
    snapshots: Collection[int] = (),
    watch: Watch | None = None,
    average_lr: float | None = None,
) -> Outcome:
    """All runs of `source` from `start`; xhat also after each of the steps in `snapshots`. The
    weights of xhat are those of the setting's alpha, or of `average_lr`."""
    if problem.mu * setting.lr >= 1:
        raise ValueError(
            f"lr={setting.lr:g} must be below 1/mu = {1 / problem.mu:g}: "
            "the weights (1 - mu alpha)^-(t+1) would not be positive"
        )
    anchor = start.expand(source.runs, 1, problem.dim)
    average = WeightedMean(1 - problem.mu * (average_lr or setting.lr))
    outcome = Outcome(start.expand(source.runs, problem.dim))
    schedule, first = Schedule.fixed(sync_every=setting.sync_every), 0
    for end, _ in schedule.exchanges(setting.steps):
        length, coins = end - first, source.coins(schedule.round_of(first))[..., None]
        local = anchor.expand(-1, setting.workers, -1)
        for place in range(length):
            after = step(problem, setting, local, anchor, coins[place], source.sample())
            if watch is not None:
                watch(first + place, local, after, anchor)
            local = after
            if first + place + 1 in snapshots:
                outcome.at[first + place + 1] = average.with_more(anchor[:, 0], place + 1)
        average.add(anchor[:, 0], length)
        anchor, first = local.mean(dim=1, keepdim=True), end
    outcome.average = average.value
    return outcome


def step(
    problem: Problem, setting: Setting, local: Tensor, anchor: Tensor, mixing: Tensor, sample: Any
) -> Tensor:
    gradient = problem.noisy_gradient(local, sample)
    gradient *= setting.lr / (1 - setting.mix_prob)
    pull = (local - anchor).mul_(setting.beta)
    return local - torch.where(mixing, pull, gradient)


class WeightedMean:
    """A mean with weights that grow by 1/decay in each step. The weights are kept relative to the
    last one, as the weights themselves would overflow in long runs."""

    def __init__(self, decay: float):
        self._decay, self._total = decay, 0.0
        self.value: Tensor = torch.zeros(())

    def add(self, value: Tensor, steps: int = 1) -> None:
        """A value that held for so many steps."""
        self.value = self.with_more(value, steps)
        self._total = self._total * self._decay**steps + self._of(steps)

    def with_more(self, value: Tensor, steps: int) -> Tensor:
        """What the mean would be after `add`."""
        total = self._total * self._decay**steps + self._of(steps)
        return self.value + (value - self.value) * (self._of(steps) / total)

    def _of(self, steps: int) -> float:
        if self._decay == 1:
            return float(steps)
        return (1 - self._decay**steps) / (1 - self._decay)

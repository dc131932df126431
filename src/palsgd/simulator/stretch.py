"""A worker's steps between two exchanges: gradient steps, each with the steps without data that
follow it."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from palsgd.method import Rate, Rates
from palsgd.schedule import StepPace

TickRates = list[list[float]]  # for each step of a stretch, the learning rate of each group


@dataclass
class GradientSlot:
    """A worker's j-th gradient of a stretch: its step, and the steps without data that follow."""

    tick: int
    share: float  # the learning rate of its step is divided by it
    mixing: list[int] = field(default_factory=list)

    @property
    def end(self) -> int:
        """The number of steps of the stretch that are over after this slot."""
        return self.tick + 1 + len(self.mixing)


@dataclass
class Stretch:
    """One worker's steps between two exchanges."""

    head: list[int] = field(default_factory=list)  # steps without data before the first gradient
    slots: list[GradientSlot] = field(default_factory=list)
    powers: list[float] = field(default_factory=list)  # of each step; see StepPace

    @classmethod
    def of(cls, plan: Sequence[bool], pace: Sequence[StepPace]) -> "Stretch":
        found = cls(powers=[step.power for step in pace])
        for tick, without_data in enumerate(plan):
            if not without_data:
                found.slots.append(GradientSlot(tick, pace[tick].share))
            elif found.slots:
                found.slots[-1].mixing.append(tick)
            else:
                found.head.append(tick)
        return found

    @property
    def mixing_steps(self) -> int:
        return len(self.head) + sum(len(slot.mixing) for slot in self.slots)


class RunStretch(NamedTuple):
    """The steps of all workers of a run between two exchanges."""

    start: int  # the clock at which they begin
    stretches: list[Stretch]  # of each worker
    rates: TickRates

    @property
    def end(self) -> int:
        """The clock of the exchange that follows."""
        return self.start + len(self.rates)


def common_rate(values: Sequence[float]) -> Rate:
    """One number if all workers have the same rate, else one entry per worker."""
    if all(value == values[0] for value in values):
        return values[0]
    return torch.tensor(values, dtype=torch.float64)


def rates_at(ticks: Sequence[int], rates: TickRates) -> Rates:
    """The rates of each group at a step of each worker."""
    first = rates[ticks[0]]
    if all(rates[tick] is first for tick in ticks):
        return first
    return [common_rate(group) for group in zip(*(rates[tick] for tick in ticks), strict=True)]


def pull_powers(steps: Sequence[Sequence[int]], stretches: Sequence[Stretch]) -> list[Rate]:
    """The powers of several steps without data in a row, of which each worker has equally many."""
    return [
        common_rate([stretch.powers[tick] for tick, stretch in zip(ticks, stretches, strict=True)])
        for ticks in zip(*steps, strict=True)
    ]


def mixing_rates(steps: Sequence[Sequence[int]], rates: TickRates) -> list[Rates]:
    """The rates of each group at several steps in a row, of which each worker has equally many."""
    return [rates_at(ticks, rates) for ticks in zip(*steps, strict=True)]

"""A worker's steps between two exchanges: gradient steps, each with the steps without data that
follow it."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from palsgd.method import Rate, Rates

TickRates = list[list[float]]  # for each step of a stretch, the learning rate of each group


@dataclass
class GradientSlot:
    """A worker's j-th gradient of a stretch: its step, and the steps without data that follow."""

    tick: int
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

    @classmethod
    def of(cls, plan: Sequence[bool]) -> "Stretch":
        found = cls()
        for tick, without_data in enumerate(plan):
            if not without_data:
                found.slots.append(GradientSlot(tick))
            elif found.slots:
                found.slots[-1].mixing.append(tick)
            else:
                found.head.append(tick)
        return found

    @property
    def mixing_steps(self) -> int:
        return len(self.head) + sum(len(slot.mixing) for slot in self.slots)


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


def mixing_rates(steps: Sequence[Sequence[int]], rates: TickRates) -> list[Rates]:
    """The rates of each group at several steps in a row, of which each worker has equally many."""
    return [rates_at(ticks, rates) for ticks in zip(*steps, strict=True)]

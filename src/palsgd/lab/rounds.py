"""Rounds whose length changes with the clock, by the rules of `sync_every`."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from palsgd.lab.clock_values import QSR, Course, parse
from palsgd.lab.settings import Settings
from palsgd.method import Facts, Method


@dataclass(frozen=True, kw_only=True)
class ChangingRounds(Method):
    """The lengths of all rounds of a run. It is composed with the method that trains."""

    rule: str  # as in the settings
    lengths: tuple[int, ...] = field(repr=False)

    def length(self, round: int, facts: Facts) -> int:
        return self.lengths[min(round, len(self.lengths) - 1)]

    def settings(self) -> dict[str, Any]:
        """The rule, by which workers and saved states compare."""
        return {"rule": self.rule}


def round_lengths(settings: Settings, steps: int, lr: Callable[[int], float]) -> tuple[int, ...]:
    """H of every round, from the rule and the learning rate at the step with which it begins."""
    rule, clock = parse("sync_every", str(settings.sync_every)), settings.warmup_steps
    found: list[int] = []
    assert not isinstance(rule, Course)
    while clock < steps or not found:
        if isinstance(rule, QSR):
            found.append(rule.length(lr(clock), most=max(1, steps - clock)))
        else:
            found.append(int(rule.at(clock, steps)))
        clock += found[-1]
    return tuple(found)

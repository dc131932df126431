"""Chooses H, the number of steps between syncs, from the measured cost of a sync and a step."""

import math
from dataclasses import dataclass
from statistics import median

from palsgd.checks import as_number, check_int, in_error


@dataclass(frozen=True)
class Auto:
    """H such that communication takes at most `share` of the time, within bounds.

    The first `rounds` rounds have `least` steps each. Their syncs are measured, and no step
    overlaps with them. The first round's measurement is not used, as buffers and kernels are made
    in it.

    Args:
        share: the part of the time that may go into communication, in (0, 1).
        least: the smallest H, which is also the H of the rounds that are measured.
        most: the largest H.
        rounds: the number of rounds that are measured, at least 2.

    Raises:
        ValueError: a value is out of its range; the message names the range.

    Example:
        >>> import torch, palsgd
        >>> model = torch.nn.Linear(2, 1)
        >>> inner = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> opt = palsgd.DiLoCo(
        ...     model, inner, sync_every=palsgd.Auto(share=0.02, least=16, most=512),
        ...     transport=palsgd.Alone(),
        ... )
        >>> opt.sync_every
        16
    """

    share: float = 0.05
    least: int = 8
    most: int = 1024
    rounds: int = 4

    def __post_init__(self) -> None:
        if not 0 < as_number(self.share) < 1:
            raise ValueError(
                f"share={in_error(self.share)} must be a number in (0, 1): the part of the time "
                "that may go into communication"
            )
        check_int("least", self.least, least=1)
        check_int("rounds", self.rounds, least=2)
        if check_int("most", self.most, least=1) < self.least:
            raise ValueError(f"most={self.most!r} must be at least least={self.least}")

    def choose(self, costs: "Costs", *, fragments: int, delay: int, gradient_share: float) -> int:
        tick = costs.step_s * gradient_share  # the cost of a mixing step is neglected
        exposed = fragments * max(0.0, costs.sync_s - delay * tick)
        steps = exposed * (1 - self.share) / (self.share * tick) if tick > 0 else math.inf
        # A delayed sync must be applied before the sync of the next fragment begins.
        least = max(self.least, fragments * max(1, delay))
        return max(least, min(self.most, math.ceil(min(steps, self.most))))


@dataclass(frozen=True)
class Costs:
    """`sync_s` has the seconds of the sync of one fragment, without waiting for slower workers.
    `step_s` has the seconds of a gradient step of the slowest worker."""

    sync_s: float
    step_s: float

    @classmethod
    def of(cls, seen: list["Costs"]) -> "Costs":
        return cls(median(c.sync_s for c in seen), median(c.step_s for c in seen))


def interval(sync_every: "int | str | Auto") -> tuple[int, Auto | None]:
    """The H of the first round and, if H is to be measured, the `Auto` that chooses the later H."""
    if isinstance(sync_every, str) and sync_every == "auto":
        sync_every = Auto()
    if isinstance(sync_every, Auto):
        return sync_every.least, sync_every
    if isinstance(sync_every, str):
        raise ValueError(
            f"sync_every={in_error(sync_every)} must be a whole number >= 1, or 'auto'"
        )
    return sync_every, None


class AutoInterval:
    """Measures the first rounds of a run, then chooses H. All workers see the same figures, so all
    choose the same H."""

    def __init__(self, auto: Auto, *, fragments: int, delay: int):
        self.auto, self.delay, self._fragments = auto, delay, fragments
        self.costs: list[Costs] = []  # of each sync so far

    def note(self, costs: Costs) -> None:
        self.costs.append(costs)

    def after_round(self, *, share: float) -> tuple[int, Costs] | None:
        """The chosen H and the costs it was chosen from, after the last round that is measured;
        None after every round before."""
        if len(self.costs) < self.auto.rounds * self._fragments:
            return None
        found = Costs.of(self.costs[1:] or self.costs)
        chosen = self.auto.choose(
            found, fragments=self._fragments, delay=self.delay, gradient_share=share
        )
        return chosen, found

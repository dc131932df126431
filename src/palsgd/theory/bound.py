"""The explicit bound at the end of Theorem 2's proof, before constants are dropped."""

import math
from dataclasses import dataclass

from palsgd.theory.problems import Problem
from palsgd.theory.theorem import Setting


@dataclass(frozen=True)
class Bound:
    """The bound of E[F(xhat)] - F*, as the sum of its three terms."""

    transient: float
    drift: float
    noise: float

    @property
    def total(self) -> float:
        return self.transient + self.drift + self.noise


def explicit_bound(
    problem: Problem, setting: Setting, distance: float, steps: int | None = None
) -> Bound:
    """5 [(d0/alpha) exp(-mu alpha T) + 81 L H^2 alpha^2 sigma^2 + 12 alpha sigma^2 / K].

    For any T, so also for the first `steps` of a run.
    """
    alpha, variance = setting.lr, problem.sigma**2
    shrunk = math.exp(-problem.mu * alpha * (setting.steps if steps is None else steps))
    return Bound(
        transient=5 * distance**2 / alpha * shrunk,
        drift=5 * 81 * problem.smoothness * (setting.sync_every * alpha) ** 2 * variance,
        noise=5 * 12 * alpha * variance / setting.workers,
    )

"""The seconds of gradient steps, drawn from one distribution for every worker and step."""

import math

import numpy as np

SPREADS = ("constant", "lognormal", "heavy-tail")
BLOCK = 1 << 22  # draws held at once, so that 100,000 workers need megabytes


class Compute:
    """Seconds of gradient steps for all workers.

    Every step is drawn on its own. The sum over a round then has the right distribution for any
    number of steps, and so has the time of the slowest worker, for which all others wait.
    """

    def __init__(
        self,
        *,
        workers: int,
        mean: float,
        spread: str,
        cv: float,
        tail: float,
        straggler: float,
        stragglers: int,
        rng: "np.random.Generator",
    ):
        self.workers, self.mean = workers, mean
        self.straggler, self._stragglers = straggler, stragglers
        self._spread, self._rng, self._tail = spread, rng, tail
        self._sigma = math.sqrt(math.log1p(cv * cv))

    def seconds(self, steps: np.ndarray) -> np.ndarray:
        """The seconds of each worker for its `steps` gradient steps. A fraction of a step takes
        that fraction of a step's time."""
        total = steps * self.mean if self._spread == "constant" else self._sums(steps)
        total[-self._stragglers :] *= self.straggler
        return total

    def _sums(self, steps: np.ndarray) -> np.ndarray:
        total = np.zeros(self.workers)
        least, most = int(steps.min()), math.ceil(steps.max())
        rows = max(1, BLOCK // self.workers)
        for first in range(0, least, rows):
            total += self._draws(min(rows, least - first)).sum(axis=0, dtype=np.float64)
        for step in range(least, most):
            total += np.clip(steps - step, 0, 1) * self._draws(1)[0]
        return total

    def _draws(self, rows: int) -> np.ndarray:
        """Times with mean `self.mean`, one row per step, in single precision."""
        shape = (rows, self.workers)
        if self._spread == "lognormal":
            drawn = self._rng.standard_normal(shape, dtype=np.float32)
            drawn *= self._sigma
            drawn -= self._sigma**2 / 2
            scale = self.mean
        else:  # Pareto: exp of an exponential, times the least time that gives the mean
            drawn = self._rng.standard_exponential(shape, dtype=np.float32)
            drawn /= self._tail
            scale = self.mean * (self._tail - 1) / self._tail
        np.exp(drawn, out=drawn)
        drawn *= scale
        return drawn

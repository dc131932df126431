"""How many gradients each worker computes in a stretch of the clock."""

from typing import Protocol

import numpy as np

from palsgd.method import Method


class Counts(Protocol):
    def gradients(self, round: int, start: int, stop: int) -> np.ndarray:
        """Of each worker in the steps [start, stop) of a round. Called in the clock's order."""
        ...


class Drawn:
    """By the law of `palsgd.round_plan`, for any number of workers at once.

    Mixing steps among H i.i.d. coins are Binomial; given their number in a round, the number in
    some of its steps is hypergeometric, which is how balanced rounds are cut into stretches.
    """

    def __init__(
        self,
        *,
        workers: int,
        sync_every: int,
        mix_prob: float,
        draws: str,
        rng: "np.random.Generator",
    ):
        self._workers, self._H, self._p, self._draws = workers, sync_every, mix_prob, draws
        self._rng, self._round = rng, -1
        self._left = np.zeros(workers, dtype=np.int64)  # mixing steps to come in this round

    def gradients(self, round: int, start: int, stop: int) -> np.ndarray:
        length = stop - start
        if self._p == 0:
            return np.full(self._workers, length)
        if self._draws == "independent":
            return length - self._rng.binomial(length, self._p, self._workers)
        if self._draws == "shared":
            return np.full(self._workers, length - self._rng.binomial(length, self._p))
        if round != self._round:
            self._round = round
            self._left[:] = self._rng.binomial(self._H, self._p)
        if stop == self._H:
            mixing = self._left.copy()
        else:
            mixing = self._rng.hypergeometric(self._left, self._H - start - self._left, length)
        self._left -= mixing
        return length - mixing


class Expected:
    """As many as on average, the same for all: what balanced draws come to over many rounds."""

    def __init__(self, *, workers: int, mix_prob: float):
        self._workers, self._share = workers, 1 - mix_prob

    def gradients(self, round: int, start: int, stop: int) -> np.ndarray:
        return np.full(self._workers, (stop - start) * self._share)


class Planned:
    """As a method's plans say, worker by worker."""

    def __init__(self, method: Method, workers: int):
        self._method, self._workers = method, workers
        self._round, self._plans = -1, np.zeros((0, 0), dtype=bool)

    def gradients(self, round: int, start: int, stop: int) -> np.ndarray:
        if round != self._round:
            plans = [self._method.plan(worker=k, round=round) for k in range(self._workers)]
            self._round, self._plans = round, np.array(plans, dtype=bool)
        return (~self._plans[:, start:stop]).sum(axis=1)

"""How many gradients each worker computes in a stretch of the clock."""

from collections.abc import Sequence
from itertools import pairwise
from typing import Protocol

import numpy as np

from palsgd.method import Method


class Counts(Protocol):
    def gradients(self, round: int, start: int, stop: int) -> np.ndarray:
        """Of each worker in the steps [start, stop) of a round. Called in the clock's order."""
        ...


class Drawn:
    """By the law of `palsgd.round_plan`, for any number of workers at once.

    Mixing steps among n i.i.d. coins are Binomial(n, p). Balanced draws share that number between
    two stops; given it, the number in some of the steps between them is hypergeometric, which is
    how a stretch is cut that the end of a run or a question comes into.
    """

    def __init__(
        self,
        *,
        workers: int,
        sync_every: int,
        mix_prob: float,
        draws: str,
        rng: "np.random.Generator",
        stops: Sequence[int] = (),
    ):
        self._workers, self._p, self._draws, self._rng = workers, mix_prob, draws, rng
        self._bounds = [0, *stops, sync_every]  # of stretches that share their number
        self._stretch = (-1, -1)  # the round and start of the one begun last
        self._left = np.zeros(workers, dtype=np.int64)  # mixing steps to come in it

    def gradients(self, round: int, start: int, stop: int) -> np.ndarray:
        length = stop - start
        if self._p == 0:
            return np.full(self._workers, length)
        if self._draws == "independent":
            return length - self._rng.binomial(length, self._p, self._workers)
        if self._draws == "shared":
            return np.full(self._workers, length - self._rng.binomial(length, self._p))
        mixing = np.zeros(self._workers, dtype=np.int64)
        for first, last in pairwise(self._bounds):
            if start < last and first < stop:
                self._enter(round, first, last)
                mixing += self._balanced(max(start, first), min(stop, last), last)
        return length - mixing

    def _enter(self, round: int, first: int, last: int) -> None:
        if self._stretch != (round, first):
            self._stretch = (round, first)
            self._left[:] = self._rng.binomial(last - first, self._p)

    def _balanced(self, start: int, stop: int, last: int) -> np.ndarray:
        """Mixing steps of each worker in [start, stop), within a stretch that ends at `last`."""
        if stop == last:
            mixing = self._left.copy()
        else:
            left = self._left
            mixing = self._rng.hypergeometric(left, last - start - left, stop - start)
        self._left -= mixing
        return mixing


class Expected:
    """As many as on average, the same for all: what balanced draws come to over many rounds."""

    def __init__(self, *, workers: int, mix_prob: float):
        self._workers, self._share = workers, 1 - mix_prob

    def gradients(self, round: int, start: int, stop: int) -> np.ndarray:
        return np.full(self._workers, (stop - start) * self._share)


class Planned:
    """As a method's plans say, worker by worker."""

    def __init__(self, method: Method, workers: int, stops: Sequence[int] = ()):
        self._method, self._workers, self._stops = method, workers, stops
        self._round, self._plans = -1, np.zeros((0, 0), dtype=bool)

    def gradients(self, round: int, start: int, stop: int) -> np.ndarray:
        if round != self._round:
            plans = [
                self._method.plan(worker=k, round=round, stops=self._stops)
                for k in range(self._workers)
            ]
            self._round, self._plans = round, np.array(plans, dtype=bool)
        return (~self._plans[:, start:stop]).sum(axis=1)

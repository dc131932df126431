"""The number of gradients that each worker computes between two clocks."""

from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from typing import Protocol

import numpy as np

from palsgd.method import Facts, Method
from palsgd.pacing import Speeds
from palsgd.schedule import Schedule, paced_gradients


class Counts(Protocol):
    def gradients(self, schedule: Schedule, start: int, stop: int) -> np.ndarray:
        """The number of gradients of each worker in the steps from clock `start` to clock `stop`,
        which are all in one round. Calls must be in the order of the clock."""
        ...


class Drawn:
    """Numbers drawn from the distribution of `palsgd.round_plan`, for any number of workers at
    once.

    The number of mixing steps among L i.i.d. coins is binomial. Balanced draws have one such number
    for all workers in each stretch between two stops of a round. Given that number, the number in
    some steps of the stretch is hypergeometric and independent between workers. Paced draws have
    that number for the fastest worker, and more for slower ones.
    """

    def __init__(
        self,
        *,
        workers: int,
        mix_prob: float,
        draws: str,
        rng: "np.random.Generator",
        speeds: np.ndarray | None = None,
    ):
        """`speeds` are those of the workers, for paced draws; None: they are equally fast."""
        self._workers, self._p, self._draws, self._rng = workers, mix_prob, draws, rng
        self._speeds = np.ones(workers)
        if draws == "paced" and speeds is not None:
            self._speeds = speeds
        self._end = 0  # the clock at which the present stretch ends
        self._left = np.zeros(workers, dtype=np.int64)  # mixing steps that remain in the stretch

    def gradients(self, schedule: Schedule, start: int, stop: int) -> np.ndarray:
        length = stop - start
        if self._p == 0 and (self._speeds == self._speeds[0]).all():
            return np.full(self._workers, length)
        if self._draws == "independent":
            return length - self._rng.binomial(length, self._p, self._workers)
        if self._draws == "shared":
            return np.full(self._workers, length - self._rng.binomial(length, self._p))
        edges = [start, *(e for e in _edges(schedule, start) if start < e < stop), stop]
        found = np.full(self._workers, length)
        for low, high in pairwise(edges):
            found -= self._mixing(schedule, low, high)
        return found

    def _mixing(self, schedule: Schedule, start: int, stop: int) -> np.ndarray:
        """The number of mixing steps in a part of one stretch, with balanced draws."""
        if start >= self._end:
            self._end = next(e for e in _edges(schedule, start) if e > start)
            length = self._end - start
            fastest = length - self._rng.binomial(length, self._p)
            self._left[:] = length - paced_gradients(fastest, self._speeds)
        if stop == self._end:
            mixing = self._left.copy()
        else:
            gradients = self._end - start - self._left
            mixing = self._rng.hypergeometric(self._left, gradients, stop - start)
        self._left -= mixing
        return mixing


def _edges(schedule: Schedule, clock: int) -> list[int]:
    """The clocks at which the stretches of this clock's round end."""
    start = schedule.round_start(clock)
    return [start + stop for stop in (*schedule.stops(clock), schedule.length(clock))]


class Expected:
    """The mean number of gradients, the same for all workers."""

    def __init__(self, *, workers: int, mix_prob: float):
        self._workers, self._share = workers, 1 - mix_prob

    def gradients(self, schedule: Schedule, start: int, stop: int) -> np.ndarray:
        return np.full(self._workers, (stop - start) * self._share)


class Planned:
    """The number of gradients in a method's plan for each worker."""

    def __init__(
        self, method: Method, facts: Facts, speeds: Callable[[int], Speeds] = lambda round: ()
    ):
        """`speeds(round)` are those of the workers in a round, for paced draws."""
        self._method, self._facts, self._speeds = method, facts, speeds
        self._round, self._plans = -1, np.zeros((0, 0), dtype=bool)

    def gradients(self, schedule: Schedule, start: int, stop: int) -> np.ndarray:
        round, offset = schedule.place(start)
        if round != self._round:
            self._round, self._plans = round, self._plans_of(schedule, round, start)
        return (~self._plans[:, offset : offset + stop - start]).sum(axis=1)

    def _plans_of(self, schedule: Schedule, round: int, clock: int) -> np.ndarray:
        facts = replace(self._facts, stops=schedule.stops(clock), speeds=self._speeds(round))
        length = schedule.length(clock)
        plans = [self._method.plan(k, round, length, facts) for k in range(facts.workers)]
        return np.array(plans, dtype=bool)

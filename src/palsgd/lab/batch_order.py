"""Which batch a gradient step reads.

It is the next one, whatever steps without data lie between. With `discard_batches` a step without
data uses up a batch, as in the paper's released code, whose loop has loaded it already: then the
batch is that of the step's clock.
"""

from bisect import bisect_right
from itertools import accumulate

import palsgd
from palsgd import registry
from palsgd.lab.methods import method_of
from palsgd.lab.settings import Settings


class BatchOrder:
    """Called with the number of a gradient step, from 0, it gives the index of its batch. Settings
    are in steps, and those with `discard_batches` have draws that all workers share."""

    def __init__(self, settings: Settings):
        self._settings = settings
        mixes = registry.row(settings.method).mixes
        self._mix_prob = 1.0 - method_of(settings).gradient_share if mixes else 0.0
        self._discards = settings.discard_batches and self._mix_prob > 0
        self._gradients: list[list[int]] = []  # of each round, the offsets of its gradient steps
        self._before: list[int] = [0]  # gradient steps before each round, and after the last one

    def __call__(self, gradient: int) -> int:
        warmup = self._settings.warmup_steps
        if not self._discards or gradient < warmup:
            return gradient
        wanted = gradient - warmup
        while self._before[-1] <= wanted:
            self._add_round()
        round = bisect_right(self._before, wanted) - 1
        offset = self._gradients[round][wanted - self._before[round]]
        return warmup + round * int(self._settings.sync_every) + offset

    def _add_round(self) -> None:
        settings = self._settings
        plan = palsgd.round_plan(
            seed=settings.seed, worker=0, round=len(self._gradients),
            sync_every=int(settings.sync_every), mix_prob=self._mix_prob, draws=settings.draws,
        )  # fmt: skip
        self._gradients.append([offset for offset, mixes in enumerate(plan) if not mixes])
        self._before = list(accumulate(map(len, self._gradients), initial=0))

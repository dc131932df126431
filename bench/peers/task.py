"""What every contender trains: one GPT-Neo of about a million parameters on endless stories."""

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import nn

from palsgd.lab.data.stories import GRAMMAR
from palsgd.lab.data.tokens import NOT_A_TARGET
from palsgd.lab.language import Batch
from palsgd.lab.models.gpt_neo import GPTNeo
from palsgd.lab.workload import parts_of
from palsgd.lab.workloads.stories import Stories

SEED = 2023
MAX_NORM = 1.0
HELD_OUT = 120  # stories


@dataclass(frozen=True, kw_only=True)
class Size:
    hidden: int
    heads: int
    layers: int
    batch: int  # stories per worker and gradient step
    steps: int  # of the contenders that meet every `sync_every` steps
    ddp_steps: int  # of those that meet at every step, and need fewer for the same loss
    warmup: int  # steps over which the learning rate rises; no DDP phase for anyone
    sync_every: int
    lr: float


SIZES = {
    "full": Size(
        hidden=128, heads=4, layers=5, batch=1, steps=1024, ddp_steps=384, warmup=64,
        sync_every=64, lr=3e-3,
    ),
    "tiny": Size(
        hidden=32, heads=2, layers=1, batch=1, steps=32, ddp_steps=16, warmup=4,
        sync_every=8, lr=3e-3,
    ),
}  # fmt: skip


class Task(Stories):
    """Equal first weights, and equal batches for equal worker and step, whoever trains."""

    def __init__(self, size: Size, steps: int, pause_s: float = 0.0):
        super().__init__(seed=SEED)
        self.size, self.steps = size, steps
        self.pause_s = pause_s  # where not 0: how long to wait instead of computing a gradient

    def model(self) -> nn.Module:
        torch.manual_seed(SEED)
        return GPTNeo(
            vocab=len(GRAMMAR.vocabulary),
            positions=GRAMMAR.longest,
            hidden=self.size.hidden,
            heads=self.size.heads,
            layers=self.size.layers,
        )

    def next_batch(self, worker: int, index: int) -> Batch:
        # endless text: `workers` only counts where an epoch is dealt out
        return trimmed(self.batch(worker=worker, workers=0, size=self.size.batch, index=index))

    def validation(self, part: int, parts: int) -> Iterator[Batch]:
        inputs, targets = self._valid
        for own in parts_of(HELD_OUT, part, parts, size=30):
            yield trimmed((inputs[own], targets[own]))

    def lr_factor(self, clock: int) -> float:
        """A linear rise, then half a cosine down to zero, for all contenders alike."""
        rise, steps = self.size.warmup, self.steps
        if clock < rise:
            return (clock + 1) / rise
        return 0.5 * (1 + math.cos(math.pi * min(1.0, (clock - rise) / (steps - rise))))


def trimmed(batch: Batch) -> Batch:
    """Without the columns in which every story has ended."""
    inputs, targets = batch
    longest = int((targets != NOT_A_TARGET).sum(1).max())
    return inputs[:, :longest], targets[:, :longest]

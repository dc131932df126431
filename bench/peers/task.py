"""What every contender trains: one GPT-Neo on endless stories."""

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
# Stories that no one trains on. Settings are chosen on the first, figures are of the others.
SPLITS = {"tuning": slice(0, 120), "test": slice(120, 240)}


@dataclass(frozen=True, kw_only=True)
class Size:
    hidden: int
    heads: int
    layers: int
    batch: int  # stories per worker and gradient step
    warmup: int  # steps over which the learning rate rises; no DDP phase for anyone
    sync_every: int
    lr: float  # of timed steps, which do not depend on it
    # Every training is run in three lengths, each with a cosine of its own. DDP needs fewer steps.
    lengths: tuple[int, ...]
    ddp_lengths: tuple[int, ...]
    evaluations: int  # of DDP's second half; others are evaluated at their syncs

    def lengths_of(self, *, local: bool) -> tuple[int, ...]:
        return self.lengths if local else self.ddp_lengths


# The loss to reach is DDP's at the middle one of its lengths.
SIZES = {
    "small": Size(
        hidden=96, heads=4, layers=3, batch=1, warmup=32, sync_every=32, lr=3e-3,
        lengths=(256, 384, 576), ddp_lengths=(128, 192, 288), evaluations=12,
    ),
    "full": Size(  # of a million parameters: an hour and a half on two cores
        hidden=128, heads=4, layers=5, batch=1, warmup=64, sync_every=64, lr=3e-3,
        lengths=(512, 768, 1152), ddp_lengths=(256, 384, 576), evaluations=12,
    ),
    "tiny": Size(
        hidden=16, heads=2, layers=1, batch=1, warmup=2, sync_every=4, lr=3e-3,
        lengths=(8, 12, 16), ddp_lengths=(4, 6, 8), evaluations=2,
    ),
}  # fmt: skip


class Task(Stories):
    """Equal first weights, and equal batches for equal seed, worker and step, whoever trains."""

    def __init__(
        self, size: Size, steps: int, *, seed: int = SEED, split: str = "test",
        device: torch.device | str = "cpu",
    ):  # fmt: skip
        super().__init__(seed=seed, device=device)
        self.size, self.steps, self.split = size, steps, split

    def model(self) -> nn.Module:
        torch.manual_seed(self.seed)
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
        inputs, targets = (each[SPLITS[self.split]] for each in self._valid)
        for own in parts_of(len(inputs), part, parts, size=30):
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

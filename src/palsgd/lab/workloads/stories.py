"""Endless stories from a grammar and a tiny GPT-Neo: nothing to fetch, and a known least loss."""

from collections.abc import Iterator

import numpy as np
import torch
from torch import nn

from palsgd.lab.data.sharding import Changes, random_stream
from palsgd.lab.data.stories import GRAMMAR
from palsgd.lab.data.tokens import NOT_A_TARGET
from palsgd.lab.language import Batch, Language
from palsgd.lab.models.gpt_neo import GPTNeo
from palsgd.lab.settings import Settings
from palsgd.lab.workload import parts_of
from palsgd.simulator.batches import sent

# DDP finds that names come up again between steps 300 and 420, a little earlier or later by seed.
# Runs that part with it before that end as far apart as the rule is worth, whatever the method.
RECIPES = {
    "stories": Settings(
        workload="stories", workers=4, steps=1380, batch_size=16, sync_every=32, mix_prob=0.1,
        mix_rate=8.0, warmup_steps=420, inner="adamw", lr=3e-3, max_norm=1.0, schedule="cosine",
        outer_lr=0.7, outer_momentum=0.5,
    ),
}  # fmt: skip
GRIDS = {
    "stories/H": {"sync_every": [8, 16, 32, 64, 128]},
    "stories/eta": {"mix_rate": [0.25, 1.0, 4.0, 16.0]},
}
# At the longest interval a run has 30 rounds.
SEARCH = {
    "lr": (1e-3, 1e-2),
    "schedule": ["constant", "cosine"],
    "sync_every": [16, 32],
    "outer_lr": (0.2, 1.0),
    "outer_momentum": [0.3, 0.6, 0.9],
    "mix_prob": [0.0625, 0.125],
    "pull": (0.05, 0.6),
    "decay": (0.003, 0.03),
}


class Stories(Language):
    name = "stories"
    examples = 100_000  # text is endless; this many stories count as an epoch

    def load(self) -> None:
        # One set for tests and one for choosing, whatever the seed. Training text has longer keys.
        key = () if self.split == "test" else (1,)
        texts = GRAMMAR.draw(500, random_stream(0, *key))
        self._valid = self._rows(texts.words, texts.lengths)
        # What the grammar itself has on these very stories. Over all stories it has the ratio of
        # two means, entropy / mean_length, which a few hundred of them miss by half a percent.
        self.floor = float(texts.nats.sum() / texts.lengths.sum())

    def model(self) -> nn.Module:
        words = len(GRAMMAR.vocabulary)
        return GPTNeo(vocab=words, positions=GRAMMAR.longest, hidden=64, heads=4, layers=2)

    def batch(
        self, *, worker: int, workers: int, size: int, index: int, changes: Changes = ()
    ) -> Batch:
        # Every worker has an endless text of its own, so fixed and reshuffled shards are the same,
        # and a worker that comes later begins a text that nobody has read.
        texts = GRAMMAR.draw(size, random_stream(self.seed, worker, index))
        return self._rows(texts.words, texts.lengths)

    def joint_batch(self, *, workers: int, size: int, index: int) -> Batch:
        streams = (random_stream(self.seed, worker, index) for worker in range(workers))
        texts = GRAMMAR.draw(size, *streams)
        inputs, targets = self._rows(texts.words, texts.lengths)
        return inputs.unflatten(0, (workers, size)), targets.unflatten(0, (workers, size))

    def validation(self, part: int, parts: int) -> Iterator[Batch]:
        inputs, targets = self._valid
        size = 500 if self.device.type == "cuda" else 100  # a GPU waits between small pieces
        for own in parts_of(len(inputs), part, parts, size=size):
            yield inputs[own], targets[own]

    def _rows(self, words: np.ndarray, lengths: np.ndarray) -> Batch:
        """The first word is predicted from END, END from the last word."""
        inputs = np.zeros_like(words)
        inputs[:, 1:] = words[:, :-1]
        within = np.arange(words.shape[1]) < lengths[:, None]
        targets = np.where(within, words, NOT_A_TARGET)
        own = torch.from_numpy(inputs), torch.from_numpy(targets)
        return sent(own[0], self.device), sent(own[1], self.device)

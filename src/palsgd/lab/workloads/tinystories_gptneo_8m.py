"""TinyStories and GPT-Neo-8M."""

from dataclasses import replace

from torch import nn

from palsgd.lab.language import TinyStories
from palsgd.lab.models.gpt_neo import GPTNeo
from palsgd.lab.settings import Settings

# The paper names both 512 stories per worker and 2048 in all; with eight workers that is 256 each.
# Clipping is on there; the norm of 1 and the weight decay, torch's default, are those of its code.
# docs/paper.md compares every setting.
_PAPER = Settings(
    workload="tinystories-gptneo-8m", workers=8, epochs=15, batch_size=256, sync_every=64,
    mix_prob=0.1, mix_rate=16.0, warmup_steps=1024, sharding="fixed", inner="adamw", lr=1e-3,
    weight_decay=0.01, max_norm=1.0, outer_lr=0.2, whole_rounds=True, precision="bf16",
)  # fmt: skip
RECIPES = {
    "tinystories-gptneo-8m": _PAPER,
    "tinystories-gptneo-8m-h16": replace(_PAPER, sync_every=16),
    "tinystories-gptneo-8m-k4": replace(_PAPER, workers=4, batch_size=512, sync_every=16),
}
GRIDS: dict[str, dict[str, list]] = {
    "tinystories-gptneo-8m/seed": {"seed": [2022, 2023, 2024]},
    "tinystories-gptneo-8m/optimizers": {
        "inner": ["sgd", "adam", "adamw"],
        "outer": ["sgd", "sgd_m", "nesterov", "adamw"],
        "outer_lr": [1.0, 0.2, 1e-3],  # sizes for sgd, momentum and adamw; the best counts
    },
    "tinystories-gptneo-8m/eta": {"mix_rate": [0.25, 0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0]},
    "tinystories-gptneo-8m/p": {"mix_prob": [0.025, 0.05, 0.1, 0.25, 0.5]},
    "tinystories-gptneo-8m/H": {"sync_every": [32, 64, 128, 256]},
    "tinystories-gptneo-8m/lr": {"outer_lr": [0.1, 0.2]},
}
# The paper fixes lr, and has outer_lr of .1 to .2.
SEARCH = {
    "lr": (3e-4, 3e-3),
    "schedule": ["constant", "cosine"],
    "sync_every": [16, 64],
    "outer_lr": (0.1, 1.0),
    "outer_momentum": [0.5, 0.9],
    "mix_prob": [0.05, 0.1],
    "pull": (0.05, 0.6),
    "decay": (0.003, 0.03),
}


class TinyStoriesGPTNeo8M(TinyStories):
    name = "tinystories-gptneo-8m"
    context = 300

    def model(self) -> nn.Module:
        return GPTNeo(vocab=50257, positions=300, hidden=128, heads=8, layers=8)

"""Equal gradient examples: how many steps each method gets.

Computing is what methods are given equally: K workers with B examples per gradient see the same
number of examples under every method. A method that mixes computes no gradient in a share p of its
steps, so it gets more steps. Rounds are never cut short, so a method may end less than a round
below the budget; none is above it, but for the chance of the coins.
"""

import math

from palsgd import registry
from palsgd.lab.methods import method_of
from palsgd.lab.settings import Settings


def with_gradients(settings: Settings, gradients: int) -> Settings:
    """The settings with as many steps as compute `gradients` gradients on each worker."""
    if not registry.row(settings.method).rounds:
        return settings.changed({"steps": gradients})
    if isinstance(settings.sync_every, str):
        raise ValueError(
            f"sync_every={settings.sync_every} changes in a run, so its gradients cannot "
            "be counted beforehand; give a number"
        )
    in_a_round = settings.sync_every * method_of(settings).gradient_share
    rounds = math.floor((gradients - settings.warmup_steps) / in_a_round + 1e-9)
    if rounds < 1:
        raise ValueError(
            f"{gradients} gradients are too few for warmup_steps={settings.warmup_steps} and a "
            f"round of sync_every={settings.sync_every}; use more steps or a smaller one"
        )
    return settings.changed({"steps": settings.warmup_steps + rounds * settings.sync_every})


def gradient_examples(summary: dict, settings: Settings) -> int:
    """The examples of which a finished run computed gradients, by what its ledger counted. Workers
    compute equally many, but with independent or paced draws, where the first stands for all."""
    return summary["gradient_steps"] * settings.workers * settings.batch_size

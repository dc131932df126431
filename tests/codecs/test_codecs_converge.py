"""With every codec, local SGD ends about where it ends without one."""

from functools import cache

import numpy as np
import pytest
import torch

from palsgd.codecs import TopK, find_codec
from palsgd.transports import Message, average_in_memory
from support.exchanges import Sign

WORKERS, SIZE, STEPS, ROUNDS = 8, 4096, 10, 100
OUTER = {"SGD": (1.0, 0.0), "Nesterov": (0.2, 0.9)}


class TwoSteps(TopK):
    """Top-k as a mean in two steps, without decay."""

    gathered = False
    decay = 1.0


class SignTwoSteps(Sign):
    gathered = False
    decay = 1.0


CODECS = {
    "none": None,
    "bf16": "bf16",
    "int8": "int8",
    "int4": "int4",
    "topk": "topk:0.03125",
    "sign": Sign(),
    "topk in two steps": TwoSteps(),
    "sign in two steps": SignTwoSteps(),
}


def local_steps(curvature):
    """Steps x <- x - 0.05 (c (x - target) + 0.3 noise) all at once: by what factor one step shrinks
    the distance to the target, and the standard deviation of what the noise of all adds up to."""
    shrink = 1 - 0.05 * curvature
    return shrink, 0.05 * 0.3 * sum(shrink ** (2 * step) for step in range(STEPS)) ** 0.5


@cache
def distance(name, outer):
    """How far the loss of a quadratic is from its least, after 100 rounds of 10 local steps."""
    rng, (lr, momentum) = np.random.default_rng(0), OUTER[outer]
    curvature = torch.tensor(np.exp(rng.uniform(np.log(0.02), 0, SIZE))).float()
    targets = torch.tensor(rng.normal(size=(WORKERS, SIZE)) * 0.3 + rng.normal(size=SIZE)).float()
    chances = torch.Generator().manual_seed(0)
    shrink, spread = local_steps(curvature)
    codec, left = find_codec(CODECS[name]), [None] * WORKERS
    x, velocity = torch.zeros(SIZE), torch.zeros(SIZE)
    for _ in range(ROUNDS):
        noise = spread * torch.randn(targets.shape, generator=chances)
        local = targets + shrink**STEPS * (x - targets) + noise
        pairs = zip(x - local, left, strict=True)
        messages = [Message(change, 0, codec, residue) for change, residue in pairs]
        average_in_memory(messages)
        left = [message.residue for message in messages]
        mean = messages[0].values
        velocity = momentum * velocity + mean
        x = x - lr * (mean + momentum * velocity)
    return float((0.5 * curvature * (x - targets.mean(dim=0)) ** 2).sum())


@pytest.mark.parametrize("outer", OUTER)
@pytest.mark.parametrize(
    ("name", "times"), [("bf16", 1.02), ("int8", 1.02), ("int4", 1.1), ("topk", 10), ("sign", 3)]
)
def test_a_codec_ends_about_as_near_to_the_optimum_as_none(name, times, outer):
    assert distance(name, outer) < times * distance("none", outer)


@pytest.mark.parametrize("outer", OUTER)
@pytest.mark.parametrize("name", ["topk", "sign"])
def test_a_code_that_loses_much_would_not_in_two_steps_without_decay(name, outer):
    """This is why such codes are gathered and their residue decays."""
    assert distance(f"{name} in two steps", outer) > 20 * distance("none", outer)
    assert distance(f"{name} in two steps", outer) > 3 * distance(name, outer)

"""Every codec trains: a noisy quadratic of 4096 numbers, eight workers, through the optimizer."""

import numpy as np
import pytest
import torch
from torch import nn

import palsgd

pytestmark = pytest.mark.slow
SIZE, WORKERS, H, ROUNDS, LR = 4096, 8, 10, 100, 0.05
CODECS = ["bf16", "int8", "int4", "topk:0.03125"]
OUTERS = {
    "average": lambda params: torch.optim.SGD(params, lr=1.0),
    "nesterov": palsgd.nesterov(0.2, 0.9),
}


GENERATOR = np.random.default_rng(0)
CURVATURE = torch.tensor(np.exp(GENERATOR.uniform(np.log(0.02), 0.0, SIZE)), dtype=torch.float32)
OPTIMA = GENERATOR.normal(size=(WORKERS, SIZE)) * 0.3 + GENERATOR.normal(size=SIZE)
OPTIMA = torch.tensor(OPTIMA, dtype=torch.float32)  # each worker's own; the joint one is their mean


class Point(nn.Module):
    def __init__(self):
        super().__init__()
        self.x = nn.Parameter(torch.zeros(SIZE))


def away(point, optimum):
    return 0.5 * (CURVATURE * (point.x - optimum).square()).sum()


def loss(point, batch):
    optimum, noise = batch
    return away(point, optimum) + 0.3 * (noise * point.x).sum()


def data(worker):
    generator = torch.Generator().manual_seed(worker)
    while True:
        yield OPTIMA[worker], torch.randn(SIZE, generator=generator)


def excess(point):
    return away(point, OPTIMA.mean(0)).item()


def distance(compress, outer):
    def method(model):
        inner = torch.optim.SGD(model.parameters(), lr=LR)
        return palsgd.DiLoCo(model, inner, sync_every=H, outer=OUTERS[outer], compress=compress)

    result = palsgd.simulate(
        workers=WORKERS, steps=H * ROUNDS, model=Point, loss=loss, data=data, method=method,
        vectorize=True,
    )  # fmt: skip
    return excess(result.model)


@pytest.fixture(scope="module")
def plain():
    return {outer: distance(None, outer) for outer in OUTERS}


@pytest.mark.parametrize("outer", OUTERS)
@pytest.mark.parametrize("codec", CODECS)
def test_a_coded_run_ends_within_ten_times_the_plain_runs_distance(plain, codec, outer):
    """Coded twice, with residues that do not decay, top-k ends 24 and 240 times as far away."""
    start = excess(Point())
    found = distance(codec, outer)
    assert plain[outer] < 0.05 * start
    assert found <= 10 * plain[outer]

"""Corners of the contract of methods, each of which a small method of its own stands in."""

import torch
from torch import nn

import palsgd
from palsgd.methods.scaffold import SCAFFOLDMethod
from support.engines import check


class Scaled(nn.Module):
    """A linear layer and a factor, which is a parameter without axes."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 3)
        self.factor = nn.Parameter(torch.tensor(0.5))

    def forward(self, x):
        return self.layer(x) * self.factor


def shard(worker, batches=5):
    generator = torch.Generator().manual_seed(worker)
    return [
        tuple(torch.randn(6, n, generator=generator, dtype=torch.float64) for n in (4, 3))
        for _ in range(batches)
    ]


def simulated(method, *, vectorize, steps=12, **settings):
    """Three workers with the model that has a parameter without axes."""

    def optimizer(model):
        inner = torch.optim.SGD(model.parameters(), lr=0.05)
        return palsgd.LocalOptimizer(model, inner, method, **dict(sync_every=4) | settings)

    return palsgd.simulate(
        workers=3, steps=steps, model=lambda: Scaled().double(), method=optimizer, data=shard,
        loss=lambda model, batch: (model(batch[0]) - batch[1]).square().mean(),
        vectorize=vectorize, progress=False,
    )  # fmt: skip


def test_a_part_of_its_own_may_have_tensors_without_axes():
    method = SCAFFOLDMethod()
    exact, fast = (simulated(method, vectorize=v, fragments=2) for v in (False, True))
    check(fast, exact)

"""The readings of PALSGD that lab/studies compares with it, against twins in NumPy."""

import numpy as np
import pytest
import torch
import torch.distributed as dist

import palsgd
from palsgd import registry
from support.core_access import anchor_of
from support.family import LocalSGD
from support.places import STUDIES
from support.problems import batches, linear, mse, regression_gradient, regression_start, train
from support.problems import vector as vector_of
from support.reference import sgd

H, STEPS, LR, P, ETA, SEED = 5, 23, 0.05, 0.3, 2.0, 11
FIRST = np.arange(15) < 12  # the elements of the first tensor, the weight


class ReleasedCode(LocalSGD):
    """A mixing step changes the first tensor alone."""

    def _step(self, k, t):
        before = self.local[k]
        super()._step(k, t)
        if self.plan(k, t // self.H)[t % self.H]:
            self.local[k] = np.where(FIRST, self.local[k], before)


class AsPrinted(LocalSGD):
    """A sync changes the global model alone."""

    def exchange(self, f, part, rate):
        mean = np.mean([self.x[part] - x[part] for x in self.local], axis=0)
        self.x[part] = self.outer[f](self.x[part], mean)


every_reading = pytest.mark.parametrize("twin", [ReleasedCode, AsPrinted])


def expected(twin, workers):
    def plan(k, r):
        return palsgd.round_plan(
            seed=SEED, worker=k, round=r, sync_every=H, mix_prob=P, draws="shared"
        )

    return twin(
        regression_start(), regression_gradient, workers=workers, H=H,
        lr=lambda t: np.full(15, LR), inner=sgd(momentum=0.9), plan=plan, p=P, eta=ETA,
        outer=sgd(momentum=0.5, nesterov=True, fixed_lr=0.7),
    ).run(STEPS)  # fmt: skip


def build(model, name):
    method = registry.row(f"{STUDIES}/released_methods.py:{name}").method
    inner = torch.optim.SGD(model.parameters(), lr=LR, momentum=0.9)
    return palsgd.LocalOptimizer(
        model, inner, method(mix_prob=P, mix_rate=ETA), palsgd.nesterov(0.7, 0.5), sync_every=H,
        seed=SEED, draws="shared",
    )  # fmt: skip


def simulated(name, workers, vectorize):
    return palsgd.simulate(
        workers=workers, steps=STEPS, model=linear, loss=mse, data=batches,
        method=lambda model: build(model, name), vectorize=vectorize,
    )  # fmt: skip


@every_reading
def test_simulated_workers_follow_the_reading(twin):
    result, want = simulated(twin.__name__, 3, False), expected(twin, 3)
    for k, opt in enumerate(result.optimizers):
        np.testing.assert_allclose(anchor_of(opt).numpy(), want.x, rtol=1e-10, atol=1e-12)
        np.testing.assert_allclose(vector_of(opt.model), want.local[k], rtol=1e-10, atol=1e-12)


@every_reading
def test_stacked_workers_follow_the_reading(twin):
    result = simulated(twin.__name__, 3, True)
    assert result.engine == "vectorized"
    want = expected(twin, 3).x
    np.testing.assert_allclose(vector_of(result.model), want, rtol=1e-9, atol=1e-11)


def process(name):
    model = linear()
    opt = build(model, name)
    train(model, opt, batches(), STEPS)
    return dist.get_rank(), anchor_of(opt).numpy(), vector_of(model)


@every_reading
def test_two_processes_follow_the_reading(world, twin):
    want = expected(twin, 2)
    for k, anchor, local in world.run(process, workers=2, name=twin.__name__):
        np.testing.assert_allclose(anchor, want.x, rtol=1e-10, atol=1e-12)
        np.testing.assert_allclose(local, want.local[k], rtol=1e-10, atol=1e-12)

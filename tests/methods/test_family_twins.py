"""Every method of the family against an independent NumPy twin, in every engine."""

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.optim.lr_scheduler import LambdaLR

import palsgd
from palsgd import registry
from palsgd.methods.palsgd import PALSGDMethod
from support.core_access import anchor_of, method_states
from support.family import twin
from support.problems import batches, linear, mse, regression_gradient, regression_start, train
from support.problems import vector as vector_of
from support.reference import adamw, sgd

H, STEPS, RATES = 5, 23, (0.05, 0.03)  # a last round cut short; weight and bias
P, ETA, SEED = 0.3, 2.0, 11
SGD = (torch.optim.SGD, {}, sgd())
MOMENTUM = (torch.optim.SGD, {"momentum": 0.9}, sgd(momentum=0.9))
ADAMW = (torch.optim.AdamW, {"weight_decay": 0.1}, adamw(decay=0.1))

# title, the method's settings, the twin's names of them, the inner optimizer
CASES = {
    "FedProx": ("FedProx", {"mu": 0.7}, {"mu": 0.7}, SGD),
    "FedProx, AdamW": ("FedProx", {"mu": 0.7}, {"mu": 0.7}, ADAMW),
    "EASGD": ("EASGD", {}, {}, SGD),
    "EAMSGD": ("EASGD", {"rate": 0.15}, {"rate": 0.15}, MOMENTUM),
    "SCAFFOLD": ("SCAFFOLD", {"lr": 0.8}, {"s": 0.8}, SGD),
    "SlowMo": ("SlowMo", {"momentum": 0.6, "lr": 0.8}, {"b": 0.6, "s": 0.8}, SGD),
    "SlowMo, momentum": ("SlowMo", {"momentum": 0.6}, {"b": 0.6}, MOMENTUM),
    "AnchorDecay": ("AnchorDecay", {"decay": 0.2}, {"decay": 0.2}, MOMENTUM),
    "AnchorDecay, AdamW": ("AnchorDecay", {"decay": 0.2}, {"decay": 0.2}, ADAMW),
}
PARTS = [np.arange(6), np.arange(6, 15)]  # where two fragments of the 15 elements meet


def build(model, case, mixes=False, **options):
    """Two groups, a schedule, and PALSGD's steps without data composed with the method."""
    title, settings, _, (kind, inner_settings, _) = CASES[case]
    row = next(r for r in registry.rows() if r.title == title)
    method = [row.method(**settings)]
    if mixes:
        method.append(PALSGDMethod(mix_prob=P, mix_rate=ETA))
    groups = [{"params": [model.weight], "lr": RATES[0]}, {"params": [model.bias], "lr": RATES[1]}]
    outer = None if row.fixed_outer else row.outer()
    return palsgd.LocalOptimizer(
        model, kind(groups, **inner_settings), method, outer, sync_every=H, seed=SEED,
        draws="independent", scheduler=lambda opt: LambdaLR(opt, lambda t: 0.95**t), **options,
    )  # fmt: skip


def expected(case, workers, mixes=False, parts=None):
    title, _, settings, (_, _, inner) = CASES[case]
    if title == "AnchorDecay":
        settings = settings | {"outer": sgd(momentum=0.5, nesterov=True, fixed_lr=0.7)}
    if mixes:
        plan = lambda k, r: palsgd.round_plan(  # noqa: E731
            seed=SEED, worker=k, round=r, sync_every=H, mix_prob=P, draws="independent"
        )
        settings = settings | {"plan": plan, "p": P, "eta": ETA}
    first = np.repeat(RATES, (12, 3))
    return twin(
        title, regression_start(), regression_gradient, workers=workers, H=H, inner=inner,
        lr=lambda t: first * 0.95**t, parts=parts, **settings,
    ).run(STEPS)  # fmt: skip


def simulated(case, workers, vectorize=False, **options):
    return palsgd.simulate(
        workers=workers, steps=STEPS, model=linear, loss=mse, data=batches,
        method=lambda model: build(model, case, **options), vectorize=vectorize,
    )  # fmt: skip


def check(opts, want, rtol=1e-10):
    """Global model, local models and states."""
    for k, opt in enumerate(opts):
        np.testing.assert_allclose(anchor_of(opt).numpy(), want.x, rtol=rtol, atol=1e-12)
        np.testing.assert_allclose(vector_of(opt.model), want.local[k], rtol=rtol, atol=1e-12)
        states = {name: value.numpy() for name, value in method_states(opt).items()}
        if "control" in states:
            np.testing.assert_allclose(states["control"], want.c_k[k], rtol=1e-8, atol=1e-9)
            np.testing.assert_allclose(states["mean_control"], want.c, rtol=1e-8, atol=1e-9)
        if "velocity" in states:
            np.testing.assert_allclose(states["velocity"], want.u, rtol=1e-8, atol=1e-9)


@pytest.mark.parametrize("workers", [1, 3, 4])
@pytest.mark.parametrize("mixes", [False, True])
@pytest.mark.parametrize("case", CASES)
def test_simulated_workers_follow_the_method_as_it_is_published(case, mixes, workers):
    result = simulated(case, workers, mixes=mixes)
    want = expected(case, workers, mixes)
    check(result.optimizers, want)
    np.testing.assert_allclose(vector_of(result.model), want.x, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("case", CASES)
def test_fragments_follow_the_method_each_at_its_own_syncs(case):
    result = simulated(case, 3, fragments=2)
    check(result.optimizers, expected(case, 3, parts=PARTS))


def process(case, mixes):
    model = linear()
    opt = build(model, case, mixes)
    train(model, opt, batches(), STEPS)
    states = {name: value.numpy() for name, value in method_states(opt).items()}
    return dist.get_rank(), anchor_of(opt).numpy(), vector_of(model), states


@pytest.mark.parametrize("mixes", [False, True])
@pytest.mark.parametrize("case", CASES)
def test_two_processes_follow_the_method_and_equal_the_simulation_bit_for_bit(world, case, mixes):
    want, result = expected(case, 2, mixes), simulated(case, 2, mixes=mixes)
    got = world.run(process, workers=2, case=case, mixes=mixes)
    for (k, anchor, local, states), opt in zip(got, result.optimizers, strict=True):
        np.testing.assert_allclose(anchor, want.x, rtol=1e-10, atol=1e-12)
        np.testing.assert_allclose(local, want.local[k], rtol=1e-10, atol=1e-12)
        np.testing.assert_array_equal(anchor, anchor_of(opt).numpy())
        for name, value in method_states(opt).items():
            np.testing.assert_array_equal(states[name], value.numpy())


@pytest.mark.parametrize("workers", [1, 3])
@pytest.mark.parametrize("mixes", [False, True])
@pytest.mark.parametrize("case", CASES)
def test_stacked_workers_follow_the_method(case, mixes, workers):
    result = simulated(case, workers, vectorize=True, mixes=mixes)
    want = expected(case, workers, mixes)
    assert result.engine == "vectorized"
    np.testing.assert_allclose(vector_of(result.model), want.x, rtol=1e-9, atol=1e-11)

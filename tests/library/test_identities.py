"""DDP, Local SGD and DiLoCo are special cases of one code path."""

from functools import partial
from math import inf

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import palsgd
from support.problems import batches, global_vector, linear, mse, net, train, vector
from support.stepping import LR, RULES, build, flat, mean_of, plan_of, sgd, take_step


def ddp_job(steps, wrapped, make_inner):
    data = batches(dtype=torch.float32) * (steps // 5)
    ours = net()
    ours = DistributedDataParallel(ours) if wrapped else ours
    opt = palsgd.DDP(ours, make_inner(ours.parameters()))
    train(ours, opt, data, steps)
    twin = DistributedDataParallel(net())
    bare = make_inner(twin.parameters())
    for batch in data:
        bare.zero_grad()
        mse(twin, batch).backward()
        bare.step()
    return vector(ours), vector(twin), opt.clock, opt.rounds


@pytest.mark.parametrize("wrapped", [True, False])
@pytest.mark.parametrize(
    "make_inner",
    [partial(torch.optim.SGD, lr=LR, momentum=0.9), partial(torch.optim.AdamW, lr=0.01)],
    ids=["momentum", "adamw"],
)
def test_ddp_is_torch_ddp_with_the_inner_optimizer_over_20_steps(world, wrapped, make_inner):
    found = world.run(ddp_job, workers=2, steps=20, wrapped=wrapped, make_inner=make_inner)
    for ours, twin, clock, rounds in found:
        np.testing.assert_array_equal(ours, twin)
        assert (clock, rounds) == (20, 0)


def local_sgd_job(rounds, every):
    """A round of Local SGD by hand: each worker trains alone, then models are averaged."""
    ours, twin, data = linear(), linear(), batches()
    opt = palsgd.LocalSGD(ours, sgd(ours, momentum=0.9), sync_every=every)
    bare = sgd(twin, momentum=0.9)
    for step in range(rounds * every):
        batch = data[step % len(data)]
        take_step(ours, opt, batch)
        bare.zero_grad()
        mse(twin, batch).backward()
        bare.step()
        if (step + 1) % every == 0:
            nn.utils.vector_to_parameters(mean_of(flat(twin)), twin.parameters())
    return vector(ours), vector(twin)


@pytest.mark.parametrize("workers", [1, 2, 3, 4])
def test_local_sgd_is_the_mean_of_independently_trained_models(world, workers):
    for ours, twin in world.run(local_sgd_job, workers=workers, rounds=4, every=3):
        np.testing.assert_allclose(ours, twin, rtol=1e-12, atol=1e-14)


def identity_job(make_one, make_other, steps):
    ends = []
    for make in (make_one, make_other):
        model = net()
        opt = make(model, torch.optim.AdamW(model.parameters(), lr=0.01))
        train(model, opt, batches(dtype=torch.float32), steps)
        ends.append((global_vector(model, opt), opt.clock, opt.gradient_steps, opt.rounds))
    return ends


def plain_sgd(params):
    return torch.optim.SGD(params, lr=1.0)


IDENTITIES = {
    "diloco is palsgd without mixing": (
        partial(palsgd.DiLoCo, sync_every=4, warmup_steps=3),
        partial(
            palsgd.PALSGD, sync_every=4, warmup_steps=3, mix_prob=0.0, mix_rate=3.0, seed=9,
            draws="independent",
        ),
    ),
    "local sgd is diloco with outer sgd of rate 1": (
        partial(palsgd.LocalSGD, sync_every=4, warmup_steps=3),
        partial(palsgd.DiLoCo, sync_every=4, warmup_steps=3, outer=plain_sgd),
    ),
    "ddp is a warm-up that never ends": (
        palsgd.DDP,
        partial(palsgd.PALSGD, sync_every=4, mix_prob=0.2, mix_rate=1.0, warmup_steps=inf),
    ),
}  # fmt: skip


@pytest.mark.parametrize("identity", IDENTITIES)
def test_methods_are_special_cases_of_one_another_bit_for_bit(world, identity):
    one, other = IDENTITIES[identity]
    for first, second in world.run(
        identity_job, workers=2, make_one=one, make_other=other, steps=21
    ):
        np.testing.assert_array_equal(first[0], second[0])
        assert first[1:] == second[1:]


def inert_mixing_job(steps, **rules):
    """Mixing steps of weight 0 only pass time: fewer gradient steps, each at lr / (1 - p)."""
    ours, opt = build(mix_rate=0.0, outer=plain_sgd, draws="independent", **rules)
    train(ours, opt, batches(), steps)
    twin, data, used = linear(), batches(), 0
    bare = sgd(twin, lr=LR / (1 - 0.3), momentum=0.9)
    for round in range(steps // 6):
        drawn = RULES | {"draws": "independent"}
        for _ in range(plan_of(drawn, round, worker=dist.get_rank()).count(False)):
            bare.zero_grad()
            mse(twin, data[used % len(data)]).backward()
            bare.step()
            used += 1
        nn.utils.vector_to_parameters(mean_of(flat(twin)), twin.parameters())
    assert opt.gradient_steps == used
    return vector(ours), vector(twin), used


def test_palsgd_with_mix_rate_zero_is_local_sgd_with_fewer_gradients_at_a_higher_rate(world):
    found = world.run(inert_mixing_job, workers=2, steps=30)
    for ours, twin, _ in found:
        np.testing.assert_allclose(ours, twin, rtol=1e-12, atol=1e-14)
    assert found[0][2] != found[1][2]

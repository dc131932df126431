"""The warm-up is plain DDP, and it ends."""

import copy
from functools import partial

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import palsgd
from support.problems import batches, global_vector, linear, mse, net, train, vector
from support.stepping import build, mean_of, sgd, take_step


def bare_ddp(model, data, **wrap):
    """The trusted twin: torch's DDP and the inner optimizer, nothing of ours."""
    model = DistributedDataParallel(model, **wrap)
    inner = sgd(model, momentum=0.9)
    for batch in data:
        inner.zero_grad()
        mse(model, batch).backward()
        inner.step()
    return vector(model)


def warmup_job(steps, **rules):
    data, found = batches() * 4, {}
    for name, wrap in (("wrapped", DistributedDataParallel), ("plain", lambda m: m)):
        model = wrap(net(dtype=torch.float64))
        model, opt = build(model, warmup_steps=steps, **rules)
        for batch in data[:steps]:
            take_step(model, opt, batch)
        assert opt.gradient_steps == opt.ledger.warmup_steps == steps
        found[name] = vector(model)
        for batch in palsgd.until(data[steps:], opt, steps=steps + 18):
            take_step(model, opt, batch)
        found[name + " afterwards"] = global_vector(model, opt)
    found["torch"] = bare_ddp(net(dtype=torch.float64), data[:steps])
    return found


@pytest.mark.parametrize("bucket_mb", [128, 1e-4])
@pytest.mark.parametrize("workers", [2, 3])
def test_warmup_through_ddp_equals_bucketed_averaging_equals_torch_ddp_alone(
    world, workers, bucket_mb
):
    """Bit for bit at K = 2, where halving is exact; torch divides before it adds, we after."""
    same = (
        np.testing.assert_array_equal
        if workers == 2
        else partial(np.testing.assert_allclose, rtol=1e-11, atol=1e-13)
    )
    for found in world.run(warmup_job, workers=workers, steps=7, bucket_mb=bucket_mb):
        same(found["wrapped"], found["torch"])
        same(found["plain"], found["torch"])
        same(found["wrapped afterwards"], found["plain afterwards"])


def local_gradient(model, batch):
    model.zero_grad()
    mse(model, batch).backward()
    return torch.cat([p.grad.reshape(-1).clone() for p in model.parameters()])


def switch_job(warmup):
    """Is the gradient that backward leaves the mean over the workers, or this worker's own?"""
    model = DistributedDataParallel(net(dtype=torch.float64))
    model, opt = build(model, warmup_steps=warmup, mix_prob=0.0)
    kept, found = None, []
    for step, batch in enumerate(batches()):
        found.append(whose_gradient(model, batch))
        if step == 1:
            kept = copy.deepcopy(opt.state_dict())
        opt.step()
    opt.load_state_dict(kept)
    found.append(whose_gradient(model, batches()[0]))
    return found


def whose_gradient(model, batch):
    twin = net(dtype=torch.float64)
    twin.load_state_dict(model.module.state_dict())
    own, got = local_gradient(twin, batch), local_gradient(model, batch)
    mean = mean_of(own)
    if torch.equal(got, own):
        return "own"
    return "mean" if torch.allclose(got, mean, rtol=1e-12) else "neither"


def test_gradient_sync_is_off_after_the_warmup_and_on_again_when_its_state_is_loaded(world):
    for found in world.run(switch_job, workers=2, warmup=2):
        assert found == ["mean", "mean", "own", "own", "own", "mean"]


def broadcast_job(warmup, steps):
    """BatchNorm statistics beside those of a model that never hears of another worker."""
    model = DistributedDataParallel(net(dtype=torch.float64))
    model, opt = build(model, warmup_steps=warmup, mix_prob=0.0, sync_every=50)
    for batch in batches()[:warmup]:
        take_step(model, opt, batch)
    twin = net(dtype=torch.float64)
    twin.load_state_dict(model.module.state_dict())
    for batch in batches()[:steps]:
        mse(twin, batch)  # forward alone; the weights are set by hand
        take_step(model, opt, batch)
        twin_norm, norm = twin[1], model.module[1]
        assert torch.equal(twin_norm.running_mean, norm.running_mean)
        assert torch.equal(twin_norm.running_var, norm.running_var)
        with torch.no_grad():
            for mine, theirs in zip(twin.parameters(), model.parameters(), strict=True):
                mine.copy_(theirs)
    return norm.running_mean.numpy()


@pytest.mark.parametrize("warmup", [0, 2])
def test_no_buffer_is_broadcast_after_the_warmup(world, warmup):
    means = world.run(broadcast_job, workers=2, warmup=warmup, steps=3)
    assert (means[0] != means[1]).all()


class Branches(nn.Module):
    """`one` is used by worker 0 only, `none` by nobody."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.trunk, self.one, self.none = nn.Linear(4, 3), nn.Linear(4, 3), nn.Linear(4, 3)

    def forward(self, x):
        return self.trunk(x) + self.one(x) if dist.get_rank() == 0 else self.trunk(x)


def unused_job(steps, bucket_mb):
    decay = dict(lr=0.01, weight_decay=0.1)  # decays what has a gradient, were it zero
    ours, twin = (
        Branches().double(),
        DistributedDataParallel(Branches().double(), find_unused_parameters=True),
    )
    opt = palsgd.DDP(ours, torch.optim.AdamW(ours.parameters(), **decay), bucket_mb=bucket_mb)
    bare = torch.optim.AdamW(twin.parameters(), **decay)
    for batch in batches() * (steps // 5):
        take_step(ours, opt, batch)
        bare.zero_grad()
        mse(twin, batch).backward()
        bare.step()
    assert ours.none.weight.grad is None
    assert ours.one.weight.grad is not None
    return vector(ours), vector(twin), vector(ours.none)


@pytest.mark.parametrize("bucket_mb", [128, 1e-4])
def test_parameters_unused_on_one_rank_or_on_all_are_treated_as_torch_ddp_does(world, bucket_mb):
    found = world.run(unused_job, workers=2, steps=10, bucket_mb=bucket_mb)
    for ours, twin, _ in found:
        np.testing.assert_array_equal(ours, twin)
    np.testing.assert_array_equal(found[0][0], found[1][0])
    np.testing.assert_array_equal(found[0][2], vector(Branches().double().none))


def compiled_job():
    """Gradients of a compiled, wrapped model before and after the warm-up."""
    torch.manual_seed(0)
    model = torch.compile(DistributedDataParallel(linear()), backend="eager")
    opt = palsgd.DiLoCo(model, sgd(model), sync_every=50, warmup_steps=2)
    grads = []
    for batch in palsgd.until(batches(), opt, steps=5):
        mse(model, batch).backward()
        grads.append(torch.cat([p.grad.reshape(-1) for p in model.parameters()]).clone().numpy())
        opt.step()
        opt.zero_grad()
    return grads


def test_a_compiled_wrapped_model_stops_averaging_after_the_warmup(world):
    first, second = world.run(compiled_job, workers=2)
    np.testing.assert_array_equal(first[0], second[0])
    np.testing.assert_array_equal(first[1], second[1])
    assert not np.allclose(first[2], second[2])


def partly_wrapped_job():
    model = nn.Sequential(DistributedDataParallel(linear()), nn.Linear(3, 3).double())
    return palsgd.DiLoCo(model, sgd(model), sync_every=5)


def test_a_model_wrapped_in_part_is_refused(world):
    for got in world.outcomes(partly_wrapped_job, workers=2):
        assert got.error == "ValueError"
        assert "wrap the whole model" in got.message


def unequal_start_job(steps):
    torch.manual_seed(dist.get_rank())
    model = nn.Linear(4, 3).double()
    train(model, palsgd.DDP(model, sgd(model)), batches(), steps)


def test_plain_ddp_workers_that_start_apart_are_told_at_the_first_step(world):
    for got in world.outcomes(unequal_start_job, workers=2, steps=5):
        assert got.error == "ConsensusError"
        assert "the first step (clock 0)" in got.message

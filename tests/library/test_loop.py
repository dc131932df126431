"""The training loop around the optimizer: its end, AMP, clipping."""

import math

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import palsgd
from support.problems import batches, global_vector, linear, mse, train, vector
from support.stepping import build, sgd, take_step

# -- the end of training ---------------------------------------------------------------------------


def unequal_job(lengths, steps, **rules):
    model, opt = build(**rules)
    data = batches()[: lengths[dist.get_rank()]]
    train(model, opt, data, steps)
    return global_vector(model, opt), opt.clock, opt.gradient_steps, opt.rounds


@pytest.mark.parametrize("steps", [60, 62])
def test_unequal_loaders_and_gradient_counts_end_on_the_same_clock(world, steps):
    got = world.run(unequal_job, workers=3, lengths=[1, 3, 5], steps=steps, draws="independent")
    assert {clock for _, clock, _, _ in got} == {steps}
    assert {rounds for *_, rounds in got} == {math.ceil(steps / 6)}
    assert len({gradients for _, _, gradients, _ in got}) > 1
    for other in got[1:]:
        np.testing.assert_array_equal(got[0][0], other[0])


class Epochs:
    """A loader that shuffles by an epoch it must be told."""

    def __init__(self, data, attribute):
        self.data, self.told, self.passes = data, [], 0
        setattr(self, attribute, self)

    def set_epoch(self, epoch):
        self.told.append(epoch)

    def __iter__(self):
        self.passes += 1
        return iter(self.data)


@pytest.mark.parametrize("attribute", ["sampler", "batch_sampler"])
@pytest.mark.usefixtures("alone")
def test_until_goes_over_the_loader_again_and_tells_its_sampler_the_epoch(attribute):
    model, opt = build(mix_prob=0.0)
    loader = Epochs(batches()[:4], attribute)
    train(model, opt, loader, 14)
    assert loader.told == [0, 1, 2, 3]
    assert loader.passes == 4
    assert opt.gradient_steps == 14


@pytest.mark.usefixtures("alone")
def test_until_feeds_a_distributed_sampler_of_torch():
    data = torch.utils.data.TensorDataset(*batches()[0])
    sampler = torch.utils.data.DistributedSampler(data, 1, 0, seed=4)
    loader = torch.utils.data.DataLoader(data, batch_size=3, sampler=sampler)
    model, opt = build(mix_prob=0.0)
    train(model, opt, loader, 6)
    assert sampler.epoch == 2


@pytest.mark.usefixtures("alone")
def test_steps_that_cut_a_round_short_end_with_one_shorter_round():
    model, opt = build(warmup_steps=4)
    train(model, opt, batches(), 4 + 6 * 3 + 2)
    assert opt.clock == 24
    assert opt.synced
    assert [entry["steps"] for entry in opt.ledger.history] == [6, 6, 6, 2]
    assert [entry["clock"] for entry in opt.ledger.history] == [10, 16, 22, 24]


@pytest.mark.usefixtures("alone")
def test_until_stops_at_once_when_the_clock_is_there():
    model, opt = build()
    train(model, opt, batches(), 12)
    assert list(palsgd.until(batches(), opt, steps=12)) == []
    assert list(palsgd.until([], opt, steps=0)) == []


@pytest.mark.usefixtures("alone")
def test_a_loader_that_runs_dry_is_named_with_the_clock():
    model, opt = build(mix_prob=0.0)
    with pytest.raises(ValueError, match=r"ran dry at clock 5 of 20 .*can be iterated again"):
        train(model, opt, iter(batches()), 20)
    model, opt = build()
    with pytest.raises(ValueError, match="ran dry at clock 0 of 20"):
        train(model, opt, [], 20)


@pytest.mark.parametrize("steps", [-1, 2.5, None])
@pytest.mark.usefixtures("alone")
def test_until_refuses_steps_that_are_not_a_whole_number(steps):
    _, opt = build()
    with pytest.raises(ValueError, match=f"steps={steps!r}"):
        next(palsgd.until(batches(), opt, steps=steps))


# -- AMP -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("warmup", [0, 100])
@pytest.mark.usefixtures("alone")
def test_a_step_that_the_grad_scaler_skips_leaves_clock_and_model_untouched(warmup):
    model, opt = build(linear(torch.float32), warmup_steps=warmup)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=1000)
    for i, batch in enumerate(batches(dtype=torch.float32)):
        opt.zero_grad()
        scaler.scale(mse(model, batch) * (math.inf if i in (0, 3) else 1)).backward()
        before, clock = vector(model), opt.clock
        scaler.step(opt)
        scaler.update()
        if i in (0, 3):
            assert opt.clock == clock
            np.testing.assert_array_equal(vector(model), before)
        else:
            assert opt.clock > clock
            assert (vector(model) != before).any()
    assert opt.gradient_steps == 3
    assert scaler.get_scale() == 2.0


@pytest.mark.usefixtures("alone")
def test_scaled_training_equals_unscaled_training():
    ends = []
    for enabled in (True, False):
        model, opt = build(linear(torch.float32))
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, enabled=enabled)
        for batch in palsgd.until(batches(dtype=torch.float32), opt, steps=18):
            opt.zero_grad()
            scaler.scale(mse(model, batch)).backward()
            scaler.step(opt)
            scaler.update()
        ends.append(vector(model))
    np.testing.assert_array_equal(*ends)  # a power of two costs no bits


# -- clipping --------------------------------------------------------------------------------------


def clipped_job(steps, max_norm):
    ours, twin = linear(), DistributedDataParallel(linear())
    opt = palsgd.DDP(ours, sgd(ours, momentum=0.9), max_norm=max_norm)
    bare = sgd(twin, momentum=0.9)
    clipped = 0
    for batch in batches() * (steps // 5):
        take_step(ours, opt, batch)
        bare.zero_grad()
        mse(twin, batch).backward()
        clipped += int(nn.utils.clip_grad_norm_(twin.parameters(), max_norm) > max_norm)
        bare.step()
    return vector(ours), vector(twin), clipped


@pytest.mark.parametrize("workers", [2, 3])
def test_max_norm_clips_the_averaged_gradient_as_torch_ddp_and_clip_grad_norm_do(world, workers):
    for ours, twin, clipped in world.run(clipped_job, workers=workers, steps=10, max_norm=0.5):
        np.testing.assert_allclose(ours, twin, rtol=1e-12)
        assert clipped >= 3


@pytest.mark.usefixtures("alone")
def test_max_norm_clips_the_local_gradient_in_the_local_phase():
    model, opt = build(mix_prob=0.0, sync_every=100, max_norm=0.5)
    twin = linear()
    bare = sgd(twin, momentum=0.9)
    for batch in batches():
        take_step(model, opt, batch)
        bare.zero_grad()
        mse(twin, batch).backward()
        nn.utils.clip_grad_norm_(twin.parameters(), 0.5)
        bare.step()
    np.testing.assert_array_equal(vector(model), vector(twin))

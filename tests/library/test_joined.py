"""Several inner optimizers as one."""

import copy

import pytest
import torch
import torch.distributed as dist
from torch import nn

import palsgd
from palsgd.joined import Joined
from support.problems import batches, mse, vector

RULES = dict(sync_every=4, mix_prob=0.3, mix_rate=1.0, outer=palsgd.nesterov(lr=0.5))


def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3))


def pair(model):
    """Muon for the matrices, AdamW for the rest."""
    matrices = [p for p in model.parameters() if p.dim() == 2]
    vectors = [p for p in model.parameters() if p.dim() != 2]
    return [torch.optim.Muon(matrices, lr=0.02), torch.optim.AdamW(vectors, lr=0.01)]


def train(model, opt, steps, data):
    for batch in palsgd.until(data, opt, steps=steps):
        mse(model, batch).backward()
        opt.step()
        opt.zero_grad()


def test_a_long_round_without_mixing_equals_both_optimizers_stepped_by_hand(alone):
    ours, theirs = network(), network()
    opt = palsgd.DiLoCo(ours, pair(ours), sync_every=1000)
    bare = pair(theirs)
    for batch in batches(0, torch.float32):
        for model in (ours, theirs):
            mse(model, batch).backward()
        opt.step()
        for part in bare:
            part.step()
            part.zero_grad()
        opt.zero_grad()
    assert (vector(ours) == vector(theirs)).all()


def job():
    model = network()
    opt = palsgd.PALSGD(model, pair(model), **RULES)
    train(model, opt, 18, batches(dtype=torch.float32))
    return vector(model), opt.config["inner"]


def test_workers_with_two_inner_optimizers_agree(world):
    (first, name), (second, _) = world.run(job, workers=2)
    assert (first == second).all()
    assert name == "Muon + AdamW"


def resumed_job(at):
    data = batches(dtype=torch.float32) * 5
    model = network()
    opt = palsgd.PALSGD(model, pair(model), **RULES)
    saved = None
    for batch in palsgd.until(data, opt, steps=18):
        mse(model, batch).backward()
        opt.step()
        opt.zero_grad()
        if saved is None and opt.clock >= at:
            saved = copy.deepcopy((model.state_dict(), opt.state_dict()))
    again = network()
    resumed = palsgd.PALSGD(again, pair(again), **RULES)
    again.load_state_dict(saved[0])
    resumed.load_state_dict(saved[1])
    train(again, resumed, 18, data[resumed.gradient_steps :])
    dist.barrier()
    return bool((vector(model) == vector(again)).all())


@pytest.mark.parametrize("at", [3, 6])
def test_two_inner_optimizers_resume_mid_round_bit_for_bit(world, at):
    assert world.run(resumed_job, workers=2, at=at) == [True, True]


def test_the_learning_rate_of_every_part_is_scaled_and_scheduled(alone):
    model = network()
    parts = pair(model)
    opt = palsgd.PALSGD(model, parts, **RULES)
    assert [group["lr"] for group in opt.param_groups] == [0.02, 0.01]
    opt.param_groups[1]["lr"] = 0.005
    assert parts[1].param_groups[0]["lr"] == 0.005


def test_a_list_that_holds_no_optimizers_is_refused():
    with pytest.raises(ValueError, match="inner must be torch optimizers, got Linear"):
        Joined([nn.Linear(1, 1)])
    with pytest.raises(ValueError, match="got none"):
        Joined([])

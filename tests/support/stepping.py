"""Steps taken one at a time, for tests that look at each."""

import torch
import torch.distributed as dist
from torch import nn

import palsgd
from support.problems import linear, mse

LR = 0.05
RULES = dict(sync_every=6, mix_prob=0.3, mix_rate=2.0, seed=11)


def sgd(model, lr=LR, **settings):
    return torch.optim.SGD(model.parameters(), lr=lr, **settings)


def build(model=None, inner=None, **rules):
    model = linear() if model is None else model
    return model, palsgd.PALSGD(model, inner or sgd(model, momentum=0.9), **(RULES | rules))


def plan_of(rules, round, worker=0):
    chosen = {k: rules[k] for k in ("seed", "sync_every", "mix_prob")}
    draws = rules.get("draws", "balanced")
    return palsgd.round_plan(worker=worker, round=round, draws=draws, **chosen)


def take_step(model, opt, batch):
    opt.zero_grad()
    mse(model, batch).backward()
    return opt.step()


def mean_of(tensor):
    """Over all processes, the slow and obvious way."""
    parts = [torch.zeros_like(tensor) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, tensor)
    return torch.stack(parts).mean(dim=0)


def flat(model):
    return nn.utils.parameters_to_vector(model.parameters()).detach().clone()

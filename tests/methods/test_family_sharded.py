"""The methods of the family on sharded models: two replicas of two shards, against two workers."""

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import palsgd
from support.methods import ByDistance, BySteps, FarthestTwice, MomentumToo
from support.problems import batches, mse

pytestmark = pytest.mark.slow

STEPS = 15
SETTINGS = {
    "FedProx": dict(mu=0.3),
    "EASGD": {},
    "SCAFFOLD": {},
    "SlowMo": dict(momentum=0.6),
    "AnchorDecay": dict(decay=0.2),
}
OWN = {m.__name__: m for m in (BySteps, ByDistance, FarthestTwice, MomentumToo)}


def uneven():
    """Seven rows over two ranks; and a parameter of one row, of which one rank has none."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 7), nn.Tanh(), nn.Linear(7, 1), nn.Linear(1, 3)).double()


def build(title, model, **settings):
    momentum = 0.0 if title == "SCAFFOLD" else 0.9
    inner = torch.optim.SGD(model.parameters(), lr=0.05, momentum=momentum)
    given = dict(sync_every=4, warmup_steps=2) | settings
    if title in OWN:
        return palsgd.LocalOptimizer(model, inner, OWN[title](), **given)
    return getattr(palsgd.methods, title)(model, inner, **SETTINGS[title], **given)


def sharded_model():
    """The model, the data of this rank, and the number of its replica."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replica", "shard"))
    replica, half = divmod(dist.get_rank(), 2)
    model, rows = uneven(), slice(3 * half, 3 * half + 3)
    return fully_shard(model, mesh=mesh), [(a[rows], y[rows]) for a, y in batches(replica)]


def vector(model):
    parts = [p.detach() for p in model.parameters()]
    whole = [p.full_tensor() if isinstance(p, DTensor) else p for p in parts]
    return torch.cat([p.reshape(-1) for p in whole]).numpy().copy()


def trained(title, model, opt, data, steps):
    """The local model before every step, and the global one at the end."""
    path = []
    feed = [data[(opt.gradient_steps + i) % len(data)] for i in range(steps)]
    for batch in palsgd.until(feed, opt, steps=steps):
        mse(model, batch).backward()
        path.append(vector(model))
        opt.step()
        opt.zero_grad()
    with opt.anchor_weights():
        return np.array([*path, vector(model)])


def sharded_job(title, **settings):
    model, data = sharded_model()
    return trained(title, model, build(title, model, **settings), data, STEPS)


def unsharded_job(title, **settings):
    model = uneven()
    return trained(title, model, build(title, model, **settings), batches(), STEPS)


@pytest.mark.parametrize("title", [*SETTINGS, *OWN])
def test_a_sharded_replica_is_an_unsharded_worker(world, title):
    got = world.run(sharded_job, workers=4, title=title)
    want = world.run(unsharded_job, workers=2, title=title)
    for rank, path in enumerate(got):
        np.testing.assert_allclose(path, want[rank // 2], rtol=1e-9, atol=1e-12)


def resumed_job(title, folder):
    """Straight on, and from a checkpoint in the middle of a round."""
    model, data = sharded_model()
    opt = build(title, model)
    for batch in data * 2:
        if opt.clock == 9:
            palsgd.checkpoint.save(folder, model, opt)
        mse(model, batch).backward()
        opt.step()
        opt.zero_grad()
    again, _ = sharded_model()
    resumed = build(title, again)
    palsgd.checkpoint.load(folder, again, resumed)
    mse(again, (data * 2)[9]).backward()
    resumed.step()
    resumed.zero_grad()
    return [trained(title, *each, data, STEPS) for each in ((model, opt), (again, resumed))]


@pytest.mark.parametrize("title", ["SCAFFOLD", "EASGD", "SlowMo"])
def test_a_sharded_method_with_states_of_its_own_goes_on_from_a_checkpoint(world, title, tmp_path):
    for straight, resumed in world.run(
        resumed_job, workers=4, title=title, folder=str(tmp_path), timeout=30
    ):
        np.testing.assert_array_equal(straight, resumed)

"""A small run that saves and loads, for tests of checkpoints."""

import math
import warnings

import numpy as np
import torch

import palsgd

H = 4


def build(transport, seed=0, **rules):
    torch.manual_seed(seed)
    model = torch.nn.Sequential(torch.nn.Linear(4, 5), torch.nn.BatchNorm1d(5))
    inner = torch.optim.AdamW(model.parameters(), lr=0.01)
    settings = dict(sync_every=H, outer=palsgd.nesterov(0.5, 0.6)) | rules
    return model, palsgd.DiLoCo(model, inner, transport=transport, **settings)


def advance(model, opt, clock):
    """Train up to this clock, with gradients that are made by hand, each worker's own."""
    worker = opt.transport.worker
    while opt.clock < clock:
        for i, p in enumerate(model.parameters()):
            p.grad = 0.1 * p.detach() + 0.01 * math.sin(1 + worker + 3 * i + opt.gradient_steps)
        with torch.no_grad():
            model[1].running_mean += 0.01 * (1 + worker)
        opt.step()


def contents(model, opt):
    """All that goes on: weights and buffers, the optimizer's tensors, its clock."""
    found = {f"model {name}": tensor.clone() for name, tensor in model.state_dict().items()}
    for number, entry in opt.state_dict()["state"].items():
        for name, value in {**entry, **entry["palsgd"]}.items():
            if isinstance(value, torch.Tensor) and name != "scalars":
                found[f"{number} {name}"] = value
    return {name: tensor.double().numpy() for name, tensor in found.items()} | {
        "clock": np.array([opt.clock, opt.gradient_steps, opt.rounds])
    }


def same(got, want):
    assert got.keys() == want.keys()
    for name in want:
        np.testing.assert_array_equal(got[name], want[name], err_msg=name)


def place(folder, worker, disks):
    """The folder of a worker: one for all, or each its own."""
    return f"{folder}/disk-{worker}" if disks == "own" else f"{folder}/disk"


def loaded_quietly(*args, **kwargs):
    """What was loaded, and the warnings."""
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        found = palsgd.checkpoint.load(*args, **kwargs)
    return found, [str(each.message) for each in said]


def load_fresh(transport, folder, disks, **options):
    model, opt = build(transport, seed=9)
    loaded, said = loaded_quietly(place(folder, transport.worker, disks), model, opt, **options)
    return loaded, contents(model, opt), said

"""What an optimizer holds is freed when the last reference to it is gone, without the garbage
collector: on a GPU a cycle would keep one to two models of memory until the next collection."""

import gc
import time
import weakref

import pytest
import torch
from torch.optim.lr_scheduler import LambdaLR

import palsgd
from support.core_access import held_tensors
from support.problems import batches, linear, mse

SETTINGS = {
    "plain": {},
    "delay": {"delay": 2},
    "fragments": {"fragments": 2},
    "compress": {"compress": "int8"},
    "scheduler": {"scheduler": lambda opt: LambdaLR(opt, lambda step: 1.0)},
    "listeners": {},
    "warm-up": {"warmup_steps": 3},
    "max_norm": {"max_norm": 1.0},
    "auto": {"sync_every": "auto"},
    "offload": {"offload": True},
    "all": {"offload": True, "fragments": 2, "delay": 1, "compress": "int8"},
}


def trained(kind, setting):
    """The weak references to all that a short run leaves."""
    model = linear()
    inner = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    settings = {"sync_every": 4} | SETTINGS[setting]
    if kind == "PALSGD":
        settings |= {"mix_prob": 0.3, "mix_rate": 0.5}
    opt = getattr(palsgd, kind)(model, inner, **settings)
    if setting == "listeners":
        opt.on(palsgd.events.Synced, lambda event: None)
    for batch in palsgd.until(batches(), opt, steps=10):
        mse(model, batch).backward()
        opt.step()
        opt.zero_grad()
    with opt.anchor_weights():
        pass
    opt.load_state_dict(opt.state_dict())
    return [weakref.ref(each) for each in (opt, model, *held_tensors(opt))]


def left_job(kind, setting):
    gc.collect()
    gc.disable()
    try:
        held = trained(kind, setting)
        for _ in range(200):  # gloo's thread lets go of the last message some moments later
            if all(each() is None for each in held):
                break
            time.sleep(0.01)
        return [repr(each())[:80] for each in held if each() is not None]
    finally:
        gc.enable()


@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("kind", ["LocalSGD", "DiLoCo", "PALSGD"])
def test_no_cycle_keeps_an_optimizer_alive(world, kind, setting):
    assert world.run(left_job, workers=2, kind=kind, setting=setting) == [[], []]

"""Slots that no method of the library uses have a small method each. In two real processes it
trains to the bits of the exact engine, also when it is resumed in the middle of a round."""

import io

import numpy as np
import pytest
import torch

import palsgd
from support.methods import METHODS
from support.problems import batches, linear, mse, vector

H, STEPS = 4, 18
WORKERS = 2


def build(model, name):
    inner = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    return palsgd.LocalOptimizer(model, inner, METHODS[name](WORKERS), sync_every=H)


def through_a_file(model, opt, name):
    """The same training in fresh objects, from what was written."""
    file = io.BytesIO()
    torch.save({"model": model.state_dict(), "opt": opt.state_dict()}, file)
    file.seek(0)
    state = torch.load(file, weights_only=True)
    fresh = linear()
    fresh.load_state_dict(state["model"])
    other = build(fresh, name)
    other.load_state_dict(state["opt"])
    return fresh, other


def job(name, resume_at=None):
    model = linear()
    opt = build(model, name)
    data = batches()
    opt.run_until(STEPS)
    while opt.clock < STEPS:
        mse(model, data[opt.gradient_steps % len(data)]).backward()
        opt.step()
        opt.zero_grad()
        if opt.clock == resume_at:
            model, opt = through_a_file(model, opt, name)
            opt.run_until(STEPS)
    local = vector(model)
    with opt.anchor_weights():
        shown = vector(model)
    return local, shown, opt.ledger.bytes_sent, opt.rounds


@pytest.mark.parametrize("name", METHODS)
def test_a_slot_does_in_processes_what_it_does_in_simulation(world, name):
    real = world.run(job, workers=WORKERS, name=name)
    result = palsgd.simulate(
        workers=WORKERS, steps=STEPS, model=linear, loss=mse, data=batches, vectorize=False,
        method=lambda model: build(model, name),
    )  # fmt: skip
    for (local, shown, sent, rounds), opt in zip(real, result.optimizers, strict=True):
        np.testing.assert_array_equal(local, vector(opt.model))
        np.testing.assert_allclose(shown, vector(result.model), rtol=1e-15, atol=1e-15)
        assert rounds == opt.rounds
        assert sent >= opt.ledger.bytes_sent  # showing the global model may cost a message


@pytest.mark.parametrize("name", METHODS)
def test_a_method_of_such_a_slot_is_resumed_in_the_middle_of_a_round_bit_for_bit(world, name):
    whole = world.run(job, workers=WORKERS, name=name)
    resumed = world.run(job, workers=WORKERS, name=name, resume_at=6)
    for one, other in zip(whole, resumed, strict=True):
        np.testing.assert_array_equal(one[0], other[0])
        np.testing.assert_array_equal(one[1], other[1])
        assert one[2:] == other[2:]

"""Training that stops and goes on: by another end, beyond the end, or from an earlier state."""

import copy

import pytest
import torch

import palsgd
from support.core_access import fields_of, method_states
from support.problems import batches, linear, train
from support.stepping import take_step

H, DELAY, P = 8, 4, 0.6


def palsgd_alone(**settings):
    model = linear()
    given = dict(sync_every=H, mix_prob=P, mix_rate=2.0, transport=palsgd.Alone()) | settings
    return model, palsgd.PALSGD(model, torch.optim.SGD(model.parameters(), lr=0.1), **given)


def clocks_of_gradients(ends, **settings):
    """The clock at which each gradient is computed."""
    model, opt = palsgd_alone(**settings)
    found = []
    for end in ends:
        for batch in palsgd.until(batches(0), opt, steps=end):
            found.append(opt.clock)
            take_step(model, opt, batch)
    return found


@pytest.mark.parametrize("seed", [5, 7, 10, 11])
def test_after_an_end_with_a_delay_gradients_are_computed_where_the_plan_has_them(seed):
    rules = dict(seed=seed, worker=0, sync_every=H, mix_prob=P, draws="balanced")
    plans = [palsgd.round_plan(round=r, stops=(DELAY,), **rules) for r in range(3)]
    mixing = [step for plan in plans for step in plan]
    taken = clocks_of_gradients([H, 3 * H], seed=seed, delay=DELAY)
    assert taken == [clock for clock, without_data in enumerate(mixing) if not without_data]


@pytest.mark.parametrize("seed", range(3))
def test_a_step_beyond_the_end_of_the_warm_up_pulls_to_the_global_model(seed):
    """The plain loop, which knows no end, is the reference."""
    models = []
    for ended in (True, False):
        model, opt = palsgd_alone(seed=seed, warmup_steps=3)
        data = batches(0)
        if ended:
            train(model, opt, data, 3)
        else:
            for batch in data[:3]:
                take_step(model, opt, batch)
        for batch in data[3:]:
            take_step(model, opt, batch)
        models.append((opt.clock, model.state_dict()))
    assert models[0][0] == models[1][0] > 5
    torch.testing.assert_close(models[0][1], models[1][1])


def test_training_from_a_state_leaves_the_state_as_it_is():
    model, opt = palsgd_alone()
    train(model, opt, batches(0), 5)
    state = copy.deepcopy(opt.state_dict())
    before = copy.deepcopy(fields_of(opt, state)["progress"])
    model, opt = palsgd_alone()
    opt.load_state_dict(state)
    train(model, opt, batches(0), 30)
    assert fields_of(opt, state)["progress"] == before


def test_a_state_of_the_warm_up_takes_back_what_a_method_has_kept_since():
    model = linear()
    inner = torch.optim.SGD(model.parameters(), lr=0.1)
    opt = palsgd.methods.SlowMo(
        model, inner, sync_every=2, warmup_steps=2, transport=palsgd.Alone()
    )
    early = copy.deepcopy(opt.state_dict())
    train(model, opt, batches(0), 8)
    assert method_states(opt)["velocity"].abs().max() > 0
    opt.load_state_dict(early)
    assert method_states(opt)["velocity"].abs().max() == 0

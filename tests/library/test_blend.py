"""blend=b: at a sync a local model keeps the share b of itself, x_k <- b x_k + (1 - b) x."""

import copy
from itertools import pairwise

import numpy as np
import pytest
import torch

import palsgd
from support import reference
from support.core_access import anchor_views
from support.engines import check
from support.problems import (
    batches,
    global_vector,
    linear,
    mse,
    regression_gradient,
    regression_start,
    trained,
    vector,
)
from support.stepping import sgd, take_step

RULES = dict(sync_every=6, mix_prob=0.3, mix_rate=2.0, seed=11)
LR, STEPS = 0.05, 27  # four rounds and half of one
CASES = [(0.5, 0, 1), (0.0, 3, 1), (0.5, 3, 1), (1.0, 0, 1), (0.25, 0, 3), (0.25, 2, 3)]


def build(model, **rules):
    outer = palsgd.nesterov(lr=0.7, momentum=0.5)
    return palsgd.PALSGD(model, sgd(model, LR, momentum=0.9), outer=outer, **RULES | rules)


def worker_job(**rules):
    model, opt = trained(build, STEPS, **rules)
    return vector(model), global_vector(model, opt)


def by_hand(blend, delay, fragments):
    bounds = [15 * i // fragments // 2 * 2 for i in range(fragments)] + [15]
    H = RULES["sync_every"]
    stops = palsgd_stops(H, delay, fragments)
    return reference.lagged(
        regression_start(), regression_gradient, workers=2, steps=STEPS, H=H,
        p=RULES["mix_prob"], eta=RULES["mix_rate"], lr=lambda t: LR,
        inner=reference.sgd(momentum=0.9),
        outer=reference.sgd(momentum=0.5, nesterov=True, fixed_lr=0.7),
        plan=lambda k, r: palsgd.round_plan(
            worker=k, round=r, stops=stops, seed=11, sync_every=H, mix_prob=0.3, draws="balanced"
        ),
        delay=delay, parts=[slice(a, b) for a, b in pairwise(bounds)], blend=blend,
    )  # fmt: skip


def palsgd_stops(H, delay, fragments):
    """Steps inside a round after which something is sent or applied."""
    sent = {(f + 1) * H // fragments for f in range(fragments)}
    return sorted({(t + d) % H for t in sent for d in (0, delay)} - {0})


@pytest.mark.parametrize(("blend", "delay", "fragments"), CASES)
def test_processes_blend_as_the_reference_does(world, blend, delay, fragments):
    got = world.run(worker_job, workers=2, blend=blend, delay=delay, fragments=fragments)
    expected = by_hand(blend, delay, fragments)
    for local, anchor in got:
        np.testing.assert_allclose(anchor, expected, rtol=0, atol=1e-12)
        assert np.array_equal(local, anchor) == (blend == 0)


@pytest.mark.parametrize(("blend", "delay", "fragments"), CASES)
def test_both_engines_of_the_simulator_blend_as_processes_do(world, blend, delay, fragments):
    rules = dict(blend=blend, delay=delay, fragments=fragments)
    got = world.run(worker_job, workers=2, **rules)
    exact, fast = (
        palsgd.simulate(
            workers=2, steps=STEPS, model=linear, loss=mse, data=lambda k: iter(batches(k) * 9),
            method=lambda m: build(m, **rules), vectorize=vectorize,
        )
        for vectorize in (False, True)
    )  # fmt: skip
    np.testing.assert_array_equal(vector(exact.model), got[0][1])
    check(fast, exact)


def ends(kind=palsgd.DiLoCo, dtype=torch.float64, **rules):
    model = linear(dtype)
    opt = kind(model, sgd(model, momentum=0.9), sync_every=3, transport=palsgd.Alone(), **rules)
    for batch in batches(0, dtype) * 2:
        take_step(model, opt, batch)
    return vector(model)


def test_a_blend_of_nothing_is_the_plain_sync_bit_for_bit():
    np.testing.assert_array_equal(ends(blend=0.0), ends())


def test_a_model_of_low_precision_is_blended_in_the_precision_of_the_anchor():
    model = linear(torch.bfloat16)
    rules = dict(sync_every=1, blend=0.5, outer=palsgd.nesterov(lr=0.7, momentum=0.5))
    opt = palsgd.DiLoCo(model, sgd(model), transport=palsgd.Alone(), **rules)
    seen = []
    opt.inner.register_step_post_hook(lambda *_: seen.append(vector(model)))
    take_step(model, opt, batches(0, torch.bfloat16)[0])
    anchor = np.concatenate([x.double().numpy().ravel() for x in anchor_views(opt)])
    expected = torch.tensor((seen[0] + anchor) / 2).bfloat16().double().numpy()
    np.testing.assert_allclose(vector(model), expected, rtol=0, atol=1e-2)


def test_a_blended_run_resumes_bit_for_bit():
    def built():
        model = linear()
        rules = dict(sync_every=3, blend=0.5, delay=1, transport=palsgd.Alone())
        return model, palsgd.DiLoCo(model, sgd(model, momentum=0.9), **rules)

    (model, opt), data = built(), batches(0) * 3
    for batch in data[:7]:
        take_step(model, opt, batch)
    fresh, again = built()
    fresh.load_state_dict(model.state_dict())
    again.load_state_dict(copy.deepcopy(opt.state_dict()))
    for batch in data[7:]:
        take_step(model, opt, batch)
        take_step(fresh, again, batch)
    np.testing.assert_array_equal(vector(fresh), vector(model))


@pytest.mark.parametrize("blend", [-0.1, 1.5, "half", True, float("nan")])
def test_a_blend_that_is_no_share_is_refused(blend):
    with pytest.raises(ValueError, match=r"blend=.* must be a number in \[0, 1\]"):
        ends(blend=blend)


def test_ddp_and_methods_with_a_restart_of_their_own_refuse_a_blend():
    model = linear()
    with pytest.raises(ValueError, match=r"blend=0\.5 is about syncs"):
        palsgd.DDP(model, sgd(model), blend=0.5, transport=palsgd.Alone())
    with pytest.raises(ValueError, match=r"blend=0\.5 means nothing for EASGD"):
        palsgd.methods.EASGD(model, sgd(model), sync_every=4, blend=0.5, transport=palsgd.Alone())

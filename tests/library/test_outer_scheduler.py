"""outer_scheduler=: the outer learning rate, stepped once per round."""

import copy

import numpy as np
import pytest
import torch
from torch.optim.lr_scheduler import (
    ChainedScheduler,
    CosineAnnealingLR,
    ExponentialLR,
    LambdaLR,
    LinearLR,
    OneCycleLR,
    ReduceLROnPlateau,
    SequentialLR,
    StepLR,
)

import palsgd
from support.core_access import core_of
from support.engines import check
from support.problems import (
    batches,
    global_vector,
    linear,
    mse,
    regression_gradient,
    regression_start,
    train,
    vector,
)
from support.stepping import sgd, take_step

STEPS = 22  # five rounds and half of one


def halving(outer):
    return ExponentialLR(outer, 0.5)


def build(model, **rules):
    rules = dict(sync_every=4, outer_scheduler=halving) | rules
    return palsgd.DiLoCo(model, sgd(model), outer=palsgd.nesterov(0.8, 0.5), **rules)


def alone(model, **rules):
    return build(model, transport=palsgd.Alone(), **rules)


def worker_job(**rules):
    model = linear()
    opt = build(model, **rules)
    rates = []
    opt.on(palsgd.events.Synced, lambda event: rates.append(opt.outer.param_groups[0]["lr"]))
    train(model, opt, batches(), STEPS)
    return global_vector(model, opt), rates


def by_hand(H=4, lr=0.05):
    """DiLoCo in NumPy whose outer rate halves after each round."""
    anchor, v = regression_start(), None
    for r, start in enumerate(range(0, STEPS, H)):
        local = [anchor.copy() for _ in range(2)]
        for t in range(start, min(start + H, STEPS)):
            local = [x - lr * regression_gradient(k, x, t) for k, x in enumerate(local)]
        delta = np.mean([anchor - x for x in local], axis=0)
        v = delta if v is None else 0.5 * v + delta
        anchor = anchor - 0.8 * 0.5**r * (delta + 0.5 * v)
    return anchor


def test_the_outer_rate_is_stepped_once_per_round_as_by_hand(world):
    for anchor, rates in world.run(worker_job, workers=2):
        np.testing.assert_allclose(anchor, by_hand(), rtol=0, atol=1e-12)
        assert rates == [0.8 * 0.5**r for r in range(1, 7)]


def test_fragments_of_one_round_share_one_rate(world):
    for _, rates in world.run(worker_job, workers=2, fragments=2, delay=1):
        assert rates[:4] == [0.8, 0.4, 0.4, 0.2]


@pytest.mark.parametrize("rules", [{}, dict(fragments=2, delay=1)])
def test_both_engines_of_the_simulator_step_it_as_processes_do(world, rules):
    got = world.run(worker_job, workers=2, **rules)
    exact, fast = (
        palsgd.simulate(
            workers=2, steps=STEPS, model=linear, loss=mse, data=lambda k: iter(batches(k) * 9),
            method=lambda m: build(m, **rules), vectorize=vectorize,
        )
        for vectorize in (False, True)
    )  # fmt: skip
    np.testing.assert_array_equal(vector(exact.model), got[0][0])
    check(fast, exact)


def test_a_scheduled_run_resumes_bit_for_bit_within_a_round():
    model, data = linear(), batches(0) * 5
    opt = alone(model)
    for batch in data[:10]:
        take_step(model, opt, batch)
    fresh = linear()
    fresh.load_state_dict(model.state_dict())
    again = alone(fresh)
    again.load_state_dict(copy.deepcopy(opt.state_dict()))
    assert again.outer.param_groups[0]["lr"] == 0.2
    for batch in data[10:]:
        take_step(model, opt, batch)
        take_step(fresh, again, batch)
    np.testing.assert_array_equal(vector(fresh), vector(model))
    assert again.outer.param_groups[0]["lr"] == opt.outer.param_groups[0]["lr"] == 0.8 / 2**6


def test_a_state_without_a_schedule_goes_on_under_one_when_it_is_not_strict():
    model = linear()
    opt = alone(model, outer_scheduler=None)
    state = opt.state_dict()
    with pytest.raises(ValueError, match="outer_scheduler: saved None"):
        alone(linear()).load_state_dict(state)
    alone(linear()).load_state_dict(state, strict=False)


def cosine(steps):
    return lambda outer: CosineAnnealingLR(outer, steps)


def one_cycle(steps):
    return lambda outer: OneCycleLR(outer, 0.9, total_steps=steps)


def warmed(steps):
    return lambda outer: SequentialLR(
        outer, [LinearLR(outer, 0.5, total_iters=2), CosineAnnealingLR(outer, steps)], [2]
    )


def chained(gamma):
    return lambda outer: ChainedScheduler([ExponentialLR(outer, gamma), StepLR(outer, 2, 0.5)])


OTHER_SCHEDULES = {
    "lambda": (halving, lambda outer: LambdaLR(outer, lambda step: 1 / (2 + step))),
    "cosine": (cosine(10), cosine(20)),
    "step": (lambda outer: StepLR(outer, 2, 0.5), lambda outer: StepLR(outer, 3, 0.1)),
    "one cycle": (one_cycle(20), one_cycle(40)),
    "sequence": (warmed(10), warmed(20)),
    "chain": (chained(0.9), chained(0.8)),
    "another kind": (halving, cosine(20)),
}


@pytest.mark.parametrize("name", OTHER_SCHEDULES)
@pytest.mark.parametrize("lr", [0.8, 0.2])
def test_another_schedule_goes_on_at_the_saved_round_with_its_own_settings(name, lr):
    before, after = OTHER_SCHEDULES[name]

    def steps(model, opt, number):
        for batch in (batches(0) * 9)[:number]:
            take_step(model, opt, batch)

    model = linear()
    opt = alone(model, outer_scheduler=before)
    steps(model, opt, 22)
    weights, state = copy.deepcopy((model.state_dict(), opt.state_dict()))

    def fresh():
        model = linear()
        rules = dict(sync_every=4, outer_scheduler=after, transport=palsgd.Alone())
        return model, palsgd.DiLoCo(model, sgd(model), outer=palsgd.nesterov(lr, 0.5), **rules)

    other, resumed = fresh()
    other.load_state_dict(weights)
    resumed.load_state_dict(state, strict=False)
    model, opt = fresh()  # had it been so from the beginning
    steps(model, opt, 22)
    for _ in range(3):
        assert opt.outer.param_groups[0]["lr"] == resumed.outer.param_groups[0]["lr"]
        steps(model, opt, 4)
        steps(other, resumed, 4)
    assert resumed.outer_scheduler.get_last_lr() == opt.outer_scheduler.get_last_lr()


def test_a_schedule_that_ends_before_the_saved_round_is_named():
    model = linear()
    opt = alone(model, outer_scheduler=cosine(10))
    for batch in (batches(0) * 9)[:22]:
        take_step(model, opt, batch)
    other = alone(linear(), outer_scheduler=one_cycle(4))
    with pytest.warns(UserWarning, match="outer_scheduler=OneCycleLR ends before the step of"):
        other.load_state_dict(opt.state_dict(), strict=False)


def test_an_earlier_state_is_loaded_back_into_the_optimizer_that_saved_it():
    model = linear()
    opt = alone(model)
    state = opt.state_dict()
    for batch in (batches(0) * 9)[:8]:
        take_step(model, opt, batch)
    assert opt.outer.param_groups[0]["lr"] == 0.2
    opt.load_state_dict(state, strict=False)  # a warning would be an error
    assert opt.outer.param_groups[0]["lr"] == 0.8
    assert opt.outer_scheduler.last_epoch == 0


def other_gamma_job():
    rank = torch.distributed.get_rank()
    build(linear(), outer_scheduler=lambda outer: ExponentialLR(outer, 0.5 + 0.1 * rank))


def test_workers_with_other_schedules_are_told_apart(world):
    for outcome in world.outcomes(other_gamma_job, workers=2):
        assert outcome.error == "ValueError"
        assert "outer_scheduler" in outcome.message


def test_the_outer_step_still_divides_the_sum_itself():
    opt = alone(linear())
    assert core_of(opt).syncer._takes_sum(0)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (lambda outer: 3, "which is no scheduler"),
        (3, "which is no scheduler"),
        (ReduceLROnPlateau, "needs a metric"),
        (halving(torch.optim.SGD([torch.zeros(1)], lr=1.0)), "bound to another SGD"),
    ],
)
def test_what_cannot_be_stepped_with_the_rounds_is_refused(given, message):
    with pytest.raises(ValueError, match=message):
        alone(linear(), outer_scheduler=given)


def test_ddp_has_no_outer_rate_to_schedule():
    model = linear()
    with pytest.raises(ValueError, match="is about syncs, which DDP has none of"):
        palsgd.DDP(model, sgd(model), outer_scheduler=LambdaLR, transport=palsgd.Alone())

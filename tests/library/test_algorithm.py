"""The library against Algorithm 1 in NumPy, in real processes."""

from functools import partial

import numpy as np
import pytest
import torch

import palsgd
from support.cases import INNER, LR, OUTER, RULES, expected
from support.problems import (
    batches,
    global_vector,
    linear,
    train,
    vector,
)


def job(inner, outer, steps, **rules):
    model = linear()
    opt = palsgd.PALSGD(model, INNER[inner][0](model.parameters()), outer=OUTER[outer][0], **rules)
    train(model, opt, batches(), steps)
    return global_vector(model, opt), vector(model), opt.clock, opt.gradient_steps


def check(world, workers, inner, outer, steps, draws, **rules):
    got = world.run(
        job, workers=workers, inner=inner, outer=outer, steps=steps, draws=draws, **(RULES | rules)
    )
    want = expected(inner, outer, workers, steps, draws, **rules)
    for anchor, local, clock, _ in got:
        np.testing.assert_allclose(anchor, want, rtol=1e-10, atol=1e-12)
        np.testing.assert_array_equal(anchor, local)  # training ends on a sync
        assert clock == steps
    return got


@pytest.mark.parametrize("draws", ["independent", "balanced", "shared"])
@pytest.mark.parametrize("inner", ["momentum", "adamw"])
@pytest.mark.parametrize("workers", [1, 2, 3, 4])
def test_library_matches_algorithm_1_with_warmup_and_nesterov(world, workers, inner, draws):
    check(world, workers, inner, "nesterov", steps=5 + 6 * 6, draws=draws, warmup_steps=5)


@pytest.mark.parametrize("draws", ["independent", "balanced", "shared"])
@pytest.mark.parametrize("outer", OUTER)
def test_library_matches_algorithm_1_for_every_outer_optimizer(world, outer, draws):
    check(world, 3, "sgd", outer, steps=30, draws=draws)


@pytest.mark.parametrize("draws", ["independent", "balanced", "shared"])
@pytest.mark.parametrize(("every", "prob"), [(1, 0.5), (2, 0.5), (3, 0.7)])
def test_rounds_of_mixing_alone_are_ticked_off_with_their_sync(world, every, prob, draws):
    """Many such rounds: the momentum of the outer optimizer moves the model in each of them."""
    check(
        world, 2, "momentum", "nesterov", steps=24, draws=draws,
        sync_every=every, mix_prob=prob, mix_rate=1.0,
    )  # fmt: skip


def test_a_round_cut_short_by_the_end_is_synced(world):
    check(world, 2, "momentum", "nesterov", steps=6 * 4 + 2, draws="balanced", warmup_steps=3)


def scheduled_job(steps, as_factory, **rules):
    model = linear()
    inner = torch.optim.SGD(model.parameters(), lr=LR, momentum=0.9)
    build = partial(torch.optim.lr_scheduler.LambdaLR, lr_lambda=lambda t: 1 / (1 + 0.1 * t))
    opt = palsgd.PALSGD(
        model, inner, outer=OUTER["nesterov"][0],
        scheduler=build if as_factory else build(inner), **rules,
    )  # fmt: skip
    train(model, opt, batches(), steps)
    return global_vector(model, opt)


@pytest.mark.parametrize("as_factory", [True, False])
def test_a_scheduler_is_stepped_by_the_clock_and_each_mixing_step_has_its_own_beta(
    world, as_factory
):
    got = world.run(
        scheduled_job, workers=2, steps=30, draws="independent", as_factory=as_factory, **RULES
    )
    want = expected("momentum", "nesterov", 2, 30, "independent", lr=lambda t: LR / (1 + 0.1 * t))
    np.testing.assert_allclose(got[0], want, rtol=1e-10)
    np.testing.assert_array_equal(got[0], got[1])

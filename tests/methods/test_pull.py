"""The pull of a round, and settings that are functions of the clock, against NumPy."""

import numpy as np
import pytest
import torch

import palsgd
from palsgd.methods.palsgd import PALSGDMethod, round_pull, step_beta
from palsgd.packing import numbers
from support.cases import INNER, LR, OUTER, RULES, expected
from support.problems import batches, global_vector, linear, mse, train, vector

H, P = RULES["sync_every"], RULES["mix_prob"]
WARMUP = 5
STEPS = WARMUP + 6 * H + 2


def falling(clock):
    return 0.9 / (1 + 0.05 * clock)


def weakening(clock):
    return 3.0 / (1 + 0.1 * clock)


# what is given, and the weight of the mixing step that begins at clock t
STRENGTHS = {
    "a number": (dict(pull=0.6), lambda t: 1 - (1 - 0.6) ** (1 / (P * H))),
    "neither": ({}, lambda t: 1 - 0.5 ** (1 / (P * H))),
    "all of it": (dict(pull=1.0), lambda t: 1.0),
    "nothing": (dict(pull=0.0), lambda t: 0.0),
    "a function": (dict(pull=falling), lambda t: 1 - (1 - falling(t)) ** (1 / (P * H))),
    "eta of the clock": (dict(mix_rate=weakening), lambda t: LR * weakening(t) / P),
}


def build(model, **given):
    inner = INNER["momentum"][0](model.parameters())
    rules = dict(sync_every=H, mix_prob=P, seed=RULES["seed"], warmup_steps=WARMUP)
    return palsgd.PALSGD(model, inner, outer=OUTER["nesterov"][0], **rules, **given)


def twin(strength, workers, draws="balanced"):
    beta = STRENGTHS[strength][1]
    return expected("momentum", "nesterov", workers, STEPS, draws, warmup_steps=WARMUP, beta=beta)


def job(strength):
    model = linear()
    opt = build(model, **STRENGTHS[strength][0])
    train(model, opt, batches(), STEPS)
    return global_vector(model, opt)


@pytest.mark.parametrize("strength", STRENGTHS)
def test_the_pull_of_two_processes_is_that_of_the_formula(world, strength):
    for got in world.run(job, workers=2, strength=strength):
        np.testing.assert_allclose(got, twin(strength, 2), rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("draws", ["balanced", "independent"])
@pytest.mark.parametrize("vectorize", [False, True])
@pytest.mark.parametrize("strength", STRENGTHS)
def test_the_pull_of_simulated_workers_is_that_of_the_formula(strength, vectorize, draws):
    result = palsgd.simulate(
        workers=3, steps=STEPS, model=linear, loss=mse, data=batches, vectorize=vectorize,
        method=lambda model: build(model, draws=draws, **STRENGTHS[strength][0]),
    )  # fmt: skip
    want = twin(strength, 3, draws)
    np.testing.assert_allclose(vector(result.model), want, rtol=1e-9, atol=1e-12)


def test_many_runs_of_one_program_have_each_their_own_pull():
    own = [given for given, _ in STRENGTHS.values()]
    runs = palsgd.simulate_many(
        [dict(method=lambda m, given=given: build(m, **given)) for given in own],
        workers=2, steps=STEPS, model=linear, loss=mse, data=batches, vectorize=True,
    )  # fmt: skip
    for strength, result in zip(STRENGTHS, runs, strict=True):
        np.testing.assert_allclose(vector(result.model), twin(strength, 2), rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("p", [0.05, 0.1, 0.5])
@pytest.mark.parametrize("length", [16, 64])
def test_the_mean_number_of_mixing_steps_of_a_round_leaves_1_minus_pull(length, p):
    for pull in (0.0, 0.3, 0.5, 0.99, 1.0):
        left = (1 - step_beta(pull, p, length)) ** (p * length)
        assert left == pytest.approx(1 - pull, abs=1e-12)
        assert round_pull(step_beta(pull, p, length), p, length) == pytest.approx(pull, abs=1e-12)


def test_the_pull_does_not_depend_on_the_learning_rate():
    for lr in (1e-4, 10.0):
        model = linear()
        opt = palsgd.PALSGD(
            model, torch.optim.SGD(model.parameters(), lr=lr), transport=palsgd.Alone()
        )
        train(model, opt, [batches(0)[0]], 20)
        assert opt.ledger.beta_max == pytest.approx(1 - 0.5 ** (1 / 6.4))


def test_the_pull_is_ignored_where_no_step_mixes():
    ends = []
    for given in (dict(pull=0.9), dict(pull=lambda t: 7.0), dict(mix_rate=1e9), {}):
        model = linear()
        settings = dict(sync_every=4, mix_prob=0.0, transport=palsgd.Alone())
        opt = palsgd.PALSGD(model, INNER["sgd"][0](model.parameters()), **settings, **given)
        train(model, opt, batches(0), 10)
        ends.append(vector(model))
    for other in ends[1:]:
        np.testing.assert_array_equal(ends[0], other)


@pytest.mark.parametrize("pull", [-0.1, 1.1, "0.5", float("nan"), True + 1])
def test_a_pull_outside_0_and_1_is_refused(pull):
    with pytest.raises(ValueError, match=r"pull=.* must be a number in \[0, 1\].*use about 0.5"):
        PALSGDMethod(pull=pull)


def test_a_function_that_leaves_the_range_later_is_refused_at_construction():
    model = linear()
    with pytest.raises(ValueError, match=r"pull=1.0\d* must be .*at clock 51"):
        palsgd.PALSGD(
            model, INNER["sgd"][0](model.parameters()), pull=lambda t: t / 50,
            transport=palsgd.Alone(),
        )  # fmt: skip


def test_pull_and_mix_rate_are_not_both_given():
    with pytest.raises(ValueError, match=r"mix_rate=2.0 and pull=0.5 both say .*give one of them"):
        PALSGDMethod(pull=0.5, mix_rate=2.0)


def test_a_function_is_compared_and_saved_by_its_name():
    model = linear()
    settings = dict(pull=falling, transport=palsgd.Alone())
    opt = palsgd.PALSGD(model, INNER["sgd"][0](model.parameters()), **settings)
    assert opt.config["pull"] == "falling"
    assert numbers(opt.state_dict())["config"]["pull"] == "falling"
    opt.load_state_dict(opt.state_dict())


def test_a_weak_pull_warns_and_none_at_all_does_not():
    model = linear()
    build = lambda eta: palsgd.PALSGD(  # noqa: E731
        model, INNER["sgd"][0](model.parameters()), mix_rate=eta, transport=palsgd.Alone()
    )
    with pytest.warns(UserWarning, match="of its gradients; use pull=0.5 instead of mix_rate"):
        build(1e-3)
    build(0.0)
    build(1e-2)

"""Many runs in one stacked program against each run by itself."""

import itertools
import logging
import time
from functools import partial

import numpy as np
import pytest
import torch

import palsgd
from support.engines import check
from support.problems import batches, linear, mse, net, vector


def palsgd_with(model, *, lr=0.05, outer_lr=0.5, momentum=0.9, **settings):
    inner = torch.optim.SGD(model.parameters(), lr=lr, momentum=momentum)
    shared = dict(sync_every=8, mix_prob=0.25, mix_rate=1.0, warmup_steps=5)
    return palsgd.PALSGD(model, inner, outer=palsgd.nesterov(lr=outer_lr), **{**shared, **settings})


def seeded(dtype=torch.float64):
    return torch.nn.Sequential(torch.nn.Linear(4, 6), torch.nn.Tanh(), torch.nn.Linear(6, 3)).to(
        dtype
    )


GRID = [
    {},
    {"method": partial(palsgd_with, lr=0.02)},
    {"method": partial(palsgd_with, mix_prob=0.5)},
    {"method": partial(palsgd_with, mix_rate=3.0)},
    {"method": partial(palsgd_with, outer_lr=1.0)},
    {"method": partial(palsgd_with, draws="independent", seed=7)},
    {"seed": 11},
    {"data": lambda worker: batches(worker + 20)},
    {"method": lambda m: palsgd.LocalSGD(
        m, torch.optim.SGD(m.parameters(), lr=0.05, momentum=0.9), sync_every=8, warmup_steps=5
    )},
]  # fmt: skip

COMMON = dict(workers=3, steps=45, model=seeded, loss=mse, data=batches, method=palsgd_with)


def alone(run, **changes):
    return palsgd.simulate(**{**COMMON, **changes, **run, "vectorize": False})


@pytest.mark.parametrize("model", [linear, seeded, partial(net, dtype=torch.float64)])
def test_each_run_of_a_grid_equals_the_same_run_alone(model):
    results = palsgd.simulate_many(GRID, **{**COMMON, "model": model, "vectorize": True})
    for run, result in zip(GRID, results, strict=True):
        check(result, alone(run, model=model), rtol=1e-7, atol=1e-9)
    assert len({vector(result.model).tobytes() for result in results}) == len(
        GRID if model is seeded else [run for run in GRID if "seed" not in run]
    )


def test_a_grid_shares_one_program(monkeypatch):
    calls = []
    from palsgd.simulator.stack import StackedWorkers

    original = StackedWorkers.gradients

    def counted(stack, who, batches):
        calls.append(len(who))
        return original(stack, who, batches)

    monkeypatch.setattr(StackedWorkers, "gradients", counted)
    palsgd.simulate_many([{"seed": s} for s in range(4)], **COMMON, vectorize=True)
    assert calls[0] == 12  # the trial
    assert set(calls[1:]) == {12}
    gradients = palsgd.simulate(**COMMON, vectorize=False).ledger.gradient_steps
    assert len(calls[1:]) == gradients


def test_at_once_splits_a_grid_and_changes_nothing():
    together = palsgd.simulate_many(GRID, **COMMON, vectorize=True)
    split = palsgd.simulate_many(GRID, **COMMON, vectorize=True, at_once=2)
    for a, b in zip(together, split, strict=True):
        np.testing.assert_allclose(vector(a.model), vector(b.model), rtol=1e-9)


def test_runs_of_unequal_shape_share_programs_with_their_like_and_the_log_says_why(caplog):
    runs = [{}, {"method": partial(palsgd_with, sync_every=16)}, {"seed": 4}]
    with caplog.at_level(logging.WARNING, "palsgd"):
        results = palsgd.simulate_many(runs, **COMMON)
    assert "2 programs, because runs differ in sync_every (8 and 16)" in caplog.text
    assert [r.engine for r in results] == ["vectorized"] * 3
    for run, result in zip(runs, results, strict=True):
        check(result, alone(run), rtol=1e-9)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (dict(momentum=0.5), "inner settings"),
        (dict(warmup_steps=3), "warmup_steps"),
        (dict(max_norm=1.0), "max_norm"),
    ],
)
def test_settings_that_a_program_shares_must_be_equal(change, named, caplog):
    with caplog.at_level(logging.WARNING, "palsgd"):
        palsgd.simulate_many([{}, {"method": partial(palsgd_with, **change)}], **COMMON)
    assert f"2 programs, because runs differ in {named}" in caplog.text


def test_runs_with_other_frozen_weights_do_not_share_a_program(caplog):
    def model():
        net = seeded()
        net[0].weight.requires_grad_(False)
        return net

    with caplog.at_level(logging.WARNING, "palsgd"):
        results = palsgd.simulate_many([{}, {"seed": 1}], **{**COMMON, "model": model})
    assert "runs differ in model.0.weight, which is not trained" in caplog.text
    check(results[1], alone({"seed": 1}, model=model), rtol=1e-7, atol=1e-9)


def test_every_run_is_evaluated_with_its_own_model():
    def evaluate(model):
        return float(vector(model).sum())

    results = palsgd.simulate_many(
        [{"seed": s} for s in range(3)], **{**COMMON, "model": seeded}, evaluate=evaluate
    )
    for result in results:
        assert result.history[-1]["metric"] == pytest.approx(evaluate(result.model))
    assert len({result.history[-1]["metric"] for result in results}) == 3


def test_an_unknown_key_or_a_missing_method_is_refused_by_name():
    with pytest.raises(ValueError, match="a key of run 1='lr' is unknown; use one of 'method'"):
        palsgd.simulate_many([{}, {"lr": 0.1}], **COMMON)
    with pytest.raises(ValueError, match="run 0 has no method"):
        palsgd.simulate_many([{}], **{**COMMON, "method": None})


def nan_at_worker_1(worker):
    return [(x * (float("nan") if worker == 1 else 1.0), y) for x, y in batches(worker)]


def three_batches(worker):
    return iter(batches(worker)[:3])


@pytest.mark.parametrize("vectorize", [True, False])
@pytest.mark.parametrize(
    ("data", "reason"),
    [(nan_at_worker_1, "of worker 1 "), (three_batches, "worker 0 ran dry after 3")],
)
def test_a_run_that_fails_ends_alone_and_says_why(vectorize, data, reason):
    good, bad, other = palsgd.simulate_many(
        [{}, {"data": data}, {"seed": 5}], **COMMON, vectorize=vectorize
    )
    assert reason in str(bad.error)
    for run, result in (({}, good), ({"seed": 5}, other)):
        assert result.error is None
        np.testing.assert_allclose(vector(result.model), vector(alone(run).model), rtol=1e-9)
    with pytest.raises(type(bad.error), match=reason):
        palsgd.simulate(**{**COMMON, "data": data, "vectorize": vectorize})


def test_seconds_leave_out_the_evaluations_of_all_runs():
    def evaluate(model):
        time.sleep(0.03)
        return 0.0

    results = palsgd.simulate_many([{"seed": s} for s in range(4)], **COMMON, evaluate=evaluate)
    slept = 0.03 * sum("metric" in entry for r in results for entry in r.history)
    assert slept > 1
    assert all(r.history[-1]["seconds"] < slept for r in results)
    assert all(a["seconds"] <= b["seconds"] for r in results
               for a, b in itertools.pairwise(r.history))  # fmt: skip


def test_whether_a_loop_is_faster_is_tried_for_one_run_and_not_for_each(monkeypatch, caplog):
    """On a GPU a trial takes up to minutes."""
    from palsgd.simulator.stacking_checks import LoopIsFasterError
    from palsgd.simulator.vectorized import Vectorized

    tried = []

    def slower(self, *, compile, against_loop):
        tried.append(len(self.runs))
        raise LoopIsFasterError("a gradient takes longer")

    monkeypatch.setattr(Vectorized, "choose_program", slower)
    runs = [{"seed": seed} for seed in range(5)]
    with caplog.at_level(logging.WARNING, "palsgd"):
        results = palsgd.simulate_many(runs, **{**COMMON, "vectorize": "auto"})
    assert tried == [5, 1]
    assert caplog.text.count("workers one after another, because a gradient takes longer") == 5
    for run, result in zip(runs, results, strict=True):
        np.testing.assert_array_equal(vector(result.model), vector(alone(run).model))
    ((*made,),) = palsgd.simulator.programs(runs, **{**COMMON, "vectorize": "auto"})
    watches = {program._engine.recorders[0].watch for program in made}
    assert len(watches) == 5, "a run counts the seconds of those before it"

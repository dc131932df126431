"""Many runs in one stacked program against each run by itself."""

import logging
from functools import partial

import numpy as np
import pytest
import torch

import palsgd
from problems import batches, linear, mse, net, vector
from test_vectorized import check


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
    from palsgd.simulator.lanes import Lanes

    original = Lanes.gradients
    monkeypatch.setattr(
        Lanes, "gradients", lambda self, who, b: calls.append(len(who)) or original(self, who, b)
    )
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


def test_runs_of_unequal_shape_go_one_after_another_with_the_reason(caplog):
    runs = [{}, {"method": partial(palsgd_with, sync_every=16)}]
    with caplog.at_level(logging.WARNING, "palsgd"):
        results = palsgd.simulate_many(runs, **COMMON)
    assert "one run after another, because run 1 differs from run 0 in sync_every" in caplog.text
    assert [r.engine for r in results] == ["vectorized", "vectorized"]
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
    assert f"differs from run 0 in {named}" in caplog.text


def test_runs_with_other_frozen_weights_do_not_share_a_program(caplog):
    def model():
        net = seeded()
        net[0].weight.requires_grad_(False)
        return net

    with caplog.at_level(logging.WARNING, "palsgd"):
        results = palsgd.simulate_many([{}, {"seed": 1}], **{**COMMON, "model": model})
    assert "run 1 has another model.0.weight, which is not trained" in caplog.text
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


def test_a_nan_in_one_run_names_its_worker():
    def broken(worker):
        return [(x * (float("nan") if worker == 1 else 1.0), y) for x, y in batches(worker)]

    with pytest.raises(palsgd.NonFiniteError, match="loss of worker 1"):
        palsgd.simulate_many([{}, {"data": broken}], **COMMON, vectorize=True)

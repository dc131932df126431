"""What the ledger says, and the global model on view."""

import math
from functools import partial

import numpy as np
import pytest
import torch

import palsgd
from support.problems import batches, global_vector, linear, mse, train, vector
from support.stepping import LR, RULES, build, flat, plan_of, take_step

# -- ledger ----------------------------------------------------------------------------------------


def ledger_job(steps, make_model, **rules):
    model, opt = build(make_model(), **rules)
    anchor, distances = None, []

    def before_sync(*_):
        """After the gradient step that a sync follows at once: plans here end on a gradient."""
        distances.append(float((flat(model) - anchor).norm()))

    opt.inner.register_step_post_hook(before_sync)
    dtype = next(model.parameters()).dtype
    for batch in palsgd.until(batches(dtype=dtype), opt, steps=steps):
        anchor = flat(model) if anchor is None or opt.synced else anchor
        take_step(model, opt, batch)
        if opt.synced:
            assert opt.ledger.distance == pytest.approx(distances[-1], rel=1e-6)
    return opt.ledger, sum(p.numel() for p in model.parameters())


def test_the_ledger_has_the_distance_of_the_local_model_to_the_anchor(world):
    rules = dict(mix_prob=0.0, mix_rate=0.0)
    for bucket_mb in (128, 1e-5):
        found = world.run(
            ledger_job, workers=2, steps=24, make_model=linear, bucket_mb=bucket_mb, **rules
        )
        distances = [[entry["distance"] for entry in ledger.history] for ledger, _ in found]
        assert len(distances[0]) == 4
        assert (np.array(distances) > 0).all()
        assert distances[0] != distances[1]  # each worker's own


def test_the_ledger_counts_what_the_plans_say(world):
    warmup, rounds = 4, 8
    rules = RULES | dict(warmup_steps=warmup, draws="independent")
    found = world.run(
        counting_job, workers=2, steps=warmup + 6 * rounds, warmup_steps=warmup, draws="independent"
    )
    for rank, ledger in enumerate(found):
        plans = [plan_of(rules, r, worker=rank) for r in range(rounds)]
        mixing = [sum(plan) for plan in plans]
        assert ledger.mixing_steps == sum(mixing)
        assert ledger.gradient_steps == warmup + 6 * rounds - sum(mixing)
        assert ledger.warmup_steps == warmup
        assert ledger.syncs == warmup + rounds
        assert ledger.realised_p == sum(mixing) / (6 * rounds)
        beta = LR * 2.0 / 0.3
        assert (ledger.beta_min, ledger.beta_max) == pytest.approx((beta, beta))
        assert [e["round"] for e in ledger.history] == list(range(rounds))
        assert [e["steps"] for e in ledger.history] == [6] * rounds
        assert [e["mixing_steps"] for e in ledger.history] == mixing
        assert [e["gradient_steps"] for e in ledger.history] == [6 - m for m in mixing]
        assert [e["clock"] for e in ledger.history] == [10 + 6 * r for r in range(rounds)]


def counting_job(steps, **rules):
    model, opt = build(**rules)
    train(model, opt, batches(), steps)
    return opt.ledger


def test_the_beta_range_of_the_ledger_follows_the_schedule(world):
    (ledger,) = world.run(scheduled_job, workers=1, steps=60)
    used = [
        LR / (1 + t) * 2.0 / 0.3
        for t in range(60)
        if plan_of(RULES, t // 6)[t % 6] and not all(plan_of(RULES, t // 6)[: t % 6])
    ]  # mixing steps at the head of a round move nothing
    assert (ledger.beta_min, ledger.beta_max) == pytest.approx((min(used), max(used)))


def scheduled_job(steps):
    factor = partial(torch.optim.lr_scheduler.LambdaLR, lr_lambda=lambda t: 1 / (1 + t))
    return counting_job(steps, scheduler=factor)


def bytes_job(steps, dtype, **rules):
    model, opt = build(linear(dtype), **rules)
    train(model, opt, batches(dtype=dtype), steps)
    return opt.ledger, sum(p.numel() for p in model.parameters())


@pytest.mark.parametrize("bucket_mb", [128, 2**-18])  # 2^-18 MiB are 4 bytes: one element
@pytest.mark.parametrize(
    ("dtype", "width"), [(torch.float32, 4), (torch.bfloat16, 4), (torch.float64, 8)]
)
def test_a_sync_sends_the_model_once_in_full_precision_and_a_small_header(
    world, dtype, width, bucket_mb
):
    found = world.run(
        bytes_job, workers=2, steps=18, dtype=dtype, bucket_mb=bucket_mb, mix_rate=0.1
    )
    for ledger, elements in found:
        per_sync = [entry["bytes_sent"] for entry in ledger.history]
        header = 9 * width * 2  # nine numbers for each of two workers
        assert per_sync == [width * elements + header] * 3
        opening = header + 6 * width * 2  # six more compare what is not trained
        assert ledger.bytes_sent == sum(per_sync) + opening
        one = (
            bucket_mb == 128 or dtype == torch.bfloat16
        )  # which cannot hold means, bucket by bucket
        assert ledger.messages == 1 + 3 * (1 if one else elements)


def test_one_worker_alone_sends_nothing(world):
    ((ledger, _),) = world.run(bytes_job, workers=1, steps=18, dtype=torch.float32)
    assert ledger.bytes_sent == 0
    assert ledger.syncs == 3


@pytest.mark.parametrize("workers", [1, 3])
def test_seconds_are_finite_and_not_negative(world, workers):
    rules = dict(steps=40, warmup_steps=4, draws="independent")
    for ledger in world.run(counting_job, workers=workers, **rules):
        for name in ("gradient_s", "mixing_s", "sync_s", "waiting_s"):
            assert math.isfinite(getattr(ledger, name)), name
            assert getattr(ledger, name) >= 0, name
        for entry in ledger.history[:-1]:
            assert math.isfinite(entry["waiting_s"])
            assert entry["exchange_s"] >= entry["waiting_s"] * (1 - 1e-6) >= 0
        assert set(ledger.as_dict()) >= {"realised_p", "history", "bytes_sent"}


# -- anchor_weights --------------------------------------------------------------------------------


@pytest.mark.usefixtures("alone")
def test_anchor_weights_shows_the_global_model_and_gives_the_local_one_back():
    model, opt = build(mix_prob=0.0)
    data = batches()
    for batch in [*data, data[0]]:
        take_step(model, opt, batch)
    assert opt.synced
    at_sync = vector(model)
    for batch in data[:3]:
        take_step(model, opt, batch)
        local = vector(model)
        assert (local != at_sync).any()
        with opt.anchor_weights() as shown:
            assert shown is model
            np.testing.assert_array_equal(vector(model), at_sync)
            with torch.no_grad():
                model.weight.zero_()  # what is done inside is undone
            with opt.anchor_weights():
                np.testing.assert_array_equal(vector(model), at_sync)
        np.testing.assert_array_equal(vector(model), local)


@pytest.mark.usefixtures("alone")
def test_anchor_weights_gives_the_local_model_back_when_the_block_raises():
    model, opt = build(mix_prob=0.0)
    take_step(model, opt, batches()[0])
    local = vector(model)
    with pytest.raises(KeyError, match="evaluation"), opt.anchor_weights():
        raise KeyError("evaluation")
    np.testing.assert_array_equal(vector(model), local)
    take_step(model, opt, batches()[1])
    assert opt.clock == 2


@pytest.mark.usefixtures("alone")
def test_step_inside_anchor_weights_is_refused():
    model, opt = build(mix_prob=0.0)
    take_step(model, opt, batches()[0])
    with opt.anchor_weights():
        with opt.anchor_weights():
            pass
        with pytest.raises(RuntimeError, match=r"anchor_weights\(\)"):
            take_step(model, opt, batches()[1])
    assert opt.clock == 1
    take_step(model, opt, batches()[1])
    assert opt.clock == 2


@pytest.mark.usefixtures("alone")
def test_training_goes_on_unchanged_after_looking_at_the_global_model():
    ends = []
    for look in (True, False):
        model, opt = build()
        for batch in palsgd.until(batches(), opt, steps=30):
            take_step(model, opt, batch)
            if look:
                with opt.anchor_weights():
                    mse(model, batch).backward()
                opt.zero_grad()
        ends.append(vector(model))
    np.testing.assert_array_equal(*ends)


@pytest.mark.usefixtures("alone")
def test_in_the_warmup_the_model_is_the_global_one():
    model, opt = build(warmup_steps=10)
    take_step(model, opt, batches()[0])
    np.testing.assert_array_equal(vector(model), global_vector(model, opt))


@pytest.mark.usefixtures("alone")
def test_a_ledger_prints_as_one_screen_however_long_the_run_was():
    model, opt = build(sync_every=1)
    train(model, opt, batches(), 300)
    said = str(opt.ledger)
    assert len(said.splitlines()) <= 10
    assert all(len(line) < 100 for line in said.splitlines())
    assert f"{opt.gradient_steps:,} gradient" in said
    assert f"{opt.ledger.syncs:,} in {opt.ledger.messages:,} messages" in said
    assert "300 syncs, in ledger.history" in said
    assert "clock" not in repr(opt.ledger)
    assert len(repr(opt.ledger)) < 600

"""Syncs that take a while (`delay`) and syncs of a part at a time (`fragments`)."""

import io
import pickle
import re
import time
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist

import palsgd
from palsgd.payload import REPORT
from support import reference
from support.core_access import anchor_of, fields_of, pending_sync
from support.patience import patient
from support.problems import (
    batches,
    global_vector,
    linear,
    mse,
    net,
    regression_gradient,
    regression_start,
    train,
    vector,
)

RULES = dict(sync_every=6, mix_prob=0.3, mix_rate=2.0, seed=11, draws="independent")
LR, STEPS = 0.05, 39  # six rounds and half of one
LAGS = [(0, 1), (1, 1), (4, 1), (6, 1), (0, 3), (1, 3), (2, 3), (3, 2)]  # delay, fragments


def momentum_sgd(model):
    return torch.optim.SGD(model.parameters(), lr=LR, momentum=0.9)


def build(model, **rules):
    outer = palsgd.nesterov(lr=0.7, momentum=0.5)
    return palsgd.PALSGD(model, momentum_sgd(model), outer=outer, **RULES | rules)


def worker_job(**rules):
    model = linear()
    opt = build(model, **rules)
    train(model, opt, batches(), rules.pop("steps", STEPS))
    return vector(model), global_vector(model, opt), opt.ledger.as_dict()


def meetings(H, delay, fragments):
    """Steps inside a round after which something is sent or applied, found on a long clock."""
    clock = range(10 * H)
    sent = {t for t in clock for f in range(fragments) if t % H == (f + 1) * H // fragments % H}
    met = sent | {t + delay for t in sent}
    return [step for step in range(1, H) if 8 * H + step in met]


def by_hand(delay, fragments, workers=2, **rules):
    """The layout puts the bias (3 elements, odd) behind the weight: the order of the vector."""
    rules = RULES | rules
    bounds = [15 * i // fragments // 2 * 2 for i in range(fragments)] + [15]
    stops = meetings(rules["sync_every"], delay, fragments)
    return reference.lagged(
        regression_start(), regression_gradient, workers=workers, steps=STEPS,
        H=rules["sync_every"], p=rules["mix_prob"], eta=rules["mix_rate"], lr=lambda t: LR,
        inner=reference.sgd(momentum=0.9),
        outer=reference.sgd(momentum=0.5, nesterov=True, fixed_lr=0.7),
        plan=lambda k, r: palsgd.round_plan(worker=k, round=r, stops=stops, **{
            name: rules[name] for name in ("seed", "sync_every", "mix_prob", "draws")
        }),
        delay=delay, parts=[slice(a, b) for a, b in pairwise(bounds)],
    )  # fmt: skip


@pytest.mark.parametrize(("delay", "fragments"), LAGS)
def test_processes_do_what_the_reference_does_step_by_step(world, delay, fragments):
    got = world.run(worker_job, workers=2, delay=delay, fragments=fragments)
    expected = by_hand(delay, fragments)
    for local, anchor, _ in got:
        np.testing.assert_allclose(anchor, expected, rtol=0, atol=1e-12)
        np.testing.assert_array_equal(local, anchor)  # training ends with a sync of everything


@pytest.mark.parametrize(("delay", "fragments"), [(4, 1), (0, 3), (1, 3), (3, 2)])
def test_balanced_processes_do_what_the_reference_does(world, delay, fragments):
    rules = dict(draws="balanced", mix_prob=0.5, mix_rate=4.0)
    got = world.run(worker_job, workers=2, delay=delay, fragments=fragments, **rules)
    expected = by_hand(delay, fragments, **rules)
    np.testing.assert_allclose(got[0][1], expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize(("delay", "fragments"), LAGS)
def test_with_balanced_draws_all_workers_take_equally_many_gradients_between_two_syncs(
    delay, fragments
):
    rules = dict(draws="balanced", mix_prob=0.5, mix_rate=4.0)
    result = simulated(4, delay=delay, fragments=fragments, steps=60, **rules)
    taken = [[entry["gradient_steps"] for entry in each.history] for each in result.ledgers]
    assert len(taken[0]) > 9
    assert taken == [taken[0]] * 4
    ends = [each.mixing_steps for each in result.ledgers]
    assert ends == [ends[0]] * 4 != [0] * 4


@pytest.mark.parametrize("mix_prob", [0.0, 0.9])
def test_rounds_that_never_mix_and_rounds_that_hardly_do_else_agree_with_the_reference(
    world, mix_prob
):
    """With p = 0.9 many rounds are all mixing, and mixing steps lie at every kind of place."""
    got = world.run(
        worker_job, workers=2, delay=2, fragments=2, mix_prob=mix_prob, mix_rate=mix_prob * 8
    )
    expected = by_hand(2, 2, mix_prob=mix_prob, mix_rate=mix_prob * 8) if mix_prob else None
    if expected is None:
        expected = by_hand(2, 2, mix_prob=0.0, mix_rate=1.0)
    np.testing.assert_allclose(got[0][1], expected, rtol=0, atol=1e-12)


def simulated(workers, *, model=linear, loss=mse, data=batches, steps=STEPS, **rules):
    return palsgd.simulate(
        workers=workers, steps=steps, model=model, loss=loss,
        data=lambda k: iter(data(k) * 100), method=lambda m: build(m, **rules), vectorize=False,
    )  # fmt: skip


@pytest.mark.parametrize(("delay", "fragments"), LAGS)
@pytest.mark.parametrize("compress", [None, "int4"])
def test_the_simulator_gets_the_bits_of_processes(world, delay, fragments, compress):
    rules = dict(delay=delay, fragments=fragments, compress=compress)
    got = world.run(worker_job, workers=2, **rules)
    result = simulated(2, **rules)
    np.testing.assert_array_equal(vector(result.model), got[0][1])
    for key in ("bytes_sent", "messages", "syncs", "mixing_steps", "gradient_steps"):
        assert getattr(result.ledgers[0], key) == got[0][2][key], key
    for entry, other in zip(result.ledgers[1].history, got[1][2]["history"], strict=True):
        for key in ("round", "clock", "fragment", "distance", "bytes_sent"):
            assert entry[key] == other[key]


@pytest.mark.parametrize("workers", [3, 4])
def test_coded_means_have_the_same_bits_in_simulator_and_processes_for_any_number_of_workers(
    world, workers
):
    rules = dict(delay=2, fragments=2, compress="int8")
    got = world.run(worker_job, workers=workers, **rules)
    result = simulated(workers, **rules)
    assert len({anchor.tobytes() for _, anchor, _ in got}) == 1
    np.testing.assert_array_equal(vector(result.model), got[0][1])


def test_a_delay_of_nothing_is_the_plain_algorithm_bit_for_bit(world):
    plain = world.run(worker_job, workers=2)
    said = world.run(worker_job, workers=2, delay=0, fragments=1, compress=None)
    np.testing.assert_array_equal(plain[0][1], said[0][1])


def test_no_more_is_sent_at_a_time_than_a_fragment(world):
    whole = world.run(worker_job, workers=2)[0][2]["history"]
    parts = world.run(worker_job, workers=2, fragments=3)[0][2]["history"]
    largest = max(entry["bytes_sent"] for entry in parts)
    roll_call = 8 * 2 * REPORT
    assert largest <= (whole[0]["bytes_sent"] - roll_call) / 3 + roll_call + 2 * 8  # aligned to two
    first_round = [entry for entry in parts if entry["round"] == 0]
    assert [entry["fragment"] for entry in first_round] == [0, 1, 2]
    assert sum(e["bytes_sent"] - roll_call for e in first_round) == 15 * 8


def held_up_job(folder, **rules):
    """Worker 1 does not enter the sync of the first round before worker 0 is three steps ahead."""
    model = linear()
    opt = build(model, mix_prob=0.0, **rules)
    late, there = dist.get_rank() == 1, Path(folder) / "ahead"
    for batch in palsgd.until(batches(), opt, steps=12):
        mse(model, batch).backward()
        if late and opt.clock == 5:
            deadline = time.monotonic() + patient(10)
            while not there.exists():
                if time.monotonic() > deadline:
                    raise TimeoutError("worker 0 waits")
                time.sleep(0.01)
        opt.step()
        opt.zero_grad()
        if not late and opt.clock == 9:
            there.touch()
    return vector(model)


def test_a_sync_travels_while_training_goes_on(world, tmp_path):
    one, other = world.run(held_up_job, workers=2, folder=str(tmp_path), delay=4)
    np.testing.assert_array_equal(one, other)


def lost_job():
    """Worker 1 leaves before the second sync."""
    model = linear()
    opt = build(model, mix_prob=0.0, delay=3)
    opt.run_until(30)
    anchor = None
    for i, batch in enumerate(batches() * 4):
        if dist.get_rank() == 1 and i == 11:
            return None
        mse(model, batch).backward()
        try:
            opt.step()
        except palsgd.SyncError as error:
            pending = fields_of(opt)["rank"]["pending"]
            return anchor, global_vector(model, opt), str(error), pending, opt.clock
        opt.zero_grad()
        anchor = global_vector(model, opt)


def test_a_peer_that_is_lost_while_a_sync_is_under_way_is_told_and_changes_nothing(world):
    before, after, message, pending, clock = world.run(lost_job, workers=2, timeout=20)[0]
    assert clock == 15
    assert message.startswith("worker 0 could not exchange with worker 1 at clock 15")
    np.testing.assert_array_equal(before, after)
    assert pending["empty"]  # what can still be saved is


def some_ranks_job():
    """Two of three ranks train together; the third does something else."""
    group = dist.new_group([0, 2])
    if dist.get_rank() == 1:
        return None
    model = linear()
    opt = build(model, delay=2, compress="int8", group=group)
    train(model, opt, batches(), 30)
    return vector(model)


def test_a_group_of_some_ranks_overlaps_without_the_others(world):
    one, nothing, other = world.run(some_ranks_job, workers=3)
    assert nothing is None
    np.testing.assert_array_equal(one, other)


# -- with the rest -------------------------------------------------------------------------------


def resumed_job(at, steps, **rules):
    """Train, save at step `at`, go on in a fresh process's place; and the same without a break."""
    torch.manual_seed(0)

    def fresh():
        model = net()
        return model, build(model, draws="shared", **rules)

    def go(model, opt, to, data):
        for batch in data:
            if opt.gradient_steps >= to or opt.clock >= steps:
                break
            mse(model, batch).backward()
            opt.step()
            opt.zero_grad()

    data = batches(dtype=torch.float32) * 40
    model, opt = fresh()
    opt.run_until(steps)
    go(model, opt, at, data)
    saved = io.BytesIO()
    torch.save({"model": model.state_dict(), "opt": opt.state_dict()}, saved)
    in_flight = pending_sync(opt)
    go(model, opt, steps, data[at:])
    again, other = fresh()
    saved.seek(0)
    found = torch.load(saved, weights_only=False)
    again.load_state_dict(found["model"])
    other.load_state_dict(found["opt"])
    other.run_until(steps)
    go(again, other, steps, data[at:])
    state = pickle.dumps([t.tolist() for t in opt.outer.state_dict()["state"][0].values()])
    twin = pickle.dumps([t.tolist() for t in other.outer.state_dict()["state"][0].values()])
    return in_flight, vector(model), vector(again), opt.clock, other.clock, state == twin


@pytest.mark.parametrize("compress", [None, "int4", "topk:0.2"])
@pytest.mark.parametrize(("delay", "fragments"), [(4, 1), (2, 3), (0, 2)])
def test_training_resumed_while_a_sync_is_under_way_goes_on_bit_for_bit(
    world, delay, fragments, compress
):
    flew = []
    for at in (5, 6, 7, 8):
        got = world.run(
            resumed_job, workers=2, at=at, steps=30, delay=delay, fragments=fragments,
            compress=compress,
        )  # fmt: skip
        for in_flight, straight, resumed, clock, other_clock, same_outer in got:
            np.testing.assert_array_equal(straight, resumed)
            assert clock == other_clock == 30
            assert same_outer
            flew.append(in_flight)
    assert any(flew) == (delay > 0)


def checkpoint_job(folder, **rules):
    rules = rules | dict(draws="shared")
    model = net()
    opt = build(model, **rules)
    data = batches(dtype=torch.float32) * 40
    opt.run_until(30)
    for batch in data[:7]:
        mse(model, batch).backward()
        opt.step()
        opt.zero_grad()
    palsgd.checkpoint.save(folder, model, opt)
    other = net(seed=5)
    twin = build(other, **rules)
    palsgd.checkpoint.load(folder, other, twin)
    for one, o in ((model, opt), (other, twin)):
        o.run_until(30)
        for batch in data[7:]:
            if o.clock >= 30:
                break
            mse(one, batch).backward()
            o.step()
            o.zero_grad()
    return vector(model), vector(other)


def test_checkpoints_hold_what_is_under_way_and_what_is_left_unsent(world, tmp_path):
    rules = dict(delay=4, compress="int4")
    for straight, resumed in world.run(checkpoint_job, workers=2, folder=str(tmp_path), **rules):
        np.testing.assert_array_equal(straight, resumed)


def skip_job():
    """Worker 1's model breaks in the second round."""
    model = linear(torch.float32)
    opt = build(model, mix_prob=0.0, delay=2, fragments=2, on_nonfinite="skip", compress="int8")
    for batch in palsgd.until(batches(dtype=torch.float32), opt, steps=24):
        mse(model, batch).backward()
        if dist.get_rank() == 1 and opt.clock == 8:
            model.weight.grad[:] = float("nan")
        opt.step()
        opt.zero_grad()
    return vector(model)


def test_a_worker_that_breaks_is_left_out_and_comes_back_from_the_global_model(world):
    one, other = world.run(skip_job, workers=2)
    assert np.isfinite(one).all()
    np.testing.assert_array_equal(one, other)


def low_precision_job():
    model = net(dtype=torch.bfloat16)
    opt = palsgd.DiLoCo(model, momentum_sgd(model), sync_every=6, delay=3, fragments=2)
    train(model, opt, batches(dtype=torch.bfloat16), 30)
    return vector(model), anchor_of(opt).dtype, float(model[1].num_batches_tracked)


def test_a_low_precision_model_lags_behind_an_anchor_of_full_precision(world):
    (one, kind, _), (other, _, _) = world.run(low_precision_job, workers=2)
    assert kind == torch.float32
    np.testing.assert_array_equal(one, other)


def user_collectives_job():
    """A loop that itself exchanges at every step, while a sync is under way."""
    model = linear()
    opt = build(model, delay=5, compress="int8", mix_prob=0.0)
    sums = []
    for batch in palsgd.until(batches(), opt, steps=36):
        loss = mse(model, batch)
        loss.backward()
        total = torch.ones(1)
        dist.all_reduce(total)
        sums.append(float(total))
        opt.step()
        opt.zero_grad()
    return sums, vector(model)


def test_the_loops_own_exchanges_are_not_mixed_up_with_a_sync_under_way(world):
    (sums, one), (_, other) = world.run(user_collectives_job, workers=2)
    assert set(sums) == {2.0}
    np.testing.assert_array_equal(one, other)


def evaluate_job():
    model = linear()
    opt = build(model, mix_prob=0.0, delay=3)
    seen = []
    for batch in palsgd.until(batches(), opt, steps=24):
        mse(model, batch).backward()
        opt.step()
        opt.zero_grad()
        if opt.synced:
            seen.append((opt.clock, global_vector(model, opt), vector(model)))
    return seen


def test_the_global_model_is_there_when_a_sync_is_applied_and_the_local_one_is_ahead(world):
    one, other = world.run(evaluate_job, workers=2)
    assert [clock for clock, _, _ in one] == [9, 15, 21, 24]
    for (_, anchor, _local), (_, same, _) in zip(one, other, strict=True):
        np.testing.assert_array_equal(anchor, same)
    assert not np.array_equal(one[0][1], one[0][2])
    np.testing.assert_array_equal(one[-1][1], one[-1][2])


@pytest.mark.parametrize(
    ("rules", "message"),
    [
        (dict(delay=7), "delay=7 is longer than the 6 steps until the next sync begins"),
        (dict(delay=3, fragments=3), "use delay <= 2"),
        (dict(delay=-1), "delay=-1 must be a whole number >= 0"),
        (dict(fragments=0), "fragments=0 must be a whole number >= 1"),
        (dict(fragments=9), "fragments=9 are more than a round has steps"),
        (dict(sync_every=64, fragments=9), "fragments=9 needs at least 18 elements"),
        (dict(compress="int3"), "compress='int3' is unknown; use None, 'bf16', 'int8'"),
        (dict(compress="topk:2"), "compress='topk:2' is unknown"),
    ],
)
def test_impossible_settings_name_the_value_and_the_fix(rules, message):
    with pytest.raises(ValueError, match=re.escape(message)) as caught:
        build(linear(), transport=palsgd.Alone(), **rules)
    assert "\n" not in str(caught.value)


def test_ddp_refuses_what_only_a_sync_can_do():
    model = linear()
    for name, value in (("compress", "int8"), ("delay", 2), ("fragments", 2)):
        with pytest.raises(ValueError, match=f"{name}={value!r} is about syncs"):
            palsgd.DDP(model, momentum_sgd(model), transport=palsgd.Alone(), **{name: value})


def test_a_state_cut_into_other_fragments_is_refused_unless_settings_may_differ():
    model = linear()
    state = build(model, transport=palsgd.Alone(), fragments=2).state_dict()
    other = build(linear(), transport=palsgd.Alone(), fragments=3)
    with pytest.raises(ValueError, match="fragments: saved 2, here 3"):
        other.load_state_dict(state)
    other.load_state_dict(state, strict=False)

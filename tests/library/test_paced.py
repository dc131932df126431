"""Paced draws: unevenly fast workers take unequally many gradients, and nobody waits."""

import time
from functools import partial

import numpy as np
import pytest
import torch
import torch.distributed as dist

import palsgd
from palsgd import registry
from palsgd.methods.palsgd import PALSGDMethod
from palsgd.pacing import BAND, Pacing, checked_speeds, speeds_in
from support.cases import INNER, LR, OUTER, RULES
from support.core_access import speeds_of
from support.engines import check
from support.problems import (
    batches,
    global_vector,
    linear,
    mse,
    regression_gradient,
    regression_start,
    train,
    trained,
    vector,
)
from support.reference import algorithm1

SPEEDS = (1.0, 0.6, 0.1)  # the last one would take a tenth of a gradient of six, and takes one
UNEVEN = RULES | dict(draws="paced", speeds=SPEEDS)


def build(model, inner="momentum", outer="nesterov", **changes):
    rules = UNEVEN | changes
    return palsgd.PALSGD(model, INNER[inner][0](model.parameters()), outer=OUTER[outer][0], **rules)


def job(steps, **changes):
    model, opt = trained(build, steps, **changes)
    return global_vector(model, opt), opt.ledger


# -- the rule --------------------------------------------------------------------------------------


def paced_twin(inner, workers, steps, speeds, warmup):
    """Algorithm 1 with the rule for uneven workers, written out from its definition."""
    H, p, seed = RULES["sync_every"], RULES["mix_prob"], RULES["seed"]
    common = dict(seed=seed, sync_every=H, mix_prob=p)

    def gradients(k, r):
        m = sum(palsgd.round_plan(worker=0, round=r, draws="balanced", **common))
        g = min(H - m, max(1, round((H - m) * speeds[k] / max(speeds))))
        return m, g

    def pace(k, r):
        m, g = gradients(k, r)
        return min(H / g, 3) if g else 0, m / (H - g) if g < H else 1

    def plan(k, r):
        found = palsgd.round_plan(worker=k, round=r, draws="paced", speeds=speeds, **common)
        assert found.count(False) == gradients(k, r)[1]
        return found

    return algorithm1(
        regression_start(), regression_gradient, workers=workers, steps=steps, H=H, p=p,
        eta=RULES["mix_rate"], lr=lambda t: LR, inner=INNER[inner][1], outer=OUTER["nesterov"][1],
        plan=plan, warmup=warmup, pace=pace,
    )  # fmt: skip


@pytest.mark.parametrize("warmup", [0, 4])
@pytest.mark.parametrize("inner", ["sgd", "adamw"])
def test_three_uneven_processes_match_the_rule_in_numpy(world, inner, warmup):
    steps = warmup + 7 * 6 + 2  # the last round is cut short
    got = world.run(job, workers=3, steps=steps, inner=inner, warmup_steps=warmup)
    want = paced_twin(inner, 3, steps, SPEEDS, warmup)
    for anchor, _ in got:
        np.testing.assert_allclose(anchor, want, rtol=1e-9, atol=1e-11)
    counts = [ledger.gradient_steps for _, ledger in got]
    assert counts[0] > counts[1] > counts[2] >= warmup + 7


def simulated(steps, workers=3, vectorize=False, make=linear, kind=palsgd.PALSGD, **changes):
    rules = UNEVEN | changes
    if kind is palsgd.DiLoCo:
        rules = {k: v for k, v in rules.items() if k not in ("mix_prob", "mix_rate", "pull")}

    def method(model):
        inner = INNER["adamw"][0](model.parameters())
        return kind(model, inner, outer=OUTER["nesterov"][0], **rules)

    return palsgd.simulate(
        workers=workers, steps=steps, model=make, loss=mse, data=batches, method=method,
        vectorize=vectorize,
    )  # fmt: skip


LAGS = [{}, dict(delay=3), dict(fragments=2), dict(fragments=2, delay=2), dict(warmup_steps=5)]


@pytest.mark.parametrize("lag", LAGS, ids=str)
def test_the_simulator_is_bit_equal_to_two_uneven_processes(world, lag):
    rules = dict(lag, speeds=(1.0, 0.4), inner="adamw")
    got = world.run(job, workers=2, steps=40, **rules)
    rules.pop("inner")
    twin = simulated(40, workers=2, **rules)
    np.testing.assert_array_equal(got[0][0], vector(twin.model))
    for (_, real), ledger in zip(got, twin.ledgers, strict=True):
        for name in ("gradient_steps", "mixing_steps", "bytes_sent", "beta_min", "beta_max"):
            assert getattr(real, name) == getattr(ledger, name), name


@pytest.mark.parametrize(
    "rules",
    [
        *LAGS,
        dict(mix_rate=None, pull=0.5),
        dict(mix_rate=None, pull=lambda clock: 0.5 / (1 + clock)),
        dict(mix_prob=0.0, mix_rate=None),
    ],
    ids=lambda rules: "-".join(rules),
)
def test_both_engines_take_paced_steps_alike(rules):
    check(simulated(43, vectorize=True, **rules), simulated(43, vectorize=False, **rules))


@pytest.mark.parametrize("lag", LAGS, ids=str)
def test_with_equal_speeds_paced_draws_are_balanced_ones_bit_for_bit(world, lag):
    paced = world.run(job, workers=2, steps=40, speeds=(7, 7), **lag)
    balanced = world.run(job, workers=2, steps=40, draws="balanced", speeds=None, **lag)
    for (a, one), (b, other) in zip(paced, balanced, strict=True):
        np.testing.assert_array_equal(a, b)
        assert one.gradient_steps == other.gradient_steps


def test_rates_are_raised_at_most_three_times_and_pulls_are_never_strengthened():
    method = PALSGDMethod(mix_prob=0.2)
    facts = palsgd.Facts(sync_every=24, workers=3, draws="paced", speeds=(1.0, 0.5, 0.01))
    paces = [method.pace(k, round, 24, facts)[0] for k in range(3) for round in range(50)]
    factors, powers = [1 / pace.share for pace in paces], [pace.power for pace in paces]
    assert max(factors) == pytest.approx(3.0)
    assert min(factors) >= 1.0
    assert min(powers) >= 0.0
    assert max(powers) == 1.0


def rates_job(steps):
    model, seen = linear(), []
    opt = build(model, inner="sgd", mix_rate=RULES["mix_prob"] / LR)  # beta = 1
    opt.inner.register_step_pre_hook(lambda inner, *_: seen.append(inner.param_groups[0]["lr"]))
    train(model, opt, batches(), steps)
    return seen, opt.inner.param_groups[0]["lr"], opt.ledger


def test_inner_steps_use_the_raised_rate_and_leave_the_rate_as_it_was(world):
    for rank, (seen, after, ledger) in enumerate(world.run(rates_job, workers=3, steps=30)):
        assert max(seen) <= 3 * LR * (1 + 1e-12)
        assert min(seen) >= LR
        assert after == LR
        assert 0 <= ledger.beta_min <= ledger.beta_max <= 1
        if rank == 2:  # one gradient of six
            assert seen == pytest.approx([3 * LR] * len(seen))


def test_diloco_is_palsgd_without_mixing_when_workers_are_uneven():
    plain = simulated(40, kind=palsgd.DiLoCo)
    mixes = simulated(40, mix_prob=0.0, mix_rate=None)
    np.testing.assert_array_equal(vector(plain.model), vector(mixes.model))
    counts = [ledger.gradient_steps for ledger in plain.ledgers]
    assert counts[0] == 40
    assert counts[0] > counts[1] > counts[2]


@pytest.mark.parametrize("name", ["fedprox", "scaffold", "easgd", "slowmo", "anchordecay"])
def test_every_method_with_rounds_can_be_paced(name):
    build_it = getattr(palsgd.methods, registry.row(name).title)
    own = dict(mu=0.1) if name == "fedprox" else {}

    def method(model):
        inner = torch.optim.SGD(model.parameters(), lr=0.05)
        return build_it(model, inner, sync_every=6, draws="paced", speeds=SPEEDS, **own)

    found = [
        palsgd.simulate(
            workers=3, steps=32, model=linear, loss=mse, data=batches, method=method,
            vectorize=vectorize,
        )
        for vectorize in (True, False)
    ]  # fmt: skip
    check(*found)
    assert found[0].ledgers[0].gradient_steps == 32 > found[0].ledgers[2].gradient_steps


# -- measured speeds -------------------------------------------------------------------------------


def slow_job(steps, seconds, **changes):
    """A run in which a gradient of worker k takes at least seconds[k]."""
    model, plans = linear(), []
    opt = build(model, **changes)
    rest = 0.0 if seconds is None else seconds[dist.get_rank()]
    for batch in palsgd.until(batches(), opt, steps=steps):
        time.sleep(rest)
        mse(model, batch).backward()
        opt.step()
        opt.zero_grad()
        plans.append(opt.clock)
    return vector(model), opt.ledger, plans


SLOW = dict(sync_every=8, mix_prob=0.2, mix_rate=1.0)


@pytest.mark.slow
@pytest.mark.parametrize("lag", [{}, dict(delay=3), dict(fragments=2)], ids=str)
def test_measured_speeds_are_alike_on_all_and_a_replay_with_them_is_bit_equal(world, lag):
    rules = SLOW | lag
    seconds = (0.004, 0.004, 0.03)
    got = world.run(slow_job, workers=3, steps=64, seconds=seconds, speeds=None, **rules)
    records = [ledger.speeds for _, ledger, _ in got]
    assert records[0] == records[1] == records[2]
    assert records[0][0] == {"round": 0, "speeds": [1.0, 1.0, 1.0]}
    assert 3 <= records[0][1]["round"] <= 5
    assert 0.05 < records[0][1]["speeds"][2] < 0.7
    counts = [ledger.gradient_steps for _, ledger, _ in got]
    assert counts[2] < 0.9 * max(counts)
    again = world.run(slow_job, workers=3, steps=64, seconds=None, speeds=records[0], **rules)
    for (a, one, clocks), (b, other, same) in zip(got, again, strict=True):
        np.testing.assert_array_equal(a, b)
        assert clocks == same
        assert one.speeds == other.speeds


@pytest.mark.slow
def test_nobody_waits_for_a_slow_worker_once_speeds_are_settled(world):
    seconds = (0.005, 0.005, 0.025)
    common = dict(workers=3, seconds=seconds, steps=10 * 16, **SLOW | dict(sync_every=16))
    even = world.run(slow_job, draws="balanced", speeds=None, **common)
    paced = world.run(slow_job, speeds=None, **common)

    def waited(runs):
        """Of a fast worker, from the fifth round on."""
        return sum(entry["waiting_s"] for entry in runs[0][1].history[5:-1])

    assert waited(paced) < 0.5 * waited(even)


def rows(*columns, count=5):
    return [list(columns)] * count


def test_the_jitter_of_equally_fast_workers_changes_nothing():
    pacing, equal = Pacing(workers=3), (1.0, 1.0, 1.0)
    assert pacing.settled(rows(1.0, 1 / (1 - BAND / 2), 1 + BAND / 2), equal) is None
    odd_rounds = [*rows(1.0, 1.0, 1.0, count=3), [1.0, 9.0, 1.0], [0.2, 1.0, 1.0]]
    assert pacing.settled(odd_rounds, equal) is None


def test_speeds_follow_a_change_beyond_the_band_and_come_back_to_equal():
    pacing = Pacing(workers=3)
    found = pacing.settled(rows(2.0, 1.0, 3.0), (1.0, 1.0, 1.0))
    assert found == (0.5, 1.0, 0.33)
    assert pacing.settled(rows(2.1, 1.0, 3.1), found) is None
    assert pacing.settled(rows(1.0, 1.0, 3.0), found) == (1.0, 1.0, 0.33)
    assert pacing.settled(rows(1.0, 0.95, 1.02), found) == (1.0, 1.0, 1.0)


def test_speeds_wait_for_three_rounds_and_for_a_step_of_every_worker():
    pacing, equal = Pacing(workers=2, fragments=2), (1.0, 1.0)
    assert pacing.settled(rows(1.0, 4.0, count=5), equal) is None
    assert pacing.settled(rows(1.0, 4.0, count=6), equal) == (1.0, 0.25)
    assert pacing.settled(rows(1.0, 0.0, count=6), equal) is None
    assert len(pacing.kept(rows(1.0, 1.0, count=10), [2.0, 2.0])) == 10


def test_speeds_hold_from_their_round_on():
    settled = [(0, (1.0, 1.0)), (4, (1.0, 0.5)), (9, (1.0, 0.25))]
    assert [speeds_in(settled, round)[1] for round in (0, 3, 4, 8, 9, 50)] == [
        1.0, 1.0, 0.5, 0.5, 0.25, 0.25,
    ]  # fmt: skip


# -- saved states ----------------------------------------------------------------------------------


def resume_job(steps, stops, **rules):
    """Saves after some gradient steps of a worker, and goes on in a new optimizer."""
    model, kept = linear(), []
    opt = build(model, **rules)

    def keep():
        if opt.gradient_steps == stops[dist.get_rank()]:
            kept.append(({k: v.clone() for k, v in model.state_dict().items()}, opt.state_dict()))

    train(model, opt, batches(), steps, on_step=keep)
    end, clock = vector(model), opt.clock
    model = linear()
    opt = build(model, **rules)
    model.load_state_dict(kept[0][0])
    opt.load_state_dict(kept[0][1])
    data = batches()
    feed = [data[(opt.gradient_steps + i) % len(data)] for i in range(steps)]
    train(model, opt, feed, steps)
    return np.array_equal(end, vector(model)), clock == opt.clock, kept[0][1]


@pytest.mark.parametrize("lag", [{}, dict(delay=2)], ids=str)
def test_uneven_workers_resume_within_a_round_bit_for_bit(world, lag):
    rules = dict(sync_every=12, mix_prob=0.2, speeds=(1.0, 0.5, 0.2), **lag)
    plan = partial(
        palsgd.round_plan, seed=RULES["seed"], sync_every=12, mix_prob=0.2, draws="paced",
        speeds=rules["speeds"], stops=(2,) if lag else (),
    )  # fmt: skip
    # the second gradient step after the first stop of the third round of each worker
    before = [sum(plan(worker=k, round=r).count(False) for r in range(2)) for k in range(3)]
    stops = [n + plan(worker=k, round=2)[:2].count(False) + 1 for k, n in enumerate(before)]
    for same, clock, _ in world.run(resume_job, workers=3, steps=50, stops=stops, **rules):
        assert same
        assert clock


def measured_state_job(steps, seconds):
    model = linear()
    opt = build(model, speeds=None, **SLOW)
    for batch in palsgd.until(batches(), opt, steps=steps):
        time.sleep(seconds[dist.get_rank()])
        mse(model, batch).backward()
        opt.step()
        opt.zero_grad()
    state = opt.state_dict()
    fresh = build(linear(), speeds=None, **SLOW)
    fresh.load_state_dict(state)
    return speeds_of(opt), speeds_of(fresh), fresh.ledger.speeds


def test_measured_speeds_are_saved_and_resumed(world):
    for old, new, record in world.run(
        measured_state_job, workers=2, steps=40, seconds=(0.002, 0.02)
    ):
        assert old == new
        assert len(old[0]) > 1
        assert record[-1] == {"round": old[0][-1][0], "speeds": list(old[0][-1][1])}


def may_save_job(steps):
    model, found = linear(), []
    opt = build(model)
    train(model, opt, batches(), steps, on_step=lambda: found.append((opt.synced, opt.may_save)))
    return found


def test_uneven_workers_may_save_right_after_a_sync(world):
    for found in world.run(may_save_job, workers=3, steps=30):
        assert all(synced == may for synced, may in found)
        assert sum(may for _, may in found) == 5


# -- what is refused -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (dict(draws="balanced"), "use draws='paced', or leave them out"),
        (dict(speeds=(1.0, 2.0)), "are of 2 workers, and there are 1"),
        (dict(speeds=(0.0,)), r"speeds=\(0.0,\) must have a number > 0"),
        (dict(speeds=[{"round": 3, "speeds": [1.0]}, {"round": 1, "speeds": [1.0]}]), "in the ord"),
        (dict(speeds=[{"rounds": 3}]), "what a run's ledger.speeds has"),
        (dict(speeds="fast"), "speeds='fast' must have"),
    ],
)
def test_speeds_that_say_nothing_are_refused(changes, words):
    with pytest.raises(ValueError, match=words):
        build(linear(), transport=palsgd.Alone(), **(dict(speeds=(1.0,)) | changes))


def test_speeds_are_read_as_numbers_and_as_a_record():
    assert checked_speeds(np.array([2, 1])) == [(0, (2.0, 1.0))]
    assert checked_speeds([2, 1]) == [(0, (2.0, 1.0))]
    record = [{"round": 0, "speeds": [1.0, 1.0]}, {"round": 4, "speeds": [1.0, 0.5]}]
    assert checked_speeds(record) == [(0, (1.0, 1.0)), (4, (1.0, 0.5))]


def test_paced_draws_need_rounds_and_a_plan_that_knows_speeds():
    class Own(palsgd.Method):
        def plan(self, worker, round, length, facts):
            return [False] * length

    inner = INNER["sgd"][0]
    for build_it in (
        lambda model: palsgd.DDP(
            model, inner(model.parameters()), draws="paced", transport=palsgd.Alone()
        ),
        lambda model: palsgd.LocalOptimizer(
            model, inner(model.parameters()), method=Own(), draws="paced", transport=palsgd.Alone()
        ),
    ):
        with pytest.raises(ValueError, match="draws='paced'"):
            build_it(linear())


def test_a_simulation_of_paced_draws_needs_speeds():
    with pytest.raises(ValueError, match="give speeds= with 3 numbers"):
        simulated(8, speeds=None)


def test_one_worker_alone_is_never_slow():
    opt = build(linear(), speeds=None, transport=palsgd.Alone())
    assert opt.ledger.speeds == [{"round": 0, "speeds": [1.0]}]
    assert "1 of the workers, from round 0 on" in str(opt.ledger)

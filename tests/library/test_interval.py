"""sync_every="auto": H from what syncs and steps are measured to cost."""

import time

import pytest
import torch
import torch.distributed as dist

import palsgd
from palsgd.auto_interval import Auto, Costs
from support.core_access import round_origin
from support.problems import batches, linear, mse, vector


@pytest.mark.parametrize(
    ("sync_s", "step_s", "rules", "expected"),
    [
        (1.0, 0.1, {}, 190),  # 1 / (1 + 190 * 0.1) = 5%
        (1.0, 0.1, dict(fragments=4), 760),  # four such exchanges in a round
        (1.0, 0.1, dict(gradient_share=0.5), 380),  # half the steps cost nothing
        (1.0, 0.1, dict(delay=10), 10),  # all of it is hidden; a delay must fit into a round
        (1.0, 0.1, dict(delay=5), 95),  # half of it is
        (1e-5, 0.1, {}, 8),  # not less than the least
        (100.0, 0.1, {}, 1024),  # not more than the most
        (1.0, 0.0, {}, 1024),
    ],
)
def test_the_chosen_interval_keeps_communication_at_its_share(sync_s, step_s, rules, expected):
    rules = dict(fragments=1, delay=0, gradient_share=1.0) | rules
    assert Auto().choose(Costs(sync_s, step_s), **rules) == expected


def auto_job(sync_seconds, sleep=0.004, resume=False, **rules):
    """The exchange of worker 0 takes a given time; its steps do as well."""
    model = linear()
    rules = dict(sync_every=palsgd.Auto(least=4, most=64), mix_prob=0.2, mix_rate=1.0) | rules

    def fresh(model):
        opt = palsgd.PALSGD(
            model, torch.optim.SGD(model.parameters(), lr=0.01), **rules
        )  # fmt: skip
        mean = opt.transport.mean

        def slow(message):
            dist.barrier()
            time.sleep(sync_seconds)
            return mean(message)

        opt.transport.mean = slow
        return opt

    opt = fresh(model)
    for batch in palsgd.until(batches(), opt, steps=150):
        mse(model, batch).backward()
        time.sleep(sleep)
        opt.step()
        opt.zero_grad()
        if resume and opt.ledger.interval:
            state, weights = opt.state_dict(), model.state_dict()
            other = linear()
            other.load_state_dict(weights)
            twin = fresh(other)
            twin.load_state_dict(state)
            return (
                opt.sync_every,
                twin.sync_every,
                round_origin(twin),
                round_origin(opt),
            )
    return (
        opt.ledger.interval,
        [(e["clock"], e["steps"]) for e in opt.ledger.history],
        vector(model),
    )


def test_all_workers_choose_the_same_interval_and_the_ledger_says_which_and_why(world):
    got = world.run(auto_job, workers=2, sync_seconds=0.005)
    (interval, history, weights), (same, other_history, other) = got
    assert interval == same
    assert history == other_history
    assert (weights == other).all()
    chosen, start = interval["sync_every"], interval["from_clock"]
    assert start == 16  # four rounds of the least
    assert [steps for clock, steps in history if clock <= 16] == [4] * 4
    later = [steps for clock, steps in history if clock > 16]
    assert set(later[:-1]) <= {chosen}
    assert interval["sync_s"] > 0.004
    assert 4 <= chosen <= 64
    auto = Auto(least=4, most=64)
    assert chosen == auto.choose(
        Costs(interval["sync_s"], interval["step_s"]), fragments=1, delay=0, gradient_share=0.8
    )


def test_a_resumed_run_keeps_the_interval_that_was_chosen(world):
    for mine, resumed, origin, there in world.run(
        auto_job, workers=2, sync_seconds=0.005, resume=True
    ):
        assert mine == resumed
        assert origin == there


def test_overlap_begins_when_the_interval_is_chosen(world):
    interval, history, _ = world.run(auto_job, workers=2, sync_seconds=0.002, delay=3)[0]
    assert [clock for clock, _ in history[:4]] == [4, 8, 12, 16]
    assert history[4][0] == 16 + interval["sync_every"] + 3


def test_auto_needs_a_link_to_measure():
    with pytest.raises(ValueError, match="simulated workers have none; give a number"):
        palsgd.simulate(
            workers=2, steps=12, model=linear, loss=mse, data=lambda k: iter(batches(k) * 9),
            method=lambda m: palsgd.DiLoCo(
                m, torch.optim.SGD(m.parameters(), lr=0.01), sync_every="auto"
            ),
        )  # fmt: skip


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (dict(share=0.0), r"share=0.0 must be a number in \(0, 1\)"),
        (dict(share=5), r"share=5 must be a number in \(0, 1\)"),
        (dict(least=10, most=5), "most=5 must be at least least=10"),
        (dict(rounds=1), "rounds=1 must be a whole number >= 2"),
    ],
)
def test_impossible_bounds_are_named(wrong, message):
    with pytest.raises(ValueError, match=message):
        palsgd.Auto(**wrong)


def test_another_word_than_auto_is_refused():
    model = linear()
    with pytest.raises(
        ValueError, match="sync_every='often' must be a whole number >= 1, or 'auto'"
    ):
        palsgd.DiLoCo(
            model, torch.optim.SGD(model.parameters(), lr=0.1), sync_every="often",
            transport=palsgd.Alone(),
        )  # fmt: skip

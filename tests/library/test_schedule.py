"""The schedule: what is due when, against definitions written out step by step."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import palsgd
from palsgd.schedule import Due, Schedule, round_stops
from support.problems import batches, linear, mse


@st.composite
def lags(draw):
    """Fragments and a delay that fit into a round."""
    every = draw(st.integers(1, 9))
    fragments = draw(st.integers(1, min(3, every)))
    return dict(
        sync_every=every,
        fragments=fragments,
        delay=draw(st.integers(0, every // fragments)),
        warmup=draw(st.integers(0, 5)),
    )


def by_pencil(*, sync_every, fragments, delay, warmup, end):
    """What is due at each clock, by walking through the steps one at a time."""
    found, under_way = {}, []
    for clock in range(1, end + 1):
        due = []
        if clock <= warmup:
            found[clock] = [Due("average")]
            continue
        offset = (clock - warmup - 1) % sync_every + 1
        for landing, fragment in list(under_way):
            if landing == clock or clock == end:
                due.append(Due("apply", fragment))
                under_way.remove((landing, fragment))
        for fragment in range(fragments):
            if clock == end:
                due.append(Due("sync", fragment))
            elif offset == (fragment + 1) * sync_every // fragments:
                due.append(Due("send" if delay else "sync", fragment))
                if delay:
                    under_way.append((clock + delay, fragment))
        if due:
            found[clock] = due
    return found


@given(lags(), st.integers(1, 40))
def test_the_schedule_says_what_a_walk_through_the_steps_finds(lag, end):
    schedule = Schedule.fixed(**lag, end=end)
    expected = by_pencil(**lag, end=end)
    assert {c: schedule.due(c) for c in range(1, end + 1) if schedule.due(c)} == expected
    assert dict(Schedule.fixed(**lag).exchanges(end)) == expected


@given(lags(), st.integers(1, 40))
def test_the_next_thing_due_is_the_first_clock_at_which_something_is(lag, end):
    schedule = Schedule.fixed(**lag, end=end)
    for clock in range(end):
        later = [c for c in range(clock + 1, end + 1) if schedule.due(c)]
        assert schedule.next_due(clock) == later[0]


@given(lags(), st.integers(1, 40))
def test_the_last_change_is_the_latest_clock_before_at_which_the_global_model_changed(lag, end):
    schedule = Schedule.fixed(**lag, end=end)
    for clock in range(1, end + 1):
        earlier = [c for c in range(1, clock) if schedule.changes_model(c)]
        assert schedule.last_change(clock) == (earlier[-1] if earlier else 0)


@given(lags(), st.integers(1, 60))
def test_rounds_follow_one_another_and_everything_due_in_one_is_at_a_stop(lag, end):
    schedule = Schedule.fixed(**lag)
    every, warmup = lag["sync_every"], lag["warmup"]
    for clock in range(warmup, warmup + end):
        round, offset = schedule.place(clock)
        assert (round, offset) == divmod(clock - warmup, every)
        assert schedule.round_start(clock) == warmup + round * every
        if schedule.due(clock) and offset:
            assert offset in round_stops(every, lag["fragments"], lag["delay"])


def test_a_warmup_that_never_ends_averages_after_every_step():
    schedule = Schedule.fixed(sync_every=1, warmup=math.inf)
    assert dict(schedule.exchanges(3)) == {c: [Due("average")] for c in (1, 2, 3)}
    assert schedule.last_change(3) == 2


def test_rounds_of_another_length_begin_where_the_schedule_is_restarted():
    schedule = Schedule.fixed(sync_every=4).restarted(8, length=6, delay=2)
    assert schedule.sends(8) == [0]
    assert [c for c, due in schedule.exchanges(22) if any(d.kind == "send" for d in due)] == [
        14,
        20,
    ]
    assert [schedule.place(c) for c in (7, 8, 13, 14)] == [(1, 3), (2, 0), (2, 5), (3, 0)]


@pytest.mark.filterwarnings("ignore:the warm-up lasts")  # longer than some of these runs
@settings(max_examples=25, deadline=None)
@given(lags(), st.integers(2, 30), st.sampled_from(["balanced", "independent", "shared"]))
def test_an_optimizer_exchanges_when_its_schedule_says(lag, end, draws):
    model = linear()
    opt = palsgd.PALSGD(
        model, torch.optim.SGD(model.parameters(), lr=0.01), mix_prob=0.4, mix_rate=1.0,
        draws=draws, sync_every=lag["sync_every"], fragments=lag["fragments"], delay=lag["delay"],
        warmup_steps=lag["warmup"], transport=palsgd.Alone(),
    )  # fmt: skip
    seen = []
    opt.on(palsgd.events.Averaged, lambda e: seen.append((e.clock, "average", 0)))
    opt.on(palsgd.events.Sent, lambda e: seen.append((e.clock, "send", e.fragment)))
    opt.on(palsgd.events.Synced, lambda e: seen.append((e.clock, "change", e.fragment)))
    for batch in palsgd.until(batches(0), opt, steps=end):
        mse(model, batch).backward()
        opt.step()
        opt.zero_grad()
    names = {"apply": "change", "sync": "change"}
    expected = [
        (clock, names.get(due.kind, due.kind), due.fragment)
        for clock, dues in Schedule.fixed(**lag).exchanges(end)
        for due in dues
    ]
    assert sorted(seen) == sorted(expected)


def test_the_gradients_of_an_optimizer_are_those_its_plans_leave():
    model = linear()
    rules = dict(sync_every=8, mix_prob=0.5, seed=4)
    opt = palsgd.PALSGD(
        model, torch.optim.SGD(model.parameters(), lr=0.01), mix_rate=1.0, fragments=2, delay=2,
        transport=palsgd.Alone(), **rules,
    )  # fmt: skip
    for batch in palsgd.until(batches(0), opt, steps=40):
        mse(model, batch).backward()
        opt.step()
        opt.zero_grad()
    plans = [
        palsgd.round_plan(worker=0, round=r, draws="balanced", stops=round_stops(8, 2, 2), **rules)
        for r in range(5)
    ]
    assert opt.gradient_steps == sum(not mixes for plan in plans for mixes in plan)


@pytest.mark.parametrize("stops", [(0,), (8,), (5, 3), (3, 3), ("a",)])
def test_stops_outside_a_round_or_out_of_order_are_refused(stops):
    with pytest.raises(ValueError, match="stops"):
        palsgd.round_plan(
            seed=0, worker=0, round=0, sync_every=8, mix_prob=0.1, draws="balanced", stops=stops
        )

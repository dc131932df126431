"""Events: any number of listeners, each told what happened, in processes and in simulations."""

import pytest
import torch

import palsgd
from palsgd.events import Averaged, Event, IntervalChosen, Mixed, Sent, Synced
from support.problems import batches, linear, mse, train

H, WARMUP, STEPS = 4, 2, 18
KINDS = (Averaged, Mixed, Sent, Synced)


def build(model, transport=None, **rules):
    inner = torch.optim.SGD(model.parameters(), lr=0.05)
    rules = dict(sync_every=H, mix_prob=0.3, mix_rate=1.0, warmup_steps=WARMUP) | rules
    return palsgd.PALSGD(model, inner, transport=transport, **rules)


def told(opt, seen):
    for kind in KINDS:
        opt.on(kind, seen.append)
    return opt


def listening_job(**rules):
    model, seen = linear(), []
    train(model, told(build(model, **rules), seen), batches(), STEPS)
    return seen


LAGS = [dict(), dict(delay=2), dict(fragments=2), dict(fragments=2, delay=1, compress="int8")]


@pytest.mark.parametrize("lag", LAGS, ids=str)
def test_a_simulated_worker_hears_what_a_real_one_hears(world, lag):
    """The engines listen like everybody else and take nobody's place."""
    real = world.run(listening_job, workers=2, **lag)
    heard = [[], []]
    builds = iter(heard)
    palsgd.simulate(
        workers=2, steps=STEPS, model=linear, loss=mse, data=batches, vectorize=False,
        method=lambda model: told(build(model, **lag), next(builds)),
    )  # fmt: skip
    assert heard == real
    syncs = [e for e in real[0] if isinstance(e, Synced)]
    assert [e.clock for e in syncs if e.completes] == sorted({e.clock for e in syncs})
    assert {e.worker for e in real[1]} == {1}


def alone(**rules):
    model = linear()
    return model, build(model, transport=palsgd.Alone(), **rules)


def test_all_listeners_are_called_in_order_until_they_are_removed():
    model, opt = alone()
    calls = []
    first = opt.on(Synced, lambda event: calls.append("first"))
    opt.on(Synced, lambda event: calls.append("second"))
    train(model, opt, batches(0), WARMUP + H)
    assert calls == ["first", "second"]
    first.remove()
    first.remove()  # does nothing
    train(model, opt, batches(0), WARMUP + 2 * H)
    assert calls == ["first", "second", "second"]


def test_a_listener_to_all_events_hears_every_one_of_them():
    model, opt = alone()
    some, every = [], []
    told(opt, some)
    opt.on(Event, every.append)
    train(model, opt, batches(0), STEPS)
    assert every == some
    assert {type(event) for event in some} >= {Averaged, Mixed, Synced}


def test_a_synced_event_says_what_the_ledger_says():
    model, opt = alone(fragments=2)
    seen = []
    opt.on(Synced, seen.append)
    train(model, opt, batches(0), STEPS)
    lines = opt.ledger.history
    assert [(e.clock, e.round, e.fragment, e.bytes_sent, e.distance) for e in seen] == [
        (h["clock"], h["round"], h["fragment"], h["bytes_sent"], h["distance"]) for h in lines
    ]
    assert {e.contributors for e in seen} == {1}


def test_events_cannot_be_changed_by_a_listener():
    event = Averaged(worker=0, clock=1, bytes_sent=2)
    with pytest.raises(AttributeError):
        event.clock = 5


def test_what_is_no_event_or_no_function_is_refused():
    _, opt = alone()
    with pytest.raises(ValueError, match=r"is no event; use for instance palsgd\.events\.Synced"):
        opt.on("synced", print)
    with pytest.raises(ValueError, match="listener=3 must be a function"):
        opt.on(Synced, 3)


def test_the_interval_that_was_chosen_is_told():
    model, opt = alone(sync_every=palsgd.Auto(least=2, most=8, rounds=2), warmup_steps=0)
    seen = []
    opt.on(IntervalChosen, seen.append)
    train(model, opt, batches(0), 20)
    (event,) = seen
    assert event.sync_every == opt.ledger.interval["sync_every"] == opt.sync_every


def test_the_old_callback_is_called_once_for_each_clock_at_which_something_was_exchanged():
    model, opt = alone(fragments=2)
    calls = []
    opt.after_exchange(lambda: calls.append(opt.clock))
    train(model, opt, batches(0), STEPS)
    assert calls == sorted(set(calls))
    assert calls[-1] == STEPS


# -- what a simulation does not call ----------------------------------------------------------


def simulated(method):
    return palsgd.simulate(
        workers=2, steps=8, model=linear, loss=mse, data=batches, vectorize=False, method=method
    )


def test_step_hooks_are_called_in_a_simulation_as_often_as_in_a_loop():
    calls = []

    def method(model):
        opt = build(model)
        opt.register_step_pre_hook(lambda *_: calls.append("before"))
        opt.register_step_post_hook(lambda *_: calls.append("after"))
        return opt

    result = simulated(method)
    steps = sum(ledger.gradient_steps for ledger in result.ledgers)
    assert calls.count("before") == calls.count("after") == steps
    model, opt = alone()
    calls.clear()
    opt.register_step_post_hook(lambda *_: calls.append("after"))
    train(model, opt, batches(0), 8)
    assert calls == ["after"] * opt.gradient_steps


class Louder(palsgd.DiLoCo):
    def step(self, closure=None):
        return super().step(closure)


def test_an_overridden_step_is_refused_in_a_simulation_and_called_once_in_a_loop():
    with pytest.raises(ValueError, match=r"Louder overrides step\(\), which a simulation"):
        simulated(lambda m: Louder(m, torch.optim.SGD(m.parameters(), 0.1), sync_every=4))
    model, calls = linear(), []
    inner = torch.optim.SGD(model.parameters(), 0.1)
    opt = Louder(model, inner, sync_every=4, transport=palsgd.Alone())
    opt.register_step_post_hook(lambda *_: calls.append(1))
    train(model, opt, batches(0), 8)
    assert len(calls) == 8


@pytest.mark.parametrize("bound_to_inner", [False, True])
def test_a_scheduler_that_nobody_would_step_is_refused_in_a_simulation(bound_to_inner):
    def method(model):
        inner = torch.optim.SGD(model.parameters(), 0.1)
        opt = palsgd.DiLoCo(model, inner, sync_every=4)
        opt.kept = torch.optim.lr_scheduler.LambdaLR(inner if bound_to_inner else opt, lambda _: 1)
        return opt

    with pytest.raises(ValueError, match="nobody steps it in a simulation; give it to"):
        simulated(method)


def test_a_scheduler_that_the_optimizer_steps_is_simulated():
    def method(model):
        inner = torch.optim.SGD(model.parameters(), 0.1)
        schedule = torch.optim.lr_scheduler.ExponentialLR(inner, 0.5)
        return palsgd.DiLoCo(model, inner, sync_every=4, scheduler=schedule)

    result = simulated(method)
    assert result.optimizers[0].param_groups[0]["lr"] == pytest.approx(0.1 * 0.5**8)

"""What a step is: the clock, the learning rate, mixing, schedules."""

import re
from functools import partial

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import palsgd
from palsgd.methods.palsgd import collapsed
from palsgd.tensors import mix_
from support.problems import batches, global_vector, linear, mse, train, vector
from support.stepping import LR, RULES, build, flat, plan_of, sgd, take_step

# -- clock -----------------------------------------------------------------------------------------


def clocks(rules, calls):
    """The clock after each step(), read off the plans with nothing but a pencil."""
    H, warmup, t, found = rules["sync_every"], rules.get("warmup_steps", 0), 0, []
    coin = lambda t: plan_of(rules, (t - warmup) // H)[(t - warmup) % H]  # noqa: E731
    all_mixing = lambda t: all(plan_of(rules, (t - warmup) // H))  # noqa: E731
    for _ in range(calls):
        if t >= warmup:
            while coin(t):
                t += 1
        t += 1
        while t > warmup and (t - warmup) % H and coin(t):
            t += 1
        while t >= warmup and (t - warmup) % H == 0 and all_mixing(t):
            t += H
        found.append(t)
    return found


@pytest.mark.parametrize("warmup", [0, 5])
@pytest.mark.parametrize(("every", "prob"), [(6, 0.3), (2, 0.6), (1, 0.5), (16, 0.9), (4, 0.0)])
@pytest.mark.usefixtures("alone")
def test_the_clock_counts_every_step_and_stands_on_a_round_when_synced(every, prob, warmup):
    rules = RULES | dict(sync_every=every, mix_prob=prob, mix_rate=0.5, warmup_steps=warmup)
    model, opt = build(**rules)
    seen = []
    for batch in batches() * 6:
        take_step(model, opt, batch)
        seen.append(opt.clock)
        assert opt.clock == opt.gradient_steps + opt.ledger.mixing_steps
        if opt.clock >= warmup:
            assert opt.rounds == (opt.clock - warmup) // every
        if opt.synced:
            assert (opt.clock - warmup) % every == 0
            np.testing.assert_array_equal(vector(model), global_vector(model, opt))
        else:
            assert opt.clock <= warmup or (opt.clock - warmup) % every
    assert seen == clocks(rules, len(seen))
    assert opt.gradient_steps == len(seen)


@pytest.mark.usefixtures("alone")
def test_accumulated_micro_batches_are_one_tick():
    model, opt = build(mix_prob=0.0)
    twin = linear()
    bare = sgd(twin, momentum=0.9)
    for first, second in zip(batches()[:-1], batches()[1:], strict=True):
        for m in (model, twin):
            for micro in (first, second):
                (mse(m, micro) / 2).backward()
        opt.step(), bare.step()
        opt.zero_grad(), bare.zero_grad()
    assert opt.clock == opt.gradient_steps == 4
    np.testing.assert_array_equal(vector(model), vector(twin))


@pytest.mark.usefixtures("alone")
def test_a_closure_is_called_once_per_step_and_its_loss_returned():
    model, opt = build(mix_prob=0.0)
    twin = linear()
    bare = sgd(twin, momentum=0.9)
    calls = []

    def closure(model, opt, batch):
        opt.zero_grad()
        loss = mse(model, batch)
        loss.backward()
        calls.append(loss.item())
        return loss

    for batch in batches()[:3]:
        loss = opt.step(partial(closure, model, opt, batch))
        want = bare.step(partial(closure, twin, bare, batch))
        assert torch.equal(loss, want)
    assert len(calls) == 6
    assert opt.clock == 3
    np.testing.assert_array_equal(vector(model), vector(twin))


@pytest.mark.usefixtures("alone")
def test_step_hooks_run_once_per_step_before_and_after_it():
    model, opt = build()
    seen = []
    opt.register_step_pre_hook(lambda o, *_: seen.append(("pre", o is opt, opt.clock)))
    opt.register_step_post_hook(lambda o, *_: seen.append(("post", o is opt, opt.clock)))
    opt.inner.register_step_pre_hook(lambda o, *_: seen.append(("inner", o is opt.inner, None)))
    for batch in batches()[:3]:
        before = opt.clock
        take_step(model, opt, batch)
        assert seen == [("pre", True, before), ("inner", True, None), ("post", True, opt.clock)]
        seen.clear()


# -- learning rate ---------------------------------------------------------------------------------


def two_groups(lrs=(0.06, 0.02)):
    model = linear()
    groups = [{"params": [p], "lr": lr} for p, lr in zip(model.parameters(), lrs, strict=True)]
    return model, torch.optim.SGD(groups, lr=1.0)


@pytest.mark.usefixtures("alone")
def test_the_divided_learning_rate_is_in_the_groups_during_the_inner_step_only():
    model, inner = two_groups()
    model, opt = build(model, inner, warmup_steps=2)
    rates = lambda: [group["lr"] for group in inner.param_groups]  # noqa: E731
    inside = []
    inner.register_step_pre_hook(lambda *_: inside.append(rates()))
    opt.register_step_pre_hook(lambda *_: inside.append(rates()))
    for batch in batches() * 3:
        take_step(model, opt, batch)
        outer_view, inner_view = inside[-2:]
        assert outer_view == rates() == [0.06, 0.02]
        share = 1 if opt.gradient_steps <= 2 else 1 - 0.3
        assert inner_view == [0.06 / share, 0.02 / share]


@pytest.mark.usefixtures("alone")
def test_a_tensor_learning_rate_is_put_back_as_the_same_tensor():
    model = linear()
    lr = torch.tensor(0.01, dtype=torch.float64)
    model, opt = build(model, torch.optim.AdamW(model.parameters(), lr=lr, foreach=False))
    for batch in batches():
        take_step(model, opt, batch)
    assert opt.param_groups[0]["lr"] is lr
    assert lr.item() == 0.01


class Flaky(torch.optim.SGD):
    """Fails at the inner steps it is told to, before it changes anything."""

    fail = frozenset()
    calls = 0

    def step(self, closure=None):
        self.calls += 1
        if self.calls in self.fail:
            raise OSError("the disk is full")
        return super().step(closure)


@pytest.mark.parametrize("warmup", [0, 10])
@pytest.mark.usefixtures("alone")
def test_an_inner_step_that_raises_leaves_rate_clock_and_model_as_they_were(warmup):
    model = linear()
    inner = Flaky(model.parameters(), lr=LR)
    # no mixing step stands before the failing gradient step, which would rightly have ticked
    model, opt = build(model, inner, seed=seed_with([False, False]), warmup_steps=warmup)
    inner.fail = {2}
    data = batches()
    take_step(model, opt, data[0])
    before = vector(model)
    with pytest.raises(OSError, match="disk"):
        take_step(model, opt, data[1])
    assert inner.param_groups[0]["lr"] == LR
    assert (opt.clock, opt.gradient_steps) == (1, 1)
    np.testing.assert_array_equal(vector(model), before)


@pytest.mark.usefixtures("alone")
def test_a_step_tried_again_after_an_inner_failure_goes_on_as_if_nothing_had_happened():
    ends = []
    for fail in (set(), {1, 2, 5, 9, 10, 20}):
        model = linear()
        inner = Flaky(model.parameters(), lr=LR, momentum=0.9)
        model, opt = build(model, inner)
        inner.fail = fail
        for batch in palsgd.until(batches(), opt, steps=40):
            while True:
                try:
                    take_step(model, opt, batch)
                    break
                except OSError:
                    assert inner.param_groups[0]["lr"] == LR
        ends.append((vector(model), opt.clock, opt.gradient_steps, opt.ledger.mixing_steps))
    np.testing.assert_array_equal(ends[0][0], ends[1][0])
    assert ends[0][1:] == ends[1][1:]


# -- mixing ----------------------------------------------------------------------------------------


def seed_with(start, **rules):
    """The first seed whose first round begins like this."""
    rules = RULES | rules
    return next(
        s for s in range(10_000) if plan_of(rules | {"seed": s}, 0)[: len(start)] == list(start)
    )


@pytest.mark.usefixtures("alone")
def test_beta_comes_from_the_undivided_learning_rate_of_the_tensors_own_group():
    model, inner = two_groups()
    model, opt = build(model, inner, seed=seed_with([False, True, False]))
    anchor = [p.detach().clone() for p in model.parameters()]
    stepped = []
    inner.register_step_post_hook(
        lambda *_: stepped.extend(p.detach().clone() for p in model.parameters())
    )
    take_step(model, opt, batches()[0])
    assert opt.clock == 2
    betas = [0.06 * 2.0 / 0.3, 0.02 * 2.0 / 0.3]
    for p, x, a, beta in zip(model.parameters(), stepped, anchor, betas, strict=True):
        assert not torch.equal(x, a)
        torch.testing.assert_close(p.detach(), x - beta * (x - a), rtol=1e-14, atol=1e-15)
    assert (opt.ledger.beta_min, opt.ledger.beta_max) == pytest.approx((betas[1], betas[0]))


@pytest.mark.parametrize("run", [2, 3, 4])
@pytest.mark.usefixtures("alone")
def test_mixing_steps_in_a_row_are_one_interpolation(run):
    model, opt = build(seed=seed_with([False] + [True] * run + [False]))
    anchor, stepped = flat(model), []
    opt.inner.register_step_post_hook(lambda *_: stepped.append(flat(model)))
    take_step(model, opt, batches()[0])
    assert opt.clock == 1 + run
    x, beta = stepped[0], LR * 2.0 / 0.3
    for _ in range(run):  # one by one, as Algorithm 1 has it
        x = x - beta * (x - anchor)
    torch.testing.assert_close(flat(model), x, rtol=1e-14, atol=1e-15)
    weight = 1 - (1 - beta) ** run
    torch.testing.assert_close(
        flat(model), stepped[0] + weight * (anchor - stepped[0]), rtol=1e-14, atol=1e-15
    )


@settings(deadline=None)
@given(
    st.lists(st.floats(0, 1), min_size=1, max_size=6),
    st.lists(st.tuples(st.floats(-9, 9), st.floats(-9, 9)), min_size=1, max_size=4),
)
def test_the_collapsed_weight_equals_mixing_step_by_step(betas, pairs):
    x, a = torch.tensor(pairs, dtype=torch.float64).unbind(dim=1)
    once, stepwise = x.clone(), x.clone()
    mix_([once], [a], collapsed(tuple(betas)))
    for beta in betas:
        mix_([stepwise], [a], beta)
    torch.testing.assert_close(once, stepwise, rtol=1e-12, atol=1e-12)


@pytest.mark.usefixtures("alone")
def test_a_beta_of_one_puts_the_local_model_on_the_anchor():
    rules = dict(mix_prob=0.3, mix_rate=0.3 / LR)
    model, opt = build(seed=seed_with([False, True, False]), **rules)
    anchor = vector(model)
    take_step(model, opt, batches()[0])
    assert opt.clock == 2
    np.testing.assert_array_equal(vector(model), anchor)


@pytest.mark.parametrize("mix_rate", [64.0, 10.5])
@pytest.mark.usefixtures("alone")
def test_beta_above_one_is_refused_with_group_value_and_the_largest_mix_rate(mix_rate):
    model, inner = two_groups(lrs=(0.001, 0.02))
    with pytest.raises(ValueError, match="outside") as caught:
        palsgd.PALSGD(model, inner, sync_every=4, mix_prob=0.2, mix_rate=mix_rate)
    message = str(caught.value)
    assert "group 1" in message
    assert f"beta={0.02 * mix_rate / 0.2:.4g}" in message
    assert f"mix_rate={mix_rate:g}" in message
    assert message.endswith("mix_rate <= 10")


@pytest.mark.parametrize(("lr", "prob"), [(0.02, 0.2), (0.03, 0.2), (0.007, 0.05), (1e-3, 0.025)])
@pytest.mark.usefixtures("alone")
def test_the_largest_mix_rate_that_the_error_names_is_accepted(lr, prob):
    build_with = lambda eta: palsgd.PALSGD(  # noqa: E731
        model, sgd(model, lr), sync_every=4, mix_prob=prob, mix_rate=eta
    )
    model = linear()
    with pytest.raises(ValueError, match="outside") as caught:
        build_with(1000.0)
    largest = float(re.search(r"mix_rate <= (\S+)$", str(caught.value)).group(1))
    assert largest == pytest.approx(prob / lr, rel=1e-3)
    build_with(largest)


@pytest.mark.usefixtures("alone")
def test_beta_is_checked_again_when_a_schedule_has_raised_the_learning_rate():
    model, opt = build(seed=seed_with([False, True]))
    opt.param_groups[0]["lr"] = 0.3
    with pytest.raises(ValueError, match=r"beta=2, .*group 0 \(lr=0.3.*mix_rate <= 1$"):
        take_step(model, opt, batches()[0])
    assert opt.param_groups[0]["lr"] == 0.3


@pytest.mark.usefixtures("alone")
def test_beta_below_zero_is_refused():
    model, opt = build(seed=seed_with([False, True]))
    opt.param_groups[0]["lr"] = -0.03
    with pytest.raises(ValueError, match=r"beta=-0.2, .*group 0 .*use a learning rate >= 0$"):
        take_step(model, opt, batches()[0])


@pytest.mark.usefixtures("alone")
def test_without_mixing_steps_no_mix_rate_is_refused_or_changes_anything():
    found = []
    for mix_rate in (1e9, 1.0):
        model, opt = build(mix_prob=0.0, mix_rate=mix_rate)
        train(model, opt, batches(), 20)
        found.append(vector(model))
    np.testing.assert_array_equal(*found)


# -- schedules -------------------------------------------------------------------------------------


@pytest.mark.usefixtures("alone")
def test_a_lambda_of_the_clock_is_a_schedule():
    model, opt = build(warmup_steps=3)
    factor = lambda t: 1 / (1 + 0.1 * t)  # noqa: E731
    schedule = torch.optim.lr_scheduler.LambdaLR(opt, lambda _: factor(opt.clock))
    inside = []
    opt.inner.register_step_pre_hook(lambda o, *_: inside.append(o.param_groups[0]["lr"]))
    for batch in palsgd.until(batches(), opt, steps=30):
        before = opt.clock
        take_step(model, opt, batch)
        assert inside[-1] == LR * factor(before) / (1 if opt.gradient_steps <= 3 else 1 - 0.3)
        schedule.step()
        assert opt.param_groups[0]["lr"] == opt.inner.param_groups[0]["lr"]
        assert opt.param_groups[0]["lr"] == LR * factor(opt.clock)
    assert opt.ledger.mixing_steps > 0


@pytest.mark.usefixtures("alone")
def test_a_scheduler_given_to_the_optimizer_is_stepped_once_per_tick():
    ticks = []
    build_schedule = lambda opt: torch.optim.lr_scheduler.LambdaLR(  # noqa: E731
        opt, lambda t: ticks.append(t) or 1.0
    )
    model, opt = build(warmup_steps=3, mix_rate=None, pull=0.3, scheduler=build_schedule)
    train(model, opt, batches(), 30)
    assert ticks == list(range(31))


def test_a_learning_rate_that_is_set_during_the_inner_step_is_kept():
    """The rate is divided by 1 - p for that step, and put back unless it is another by then."""
    model = linear()
    inner = torch.optim.SGD(model.parameters(), lr=0.1)
    opt = palsgd.PALSGD(
        model, inner, sync_every=8, mix_prob=0.3, mix_rate=0.5, transport=palsgd.Alone()
    )
    mse(model, batches(0)[0]).backward()
    opt.step()
    assert inner.param_groups[0]["lr"] == 0.1
    inner.register_step_post_hook(lambda *_: inner.param_groups[0].update(lr=0.02))
    opt.step()
    assert inner.param_groups[0]["lr"] == 0.02

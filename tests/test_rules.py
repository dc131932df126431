"""The rules table of the design, row by row."""

import copy
import math
import re
from functools import partial

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import palsgd
from palsgd.pseudo_async import collapsed
from palsgd.replica import mix_
from problems import batches, global_vector, linear, mse, net, train, vector

LR = 0.05
RULES = dict(sync_every=6, mix_prob=0.3, mix_rate=2.0, seed=11)


@pytest.fixture(scope="module")
def alone():
    """This process as the only worker."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def sgd(model, lr=LR, **settings):
    return torch.optim.SGD(model.parameters(), lr=lr, **settings)


def build(model=None, inner=None, **rules):
    model = linear() if model is None else model
    return model, palsgd.PALSGD(model, inner or sgd(model, momentum=0.9), **(RULES | rules))


def plan_of(rules, round, worker=0):
    chosen = {k: rules[k] for k in ("seed", "sync_every", "mix_prob")}
    draws = rules.get("draws", "balanced")
    return palsgd.round_plan(worker=worker, round=round, draws=draws, **chosen)


def take_step(model, opt, batch):
    opt.zero_grad()
    mse(model, batch).backward()
    return opt.step()


def mean_of(tensor):
    """Over all processes, the slow and obvious way."""
    parts = [torch.zeros_like(tensor) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, tensor)
    return torch.stack(parts).mean(dim=0)


def flat(model):
    return nn.utils.parameters_to_vector(model.parameters()).detach().clone()


# -- clock -------------------------------------------------------------------------------------


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


# -- learning rate -----------------------------------------------------------------------------


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


# -- mixing ------------------------------------------------------------------------------------


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
def test_without_mixing_steps_no_mix_rate_is_refused():
    build(mix_prob=0.0, mix_rate=1e9)


# -- schedules ---------------------------------------------------------------------------------


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
    model, opt = build(warmup_steps=3, scheduler=build_schedule)
    train(model, opt, batches(), 30)
    assert ticks == list(range(31))


# -- the end of training -----------------------------------------------------------------------


def unequal_job(lengths, steps, **rules):
    model, opt = build(**rules)
    data = batches()[: lengths[dist.get_rank()]]
    train(model, opt, data, steps)
    return global_vector(model, opt), opt.clock, opt.gradient_steps, opt.rounds


@pytest.mark.parametrize("steps", [60, 62])
def test_unequal_loaders_and_gradient_counts_end_on_the_same_clock(world, steps):
    got = world.run(unequal_job, workers=3, lengths=[1, 3, 5], steps=steps, draws="independent")
    assert {clock for _, clock, _, _ in got} == {steps}
    assert {rounds for *_, rounds in got} == {math.ceil(steps / 6)}
    assert len({gradients for _, _, gradients, _ in got}) > 1
    for other in got[1:]:
        np.testing.assert_array_equal(got[0][0], other[0])


class Epochs:
    """A loader that shuffles by an epoch it must be told."""

    def __init__(self, data, attribute):
        self.data, self.told, self.passes = data, [], 0
        setattr(self, attribute, self)

    def set_epoch(self, epoch):
        self.told.append(epoch)

    def __iter__(self):
        self.passes += 1
        return iter(self.data)


@pytest.mark.parametrize("attribute", ["sampler", "batch_sampler"])
@pytest.mark.usefixtures("alone")
def test_until_goes_over_the_loader_again_and_tells_its_sampler_the_epoch(attribute):
    model, opt = build(mix_prob=0.0)
    loader = Epochs(batches()[:4], attribute)
    train(model, opt, loader, 14)
    assert loader.told == [0, 1, 2, 3]
    assert loader.passes == 4
    assert opt.gradient_steps == 14


@pytest.mark.usefixtures("alone")
def test_until_feeds_a_distributed_sampler_of_torch():
    data = torch.utils.data.TensorDataset(*batches()[0])
    sampler = torch.utils.data.DistributedSampler(data, 1, 0, seed=4)
    loader = torch.utils.data.DataLoader(data, batch_size=3, sampler=sampler)
    model, opt = build(mix_prob=0.0)
    train(model, opt, loader, 6)
    assert sampler.epoch == 2


@pytest.mark.usefixtures("alone")
def test_steps_that_cut_a_round_short_end_with_one_shorter_round():
    model, opt = build(warmup_steps=4)
    train(model, opt, batches(), 4 + 6 * 3 + 2)
    assert opt.clock == 24
    assert opt.synced
    assert [entry["steps"] for entry in opt.ledger.history] == [6, 6, 6, 2]
    assert [entry["clock"] for entry in opt.ledger.history] == [10, 16, 22, 24]


@pytest.mark.usefixtures("alone")
def test_until_stops_at_once_when_the_clock_is_there():
    model, opt = build()
    train(model, opt, batches(), 12)
    assert list(palsgd.until(batches(), opt, steps=12)) == []
    assert list(palsgd.until([], opt, steps=0)) == []


@pytest.mark.usefixtures("alone")
def test_a_loader_that_runs_dry_is_named_with_the_clock():
    model, opt = build(mix_prob=0.0)
    with pytest.raises(ValueError, match=r"ran dry at clock 5 of 20 .*can be iterated again"):
        train(model, opt, iter(batches()), 20)
    model, opt = build()
    with pytest.raises(ValueError, match="ran dry at clock 0 of 20"):
        train(model, opt, [], 20)


@pytest.mark.parametrize("steps", [-1, 2.5, None])
@pytest.mark.usefixtures("alone")
def test_until_refuses_steps_that_are_not_a_whole_number(steps):
    _, opt = build()
    with pytest.raises(ValueError, match=f"steps={steps!r}"):
        next(palsgd.until(batches(), opt, steps=steps))


# -- AMP ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("warmup", [0, 100])
@pytest.mark.usefixtures("alone")
def test_a_step_that_the_grad_scaler_skips_leaves_clock_and_model_untouched(warmup):
    model, opt = build(linear(torch.float32), warmup_steps=warmup)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=1000)
    for i, batch in enumerate(batches(dtype=torch.float32)):
        opt.zero_grad()
        scaler.scale(mse(model, batch) * (math.inf if i in (0, 3) else 1)).backward()
        before, clock = vector(model), opt.clock
        scaler.step(opt)
        scaler.update()
        if i in (0, 3):
            assert opt.clock == clock
            np.testing.assert_array_equal(vector(model), before)
        else:
            assert opt.clock > clock
            assert (vector(model) != before).any()
    assert opt.gradient_steps == 3
    assert scaler.get_scale() == 2.0


@pytest.mark.usefixtures("alone")
def test_scaled_training_equals_unscaled_training():
    ends = []
    for enabled in (True, False):
        model, opt = build(linear(torch.float32))
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, enabled=enabled)
        for batch in palsgd.until(batches(dtype=torch.float32), opt, steps=18):
            opt.zero_grad()
            scaler.scale(mse(model, batch)).backward()
            scaler.step(opt)
            scaler.update()
        ends.append(vector(model))
    np.testing.assert_array_equal(*ends)  # a power of two costs no bits


# -- clipping ----------------------------------------------------------------------------------


def clipped_job(steps, max_norm):
    ours, twin = linear(), DistributedDataParallel(linear())
    opt = palsgd.DDP(ours, sgd(ours, momentum=0.9), max_norm=max_norm)
    bare = sgd(twin, momentum=0.9)
    clipped = 0
    for batch in batches() * (steps // 5):
        take_step(ours, opt, batch)
        bare.zero_grad()
        mse(twin, batch).backward()
        clipped += int(nn.utils.clip_grad_norm_(twin.parameters(), max_norm) > max_norm)
        bare.step()
    return vector(ours), vector(twin), clipped


@pytest.mark.parametrize("workers", [2, 3])
def test_max_norm_clips_the_averaged_gradient_as_torch_ddp_and_clip_grad_norm_do(world, workers):
    for ours, twin, clipped in world.run(clipped_job, workers=workers, steps=10, max_norm=0.5):
        np.testing.assert_allclose(ours, twin, rtol=1e-12)
        assert clipped >= 3


@pytest.mark.usefixtures("alone")
def test_max_norm_clips_the_local_gradient_in_the_local_phase():
    model, opt = build(mix_prob=0.0, sync_every=100, max_norm=0.5)
    twin = linear()
    bare = sgd(twin, momentum=0.9)
    for batch in batches():
        take_step(model, opt, batch)
        bare.zero_grad()
        mse(twin, batch).backward()
        nn.utils.clip_grad_norm_(twin.parameters(), 0.5)
        bare.step()
    np.testing.assert_array_equal(vector(model), vector(twin))


# -- warm-up -----------------------------------------------------------------------------------


def bare_ddp(model, data, **wrap):
    """The trusted twin: torch's DDP and the inner optimizer, nothing of ours."""
    model = DistributedDataParallel(model, **wrap)
    inner = sgd(model, momentum=0.9)
    for batch in data:
        inner.zero_grad()
        mse(model, batch).backward()
        inner.step()
    return vector(model)


def warmup_job(steps, **rules):
    data, found = batches() * 4, {}
    for name, wrap in (("wrapped", DistributedDataParallel), ("plain", lambda m: m)):
        model = wrap(net(dtype=torch.float64))
        model, opt = build(model, warmup_steps=steps, **rules)
        for batch in data[:steps]:
            take_step(model, opt, batch)
        assert opt.gradient_steps == opt.ledger.warmup_steps == steps
        found[name] = vector(model)
        for batch in palsgd.until(data[steps:], opt, steps=steps + 18):
            take_step(model, opt, batch)
        found[name + " afterwards"] = global_vector(model, opt)
    found["torch"] = bare_ddp(net(dtype=torch.float64), data[:steps])
    return found


@pytest.mark.parametrize("bucket_mb", [128, 1e-4])
@pytest.mark.parametrize("workers", [2, 3])
def test_warmup_through_ddp_equals_bucketed_averaging_equals_torch_ddp_alone(
    world, workers, bucket_mb
):
    """Bit for bit at K = 2, where halving is exact; torch divides before it adds, we after."""
    same = (
        np.testing.assert_array_equal
        if workers == 2
        else partial(np.testing.assert_allclose, rtol=1e-11, atol=1e-13)
    )
    for found in world.run(warmup_job, workers=workers, steps=7, bucket_mb=bucket_mb):
        same(found["wrapped"], found["torch"])
        same(found["plain"], found["torch"])
        same(found["wrapped afterwards"], found["plain afterwards"])


def local_gradient(model, batch):
    model.zero_grad()
    mse(model, batch).backward()
    return torch.cat([p.grad.reshape(-1).clone() for p in model.parameters()])


def switch_job(warmup):
    """Is the gradient that backward leaves the mean over the workers, or this worker's own?"""
    model = DistributedDataParallel(net(dtype=torch.float64))
    model, opt = build(model, warmup_steps=warmup, mix_prob=0.0)
    kept, found = None, []
    for step, batch in enumerate(batches()):
        found.append(whose_gradient(model, batch))
        if step == 1:
            kept = copy.deepcopy(opt.state_dict())
        opt.step()
    opt.load_state_dict(kept)
    found.append(whose_gradient(model, batches()[0]))
    return found


def whose_gradient(model, batch):
    twin = net(dtype=torch.float64)
    twin.load_state_dict(model.module.state_dict())
    own, got = local_gradient(twin, batch), local_gradient(model, batch)
    mean = mean_of(own)
    if torch.equal(got, own):
        return "own"
    return "mean" if torch.allclose(got, mean, rtol=1e-12) else "neither"


def test_gradient_sync_is_off_after_the_warmup_and_on_again_when_its_state_is_loaded(world):
    for found in world.run(switch_job, workers=2, warmup=2):
        assert found == ["mean", "mean", "own", "own", "own", "mean"]


def broadcast_job(warmup, steps):
    """BatchNorm statistics beside those of a model that never hears of another worker."""
    model = DistributedDataParallel(net(dtype=torch.float64))
    model, opt = build(model, warmup_steps=warmup, mix_prob=0.0, sync_every=50)
    for batch in batches()[:warmup]:
        take_step(model, opt, batch)
    twin = net(dtype=torch.float64)
    twin.load_state_dict(model.module.state_dict())
    for batch in batches()[:steps]:
        mse(twin, batch)  # forward alone; the weights are set by hand
        take_step(model, opt, batch)
        twin_norm, norm = twin[1], model.module[1]
        assert torch.equal(twin_norm.running_mean, norm.running_mean)
        assert torch.equal(twin_norm.running_var, norm.running_var)
        with torch.no_grad():
            for mine, theirs in zip(twin.parameters(), model.parameters(), strict=True):
                mine.copy_(theirs)
    return norm.running_mean.numpy()


@pytest.mark.parametrize("warmup", [0, 2])
def test_no_buffer_is_broadcast_after_the_warmup(world, warmup):
    means = world.run(broadcast_job, workers=2, warmup=warmup, steps=3)
    assert (means[0] != means[1]).all()


class Branches(nn.Module):
    """`one` is used by worker 0 only, `none` by nobody."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.trunk, self.one, self.none = nn.Linear(4, 3), nn.Linear(4, 3), nn.Linear(4, 3)

    def forward(self, x):
        return self.trunk(x) + self.one(x) if dist.get_rank() == 0 else self.trunk(x)


def unused_job(steps, bucket_mb):
    decay = dict(lr=0.01, weight_decay=0.1)  # decays what has a gradient, were it zero
    ours, twin = (
        Branches().double(),
        DistributedDataParallel(Branches().double(), find_unused_parameters=True),
    )
    opt = palsgd.DDP(ours, torch.optim.AdamW(ours.parameters(), **decay), bucket_mb=bucket_mb)
    bare = torch.optim.AdamW(twin.parameters(), **decay)
    for batch in batches() * (steps // 5):
        take_step(ours, opt, batch)
        bare.zero_grad()
        mse(twin, batch).backward()
        bare.step()
    assert ours.none.weight.grad is None
    assert ours.one.weight.grad is not None
    return vector(ours), vector(twin), vector(ours.none)


@pytest.mark.parametrize("bucket_mb", [128, 1e-4])
def test_parameters_unused_on_one_rank_or_on_all_are_treated_as_torch_ddp_does(world, bucket_mb):
    found = world.run(unused_job, workers=2, steps=10, bucket_mb=bucket_mb)
    for ours, twin, _ in found:
        np.testing.assert_array_equal(ours, twin)
    np.testing.assert_array_equal(found[0][0], found[1][0])
    np.testing.assert_array_equal(found[0][2], vector(Branches().double().none))


# -- one code path -----------------------------------------------------------------------------


def ddp_job(steps, wrapped, make_inner):
    data = batches(dtype=torch.float32) * (steps // 5)
    ours = net()
    ours = DistributedDataParallel(ours) if wrapped else ours
    opt = palsgd.DDP(ours, make_inner(ours.parameters()))
    train(ours, opt, data, steps)
    twin = DistributedDataParallel(net())
    bare = make_inner(twin.parameters())
    for batch in data:
        bare.zero_grad()
        mse(twin, batch).backward()
        bare.step()
    return vector(ours), vector(twin), opt.clock, opt.rounds


@pytest.mark.parametrize("wrapped", [True, False])
@pytest.mark.parametrize(
    "make_inner",
    [partial(torch.optim.SGD, lr=LR, momentum=0.9), partial(torch.optim.AdamW, lr=0.01)],
    ids=["momentum", "adamw"],
)
def test_ddp_is_torch_ddp_with_the_inner_optimizer_over_20_steps(world, wrapped, make_inner):
    found = world.run(ddp_job, workers=2, steps=20, wrapped=wrapped, make_inner=make_inner)
    for ours, twin, clock, rounds in found:
        np.testing.assert_array_equal(ours, twin)
        assert (clock, rounds) == (20, 0)


def local_sgd_job(rounds, every):
    """A round of Local SGD by hand: each worker trains alone, then models are averaged."""
    ours, twin, data = linear(), linear(), batches()
    opt = palsgd.LocalSGD(ours, sgd(ours, momentum=0.9), sync_every=every)
    bare = sgd(twin, momentum=0.9)
    for step in range(rounds * every):
        batch = data[step % len(data)]
        take_step(ours, opt, batch)
        bare.zero_grad()
        mse(twin, batch).backward()
        bare.step()
        if (step + 1) % every == 0:
            nn.utils.vector_to_parameters(mean_of(flat(twin)), twin.parameters())
    return vector(ours), vector(twin)


@pytest.mark.parametrize("workers", [1, 2, 3, 4])
def test_local_sgd_is_the_mean_of_independently_trained_models(world, workers):
    for ours, twin in world.run(local_sgd_job, workers=workers, rounds=4, every=3):
        np.testing.assert_allclose(ours, twin, rtol=1e-12, atol=1e-14)


def identity_job(make_one, make_other, steps):
    ends = []
    for make in (make_one, make_other):
        model = net()
        opt = make(model, torch.optim.AdamW(model.parameters(), lr=0.01))
        train(model, opt, batches(dtype=torch.float32), steps)
        ends.append((global_vector(model, opt), opt.clock, opt.gradient_steps, opt.rounds))
    return ends


def plain_sgd(params):
    return torch.optim.SGD(params, lr=1.0)


IDENTITIES = {
    "diloco is palsgd without mixing": (
        partial(palsgd.DiLoCo, sync_every=4, warmup_steps=3),
        partial(
            palsgd.PALSGD, sync_every=4, warmup_steps=3, mix_prob=0.0, mix_rate=3.0, seed=9,
            draws="independent",
        ),
    ),
    "local sgd is diloco with outer sgd of rate 1": (
        partial(palsgd.LocalSGD, sync_every=4, warmup_steps=3),
        partial(palsgd.DiLoCo, sync_every=4, warmup_steps=3, outer=plain_sgd),
    ),
    "ddp is a warm-up that never ends": (
        palsgd.DDP,
        partial(palsgd.PALSGD, sync_every=4, mix_prob=0.2, mix_rate=1.0, warmup_steps=1000),
    ),
}  # fmt: skip


@pytest.mark.parametrize("identity", IDENTITIES)
def test_methods_are_special_cases_of_one_another_bit_for_bit(world, identity):
    one, other = IDENTITIES[identity]
    for first, second in world.run(
        identity_job, workers=2, make_one=one, make_other=other, steps=21
    ):
        np.testing.assert_array_equal(first[0], second[0])
        assert first[1:] == second[1:]


def inert_mixing_job(steps, **rules):
    """Mixing steps of weight 0 only pass time: fewer gradient steps, each at lr / (1 - p)."""
    ours, opt = build(mix_rate=0.0, outer=plain_sgd, draws="independent", **rules)
    train(ours, opt, batches(), steps)
    twin, data, used = linear(), batches(), 0
    bare = sgd(twin, lr=LR / (1 - 0.3), momentum=0.9)
    for round in range(steps // 6):
        drawn = RULES | {"draws": "independent"}
        for _ in range(plan_of(drawn, round, worker=dist.get_rank()).count(False)):
            bare.zero_grad()
            mse(twin, data[used % len(data)]).backward()
            bare.step()
            used += 1
        nn.utils.vector_to_parameters(mean_of(flat(twin)), twin.parameters())
    assert opt.gradient_steps == used
    return vector(ours), vector(twin), used


def test_palsgd_with_mix_rate_zero_is_local_sgd_with_fewer_gradients_at_a_higher_rate(world):
    found = world.run(inert_mixing_job, workers=2, steps=30)
    for ours, twin, _ in found:
        np.testing.assert_allclose(ours, twin, rtol=1e-12, atol=1e-14)
    assert found[0][2] != found[1][2]


# -- ledger ------------------------------------------------------------------------------------


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
        header = 4 * width * 2  # four numbers for each of two workers
        assert per_sync == [width * elements + header] * 3
        assert ledger.bytes_sent == sum(per_sync) + header  # and once to open the local phase
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


# -- anchor_weights ----------------------------------------------------------------------------


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

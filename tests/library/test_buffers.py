"""Buffers at a sync: averaged, local or recomputed, and never silently reset."""

import copy
import math
import warnings

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.swa_utils import update_bn
from torch.utils._python_dispatch import TorchDispatchMode

import palsgd
from palsgd.buffers import Buffers
from support.problems import batches, mse, net, train, vector

H = 4


class Counters(nn.Module):
    """Every kind of buffer a model may carry."""

    def __init__(self, worker):
        super().__init__()
        torch.manual_seed(0)
        self.linear = nn.Linear(4, 3)
        for name, value in values(worker).items():
            self.register_buffer(name, value)
        self.register_buffer("mask", torch.full((2,), 1.0 + worker), persistent=False)
        self.register_buffer("table", torch.tensor([worker, 7]), persistent=False)
        self.register_buffer("absent", None)

    def forward(self, x):
        return self.linear(x)


def values(worker):
    """Worker 0's integers are hard to carry in a float; the others' are something else."""
    i64, big = torch.int64, 2**53 + 1
    if worker == 0:
        integers = dict(
            int64s=torch.tensor([big, -big, 2**63 - 1, -(2**63), 0, -1], dtype=i64),
            scalar=torch.tensor(2**40 + 3),
            int32s=torch.tensor([2**31 - 1, -(2**31), -1, 65536], dtype=torch.int32),
            int16s=torch.tensor([32767, -32768, -1], dtype=torch.int16),
            int8s=torch.tensor([127, -128, -1], dtype=torch.int8),
            uint8s=torch.tensor([255, 0, 128], dtype=torch.uint8),
            flags=torch.tensor([[True, False], [False, True]]),
        )
    else:
        kinds = values(0)
        integers = {k: torch.full_like(kinds[k], worker) for k in kinds if k in INTEGERS}
    floats = dict(
        fp32=torch.tensor([[1.0, -2.5, 1e-3]]) * (worker + 1),
        bf16=torch.tensor([1.0, 2.0], dtype=torch.bfloat16) * (worker + 1),
        fp64=torch.tensor(0.25, dtype=torch.float64) * (worker + 1),
        fp8=(torch.tensor([0.5, -1.0]) * (worker + 1)).to(torch.float8_e4m3fn),
    )
    return integers | floats


INTEGERS = ("int64s", "scalar", "int32s", "int16s", "int8s", "uint8s", "flags")


def sgd(model):
    return torch.optim.SGD(model.parameters(), lr=0.05)


def buffers_of(model):
    return {name: b.clone() for name, b in model.named_buffers()}


def equal(a, b):
    assert a.keys() == b.keys()
    for name in a:
        assert a[name].dtype == b[name].dtype, name
        assert torch.equal(a[name], b[name]), f"{name}: {a[name]} is not {b[name]}"


# -- average -----------------------------------------------------------------------------------


def counters_job(policy, warmup, bucket_mb):
    worker = dist.get_rank()
    model = Counters(0)
    places = {name: b.data_ptr() for name, b in model.named_buffers()}
    opt = palsgd.DiLoCo(
        model, sgd(model), sync_every=1, warmup_steps=warmup, buffers=policy, bucket_mb=bucket_mb
    )
    for name, own in Counters(worker).named_buffers():
        model.get_buffer(name).copy_(own)
    a, y = batches(dtype=torch.float32)[0]
    mse(model, (a, y)).backward()
    opt.step()
    assert {name: b.data_ptr() for name, b in model.named_buffers()} == places
    assert model.absent is None
    assert model.fp8.dtype == torch.float8_e4m3fn
    # torch cannot pickle float8, nor compare two of them.
    return buffers_of(model) | {"fp8": model.fp8.double()}, opt.clock, opt.rounds


@pytest.mark.parametrize("bucket_mb", [128, 8 / 2**20])
@pytest.mark.parametrize("warmup", [0, 1])
@pytest.mark.parametrize("workers", [1, 2, 3, 4])
def test_average_is_the_mean_of_floats_and_worker_0s_integers_to_the_bit(
    world, workers, warmup, bucket_mb
):
    """At a sync, and at a step of the warm-up, where step() averages gradients."""
    found = world.run(
        counters_job, workers=workers, policy="average", warmup=warmup, bucket_mb=bucket_mb
    )
    for worker, (got, clock, rounds) in enumerate(found):
        assert (clock, rounds) == (1, 1 - warmup)
        for name in INTEGERS:
            assert torch.equal(got[name], values(0)[name]), (name, got[name])
        for name in ("fp32", "bf16", "fp64", "fp8"):
            mean = torch.stack([values(k)[name].double() for k in range(workers)]).mean(dim=0)
            expected = mean.to(values(0)[name].dtype)
            expected = expected.double() if name == "fp8" else expected
            torch.testing.assert_close(got[name], expected)
        assert got["mask"].tolist() == [1.0 + worker] * 2  # not persistent: the code's own
        assert got["table"].tolist() == [worker, 7]


class Computing(TorchDispatchMode):
    """Counts the operators that compute something: each is a kernel on a GPU."""

    VIEWS = ("view", "split", "detach", "slice", "_unsafe_view")

    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.count += function.overloadpacket.__name__.split(".")[0] not in self.VIEWS
        return function(*args, **(kwargs or {}))


def operators_of(layers):
    model = nn.Sequential(*(nn.BatchNorm1d(3) for _ in range(layers)))
    found, like = Buffers(model, "average"), torch.empty(0)
    with torch.no_grad(), Computing() as computing:
        found.nonfinite()
        found.decode(found.encode(0, like), workers=1, contributors=1)
        found.copy_to_local()
    return computing.count


def test_types_that_torch_cannot_copy_many_of_at_once_are_set_too():
    model = nn.Module()
    model.register_buffer("few", torch.tensor([65535, 7], dtype=torch.uint16))
    model.register_buffer("turned", torch.tensor([1 + 2j, 3 - 4j]).conj().imag)
    found, like = Buffers(model, "average"), torch.empty(0)
    message = found.encode(0, like)
    model.few.zero_()
    model.turned.zero_()
    found.decode(message, workers=1, contributors=1)
    assert model.few.tolist() == [65535, 7]
    assert model.turned.tolist() == [-2.0, 4.0]


def test_a_sync_of_many_buffers_takes_as_many_operators_as_one_of_few():
    assert operators_of(50) <= operators_of(2) + 3
    assert operators_of(50) < 50


@pytest.mark.parametrize("policy", ["local", "recompute"])
def test_other_policies_leave_every_buffer_alone_at_a_sync(world, policy):
    found = world.run(counters_job, workers=2, policy=policy, warmup=0, bucket_mb=128)
    for worker, (got, _, rounds) in enumerate(found):
        assert rounds == 1
        persistent, own = {name: got[name] for name in values(0)}, values(worker)
        equal(persistent, own | {"fp8": own["fp8"].double()})


def norm_job(policy, steps):
    """BatchNorm in training, with what each forward made of the statistics noted by hand."""
    model = net()
    opt = palsgd.DiLoCo(model, sgd(model), sync_every=H, buffers=policy)
    twin = copy.deepcopy(model)
    for batch in palsgd.until(batches(dtype=torch.float32), opt, steps=steps):
        before = buffers_of(model)
        twin.load_state_dict(model.state_dict())
        mse(twin, batch)
        mse(model, batch).backward()
        equal(buffers_of(model), buffers_of(twin))
        opt.step()
        opt.zero_grad()
        if not opt.synced:
            equal(buffers_of(model), buffers_of(twin))
        assert (before["1.running_mean"] != model[1].running_mean).any()
    return buffers_of(twin), buffers_of(model)


@pytest.mark.parametrize("workers", [2, 3])
def test_batch_norm_statistics_are_averaged_at_a_sync_and_left_alone_between(world, workers):
    found = world.run(norm_job, workers=workers, policy="average", steps=3 * H)
    for name in ("1.running_mean", "1.running_var"):
        mean = torch.stack([mine[name] for mine, _ in found]).mean(dim=0)
        for mine, synced in found:
            torch.testing.assert_close(synced[name], mean)
            assert not torch.equal(mine[name], synced[name])
    for _, synced in found:
        equal(synced, found[0][1])  # the same bits on every worker
        assert synced["1.num_batches_tracked"] == 3 * H


def test_local_batch_norm_statistics_are_never_touched(world):
    found = world.run(norm_job, workers=2, policy="local", steps=3 * H)
    for mine, after in found:
        equal(mine, after)
    assert not torch.equal(found[0][1]["1.running_mean"], found[1][1]["1.running_mean"])


def unequal_counts_job():
    model = net()
    opt = palsgd.DiLoCo(model, sgd(model), sync_every=H)
    for batch in palsgd.until(batches(dtype=torch.float32), opt, steps=H):
        for _ in range(1 + dist.get_rank()):  # worker 1 sees two batches where worker 0 sees one
            mse(model, batch).backward()
        opt.step()
        opt.zero_grad()
    return int(model[1].num_batches_tracked)


def test_the_count_of_batches_follows_worker_0(world):
    assert world.run(unequal_counts_job, workers=3) == [H, H, H]


def payload_job(policy):
    model = net()
    opt = palsgd.DiLoCo(model, sgd(model), sync_every=H, buffers=policy)
    train(model, opt, batches(dtype=torch.float32), 2 * H)
    entry = opt.ledger.history[-1]
    return entry["bytes_sent"] - 4 * sum(p.numel() for p in model.parameters())


def test_buffers_travel_in_the_payload_only_when_they_are_averaged(world):
    local, recompute, average = (
        world.run(payload_job, workers=2, policy=policy)[0]
        for policy in ("local", "recompute", "average")
    )
    assert local == recompute
    assert average == local + 4 * (7 + 7 + 4)  # mean, variance, a counter in four pieces


def broken_job(broken, spoil_buffers):
    """A worker whose model is not finite is left out of the mean, its buffers with it."""
    model = net()
    opt = palsgd.DiLoCo(model, sgd(model), sync_every=H, on_nonfinite="skip")
    spoilt = dist.get_rank() == broken
    for batch in palsgd.until(batches(dtype=torch.float32), opt, steps=H):
        mse(model, batch).backward()
        before = buffers_of(model)
        if opt.clock == H - 1 and spoilt:
            model[0].weight.grad.fill_(math.nan)
            if spoil_buffers:  # what the next forward of such a model does to them
                model[1].running_mean.fill_(math.nan)
                model[1].running_var.fill_(math.inf)
        opt.step()
        opt.zero_grad()
    return before, buffers_of(model), vector(model)


@pytest.mark.parametrize("spoil_buffers", [False, True])
@pytest.mark.parametrize("broken", [0, 1])
def test_buffers_of_a_worker_left_out_are_left_out_and_the_counters_survive(
    world, broken, spoil_buffers
):
    found = world.run(broken_job, workers=3, broken=broken, spoil_buffers=spoil_buffers)
    healthy = [before for rank, (before, _, _) in enumerate(found) if rank != broken]
    for _, after, weights in found:
        assert np.isfinite(weights).all()
        for name in ("1.running_mean", "1.running_var"):
            mean = torch.stack([before[name] for before in healthy]).mean(dim=0)
            torch.testing.assert_close(after[name], mean)
        assert after["1.num_batches_tracked"] == H


# -- the switch from the warm-up ---------------------------------------------------------------


def switch_job(policy, wrapped):
    model = DistributedDataParallel(net()) if wrapped else net()
    opt = palsgd.DiLoCo(model, sgd(model), sync_every=H, warmup_steps=3, buffers=policy)
    data = batches(dtype=torch.float32)
    norm = (model.module if wrapped else model)[1]
    for batch in palsgd.until(data, opt, steps=3 + 2 * H):
        mse(model, batch).backward()
        opt.step()
        opt.zero_grad()
        if opt.clock == 3:
            at_switch = norm.running_mean.clone()
    return at_switch, norm.running_mean.clone(), int(norm.num_batches_tracked)


@pytest.mark.parametrize("wrapped", [True, False])
@pytest.mark.parametrize("policy", ["average", "local", "recompute"])
def test_statistics_do_not_fall_back_to_their_values_at_the_switch(world, policy, wrapped):
    for at_switch, at_end, count in world.run(
        switch_job, workers=2, policy=policy, wrapped=wrapped
    ):
        assert (at_switch != at_end).all()
        assert (at_end != 0).all()
        assert count == 3 + 2 * H


# -- recompute ---------------------------------------------------------------------------------


def forward(model, batch):
    return model(batch[0])


def recompute_job(steps, unequal, wrapped):
    model = DistributedDataParallel(net()) if wrapped else net()
    plain = model.module if wrapped else model
    opt = palsgd.DiLoCo(model, sgd(model), sync_every=H, buffers="recompute")
    worker = dist.get_rank()
    data = batches(dtype=torch.float32)
    data = data[: 3 + worker] if unequal else data
    train(model, opt, batches(dtype=torch.float32), steps)
    mse(model, data[0]).backward()
    opt.step()  # into the next round, so that local and global model differ
    model.train(worker == 0)
    local, weights, modes = buffers_of(plain), vector(model), [m.training for m in model.modules()]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with opt.anchor_weights():
            equal(buffers_of(plain), local)
    messages = [str(w.message) for w in caught]
    opt.recompute_buffers(data, forward)
    assert [m.training for m in model.modules()] == modes
    assert plain[1].momentum == 0.1
    equal(buffers_of(plain), local)  # the local model keeps its own
    np.testing.assert_array_equal(vector(model), weights)
    with opt.anchor_weights():  # no warning any more: they are errors here
        shown, twin = buffers_of(plain), copy.deepcopy(plain)
    equal(buffers_of(plain), local)
    update_bn((a for a, _ in data), twin)
    return shown, buffers_of(twin), messages


@pytest.mark.parametrize("wrapped", [True, False])
def test_recomputed_statistics_are_those_of_update_bn_on_the_global_weights(world, wrapped):
    found = world.run(recompute_job, workers=2, steps=2 * H, unequal=False, wrapped=wrapped)
    for shown, _, messages in found:
        for name in ("1.running_mean", "1.running_var"):
            twin = torch.stack([theirs[name] for _, theirs, _ in found]).mean(dim=0)
            torch.testing.assert_close(shown[name], twin)
        assert shown["1.num_batches_tracked"] == 5
        assert len(messages) == 1
        assert "recompute_buffers(batches)" in messages[0]
        equal(shown, found[0][0])


def test_recomputed_counters_follow_worker_0_too(world):
    """Integer buffers follow worker 0: the global model is one, however much data each saw."""
    found = world.run(recompute_job, workers=2, steps=2 * H, unequal=True, wrapped=False)
    assert [int(theirs["1.num_batches_tracked"]) for _, theirs, _ in found] == [3, 4]
    assert [int(shown["1.num_batches_tracked"]) for shown, _, _ in found] == [3, 3]


def stale_job():
    """Recomputed statistics belong to one global model; the next sync makes another."""
    model = net()
    opt = palsgd.DiLoCo(model, sgd(model), sync_every=H, buffers="recompute")
    data = batches(dtype=torch.float32)
    said = []
    for batch in palsgd.until(data, opt, steps=3 * H):
        mse(model, batch).backward()
        opt.step()
        opt.zero_grad()
        if opt.clock == H:
            opt.recompute_buffers(data, forward)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            with opt.anchor_weights():
                pass
        said.append(len(caught))
    return said


def test_the_global_model_is_shown_with_a_warning_until_its_buffers_are_recomputed(world):
    """Before the first sync it is the starting model, whose buffers are known."""
    (said,) = world.run(stale_job, workers=1)
    assert said == [0] * H + [0] * (H - 1) + [1] * (H + 1)


def interrupted_job():
    model = net()
    opt = palsgd.DiLoCo(model, sgd(model), sync_every=H, buffers="recompute")
    data = batches(dtype=torch.float32)
    train(model, opt, data, H)
    mse(model, data[0]).backward()
    opt.step()
    local, weights = buffers_of(model), vector(model)
    try:
        opt.recompute_buffers([data[0], None], forward)
    except TypeError:
        pass
    else:
        raise AssertionError("no error")
    equal(buffers_of(model), local)
    np.testing.assert_array_equal(vector(model), weights)
    assert model[1].momentum == 0.1
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with opt.anchor_weights():
            pass
    return [str(each.message) for each in caught]


def test_an_error_while_recomputing_puts_everything_back(world):
    ((told,),) = world.run(interrupted_job, workers=1)
    assert "recompute_buffers" in told  # they are still those of the local model


# -- anchor_weights ----------------------------------------------------------------------------


def shown_job(policy):
    model = net()
    opt = palsgd.DiLoCo(model, sgd(model), sync_every=H, buffers=policy)
    data = batches(dtype=torch.float32)
    for batch in data[:H]:
        mse(model, batch).backward()
        opt.step()
        opt.zero_grad()
    assert opt.synced
    at_sync = buffers_of(model)
    mse(model, data[0]).backward()
    opt.step()
    local = buffers_of(model)
    assert not torch.equal(local["1.running_mean"], at_sync["1.running_mean"])
    with opt.anchor_weights():
        shown = buffers_of(model)
        mse(model, data[1])  # a forward in training mode changes buffers: undone on leaving
        assert not torch.equal(model[1].running_mean, shown["1.running_mean"])
    equal(buffers_of(model), local)
    try:
        with opt.anchor_weights():
            raise KeyError
    except KeyError:
        equal(buffers_of(model), local)
    return at_sync, local, shown


def test_anchor_weights_shows_the_global_buffers_and_gives_the_local_ones_back(world):
    found = world.run(shown_job, workers=2, policy="average")
    for at_sync, _, shown in found:
        equal(shown, at_sync)
    equal(found[0][2], found[1][2])


def test_anchor_weights_shows_local_buffers_under_the_local_policy(world):
    for _, local, shown in world.run(shown_job, workers=2, policy="local"):
        equal(shown, local)


# -- the policy --------------------------------------------------------------------------------


def refused_job():
    model = net()
    try:
        palsgd.DiLoCo(model, sgd(model), sync_every=H, buffers="reset")
    except ValueError as error:
        return str(error)


def test_an_unknown_policy_is_refused_with_the_known_ones(world):
    (message,) = world.run(refused_job, workers=1)
    assert "buffers='reset'" in message
    assert all(policy in message for policy in ("average", "local", "recompute"))


class Reassigning(nn.Module):
    """Puts a new tensor in its buffer's place at each forward."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.a = nn.Linear(4, 3)
        self.register_buffer("seen", torch.zeros(4))

    def forward(self, x):
        self.seen = 0.9 * self.seen + 0.1 * x.mean(0)
        return self.a(x)


def reassigning_job():
    model = Reassigning()
    inner = torch.optim.SGD(model.parameters(), lr=0.01)
    train(model, palsgd.LocalSGD(model, inner, sync_every=4), batches(dtype=torch.float32), 8)
    return model.seen.numpy()


def test_a_buffer_that_its_module_reassigns_is_averaged_too(world):
    first, second = world.run(reassigning_job, workers=2)
    np.testing.assert_array_equal(first, second)
    assert np.abs(first).max() > 0


def counted_recompute_job():
    model = net(dtype=torch.float64)
    opt = palsgd.LocalSGD(model, sgd(model), sync_every=4, buffers="recompute")
    train(model, opt, batches(), 4)
    before = opt.ledger.messages, opt.ledger.bytes_sent
    opt.recompute_buffers([x for x, _ in batches()])
    return opt.ledger.messages - before[0], opt.ledger.bytes_sent - before[1]


def test_the_message_of_recomputed_buffers_is_in_the_ledger(world):
    # two statistics of 7 channels, and a count of 64 bits in four pieces
    assert world.run(counted_recompute_job, workers=2) == [(1, 8 * (2 * 7 + 4))] * 2

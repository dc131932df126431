"""Syncs that go wrong: other weights, other anchors, inf and nan, lost and late workers."""

import gc
import os
import threading
import time
from datetime import timedelta

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import nn

import palsgd
from palsgd.anchor import Anchor
from palsgd.replica import Replica
from palsgd.transports import ProcessGroupTransport
from support.core_access import anchor_of, anchor_views, local_tensors, outer_state
from support.patience import patient
from support.problems import batches, linear, mse, net, train, vector
from support.world import World

H = 4
WEIGHTS = 73  # elements of problems.net
EIGHT_BUCKETS = 40 / 2**20  # MiB: ten float32 each, so 73 of them take eight messages


class Alone(palsgd.Alone):
    """A transport of the user's own, which counts as if something were sent."""

    def mean(self, message):
        return message.values.nbytes


class Spy(palsgd.Transport):
    """Another transport, with a look at each message before it is sent."""

    def __init__(self, inner, look):
        self.worker, self.workers = inner.worker, inner.workers
        self.gather_inside, self.agree = inner.gather_inside, inner.agree
        self._inner, self._look, self.calls = inner, look, 0

    def mean(self, message):
        self.calls += 1
        self._look(self.calls)
        return self._inner.mean(message)


def adamw(model, lr=0.01):
    return torch.optim.AdamW(model.parameters(), lr=lr)


def backward(model, opt, data):
    opt.zero_grad()
    mse(model, data[opt.clock % len(data)]).backward()


def to_the_eve_of_a_sync(model, opt, data, rounds=1):
    """One step is left to take; it ends in the sync of round `rounds`, from 0."""
    while opt.clock < H * (rounds + 1) - 1:
        backward(model, opt, data)
        opt.step()
    backward(model, opt, data)


def watched_step(model, opt, seen):
    """Take a step that must fail; what was raised, and what the failure changed."""
    anchor, outer = anchor_of(opt).clone(), outer_state(opt).clone()
    buffers = [b.clone() for b in model.buffers()]
    try:
        opt.step()
    except BaseException as error:  # judged here, where a user's own handler would stand
        return dict(
            error=type(error).__name__,
            message=str(error),
            anchor_kept=torch.equal(anchor, anchor_of(opt)),
            outer_kept=torch.equal(outer, outer_state(opt)),
            buffers_kept=all(map(torch.equal, buffers, model.buffers())),
            model_kept=np.array_equal(seen["model"], vector(model), equal_nan=True),
            model_is_anchor=all(
                torch.equal(x, a)
                for x, a in zip(local_tensors(opt), anchor_views(opt), strict=True)
            ),
            finite=bool(np.isfinite(vector(model)).all()),
        )
    return dict(error=None, message="")


def spied(model, look=None, group=None):
    """A transport that keeps the local model as it was when the last exchange began."""
    seen = {}

    def remember(call):
        seen["model"] = vector(model)
        if look:
            look(call)

    return Spy(ProcessGroupTransport(group), remember), seen


# -- consensus ---------------------------------------------------------------------------------


def start_elsewhere(odd):
    model = net(seed=int(dist.get_rank() == odd))
    start = vector(model)
    opt = palsgd.DiLoCo(model, adamw(model), sync_every=H)
    try:
        train(model, opt, batches(dtype=torch.float32), steps=8)
    except palsgd.ConsensusError as error:
        return str(error), opt.clock, np.array_equal(start, vector(model))


@pytest.mark.parametrize("odd", [0, 1, 2])
def test_workers_that_start_from_other_weights_are_all_told_at_the_start_who_differs(world, odd):
    for message, clock, kept in world.run(start_elsewhere, workers=3, odd=odd):
        assert f"worker {odd} of 3" in message
        assert "start" in message
        assert "\n" not in message
        assert clock == 0
        assert kept


def corrupt_anchor(odd, bucket_mb):
    model = net()
    transport, seen = spied(model)
    opt = palsgd.DiLoCo(model, adamw(model), sync_every=H, transport=transport, bucket_mb=bucket_mb)
    to_the_eve_of_a_sync(model, opt, batches(dtype=torch.float32))
    if dist.get_rank() == odd:
        anchor_of(opt)[5] += 1e-6
    calls = transport.calls
    return watched_step(model, opt, seen) | dict(messages=transport.calls - calls)


@pytest.mark.parametrize("odd", [0, 1, 2])
def test_a_corrupted_anchor_is_found_at_the_next_sync_and_nothing_is_applied(world, odd):
    for got in world.run(corrupt_anchor, workers=3, odd=odd, bucket_mb=128.0):
        assert got["error"] == "ConsensusError"
        assert f"worker {odd} of 3" in got["message"]
        assert f"clock {2 * H}" in got["message"]
        assert got["anchor_kept"]
        assert got["outer_kept"]
        assert got["buffers_kept"]
        assert got["model_kept"]
        assert got["messages"] == 1


def test_a_corrupted_anchor_is_found_in_the_first_of_many_buckets(world):
    for got in world.run(corrupt_anchor, workers=2, odd=1, bucket_mb=EIGHT_BUCKETS):
        assert got["error"] == "ConsensusError"
        assert "worker 1 of 2" in got["message"]
        assert got["anchor_kept"]
        assert got["outer_kept"]
        assert got["model_kept"]
        assert got["messages"] == 1


def count_messages(bucket_mb):
    model = net()
    opt = palsgd.DiLoCo(model, adamw(model), sync_every=H, bucket_mb=bucket_mb)
    train(model, opt, batches(dtype=torch.float32), steps=3 * H)
    return opt.ledger.messages, opt.ledger.bytes_sent, vector(model)


def test_the_guard_costs_no_message_beyond_one_per_bucket(world):
    """And one at the start of the local phase. How the buckets are cut changes nothing else."""
    one = world.run(count_messages, workers=2, bucket_mb=128.0)
    eight = world.run(count_messages, workers=2, bucket_mb=EIGHT_BUCKETS)
    for (messages, sent, weights), (messages8, sent8, weights8) in zip(one, eight, strict=True):
        assert messages == 1 + 3
        assert messages8 == 1 + 3 * 8
        assert sent8 == sent
        np.testing.assert_array_equal(weights8, weights)
        assert sent > 3 * WEIGHTS * 4


class Vector(nn.Module):
    def __init__(self, values):
        super().__init__()
        self.values = nn.Parameter(values)


def anchor_with(values, dtype):
    model = Vector(torch.tensor(values, dtype=dtype))
    anchor = Anchor(Replica(model, torch.optim.SGD(model.parameters(), lr=1.0)))
    with torch.no_grad():
        anchor.set_from_local()
    return anchor


def floats(dtype):
    return st.floats(width=32 if dtype == torch.float32 else 64, allow_nan=False)


@settings(derandomize=True, deadline=None, max_examples=300)
@given(data=st.data(), dtype=st.sampled_from([torch.float32, torch.float64]))
def test_the_digest_changes_with_any_single_element(data, dtype):
    values = data.draw(st.lists(floats(dtype), min_size=1, max_size=9))
    place = data.draw(st.integers(0, len(values) - 1))
    other = data.draw(floats(dtype))
    old, new = (np.array(v, np.float64 if dtype == torch.float64 else np.float32).tobytes()
                for v in (values[place], other))  # fmt: skip
    assume(old != new)
    anchor = anchor_with(values, dtype)
    before = anchor.digest()
    assert anchor_with(values, dtype).digest() == before
    anchor.flat[place] = other
    assert anchor.digest() != before
    assert 0 <= anchor.digest() < 2**32


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("length", [1, 2, 3, 64, 65])
def test_the_digest_sees_the_last_bit_of_every_element(length, dtype):
    anchor = anchor_with(torch.linspace(-1, 1, length).tolist(), dtype)
    before = anchor.digest()
    for i in range(length):
        value = anchor.flat[i].clone()
        anchor.flat[i] = torch.nextafter(value, torch.tensor(9.0, dtype=dtype))
        assert anchor.digest() != before
        anchor.flat[i] = value
    assert anchor.digest() == before


# -- inf and nan -------------------------------------------------------------------------------


def spoil(model, how):
    with torch.no_grad():
        if how == "gradient":  # what a diverged step does: nan everywhere, inner state included
            for p in model.parameters():
                p.grad.fill_(torch.nan)
        elif how == "buffer":
            model[1].running_var[2] = torch.inf
        else:
            for p in model.parameters():
                p.grad = None  # so that the step leaves the value alone
            model[0].weight[3, 1] = {"inf": torch.inf, "nan": torch.nan, "huge": 1e25}[how]


def break_one(how, broken, policy, bucket_mb=128.0):
    model = net(dtype=torch.float64)
    transport, seen = spied(model)
    opt = palsgd.DiLoCo(
        model, adamw(model), sync_every=H, transport=transport, on_nonfinite=policy,
        bucket_mb=bucket_mb,
    )  # fmt: skip
    to_the_eve_of_a_sync(model, opt, batches())
    if dist.get_rank() in broken:
        spoil(model, how)
    return watched_step(model, opt, seen)


@pytest.mark.parametrize("bucket_mb", [128.0, EIGHT_BUCKETS])
@pytest.mark.parametrize("how", ["gradient", "inf", "nan", "buffer"])
def test_a_model_that_is_not_finite_raises_on_every_worker_and_poisons_none(world, how, bucket_mb):
    got = world.run(break_one, workers=3, how=how, broken=[1], policy="raise", bucket_mb=bucket_mb)
    for worker, one in enumerate(got):
        assert one["error"] == "NonFiniteError"
        assert "worker 1 of 3" in one["message"]
        assert "\n" not in one["message"]
        assert one["anchor_kept"]
        assert one["outer_kept"]
        assert one["buffers_kept"]
        assert one["model_kept"]  # refused before the first mean could overwrite anything
        assert one["finite"] or worker == 1


def test_skipping_every_worker_raises_on_every_worker(world):
    for got in world.run(break_one, workers=2, how="nan", broken=[0, 1], policy="skip"):
        assert got["error"] == "NonFiniteError"
        assert "workers 0, 1 of 2" in got["message"]
        assert got["anchor_kept"]
        assert got["model_kept"]


def skip_one(how, broken, bucket_mb):
    model = net(dtype=torch.float64)
    seen = {}

    def look(_):  # the model as it was when the sync under test began
        if opt.rounds == 1 and not seen:
            seen.update(local=vector(model), stats=stats(model))

    spy = Spy(ProcessGroupTransport(), look)
    opt = palsgd.LocalSGD(
        model, adamw(model), sync_every=H, transport=spy, on_nonfinite="skip", bucket_mb=bucket_mb
    )
    data = batches()
    to_the_eve_of_a_sync(model, opt, data)
    if dist.get_rank() == broken:
        spoil(model, how)
    opt.step()
    state = [v for s in opt.inner.state.values() for v in s.values() if isinstance(v, torch.Tensor)]
    after = dict(
        **seen,
        synced=(vector(model), stats(model)),
        counter=int(model[1].num_batches_tracked),
        clean=all(bool(v.isfinite().all()) for v in state),
    )
    for _ in range(H):  # the broken worker goes on like the others
        backward(model, opt, data)
        opt.step()
    return after | dict(end=vector(model), rounds=opt.rounds)


def stats(model):
    return torch.cat([model[1].running_mean, model[1].running_var]).numpy().copy()


@pytest.mark.parametrize("bucket_mb", [128.0, EIGHT_BUCKETS])
@pytest.mark.parametrize("broken", [0, 2])
@pytest.mark.parametrize("how", ["gradient", "inf", "nan", "buffer"])
def test_skip_takes_the_mean_of_the_others_and_the_broken_worker_goes_on(
    world, how, broken, bucket_mb
):
    got = world.run(skip_one, workers=3, how=how, broken=broken, bucket_mb=bucket_mb)
    sound = [one for worker, one in enumerate(got) if worker != broken]
    mean = np.mean([one["local"] for one in sound], axis=0)  # the twin, by hand
    mean_stats = np.mean([one["stats"] for one in sound], axis=0)
    for one in got:
        np.testing.assert_allclose(one["synced"][0], mean, rtol=1e-12, atol=1e-14)
        np.testing.assert_allclose(one["synced"][1], mean_stats, rtol=1e-12, atol=1e-14)
        assert one["clean"]
        assert one["rounds"] == 3
        assert np.isfinite(one["end"]).all()
        np.testing.assert_array_equal(one["end"], got[0]["end"])


def test_skipping_worker_0_does_not_reset_the_integer_buffers(world):
    for got in world.run(skip_one, workers=3, how="nan", broken=0, bucket_mb=128.0):
        assert got["counter"] == 2 * H  # forward passes so far, on every worker alike


def huge_weights():
    model = linear(torch.float32)
    transport, seen = spied(model)
    opt = palsgd.LocalSGD(model, adamw(model), sync_every=H, transport=transport)
    to_the_eve_of_a_sync(model, opt, batches(dtype=torch.float32), rounds=0)
    with torch.no_grad():
        for p in model.parameters():
            p.grad = None
        if dist.get_rank() == 1:
            model.weight.fill_(1e25)  # finite, though the norm of the tensor is not
    assert torch.linalg.vector_norm(model.weight).isinf() == (dist.get_rank() == 1)
    opt.step()
    return seen["model"], vector(model)


def test_huge_but_finite_weights_are_not_called_non_finite(world):
    got = world.run(huge_weights, workers=2)
    mean = np.mean([local for local, _ in got], axis=0)
    for _, synced in got:
        np.testing.assert_allclose(synced, mean, rtol=1e-6)


# -- lost workers ------------------------------------------------------------------------------


def leave(how, patience):
    """Worker 1 does not come to the second sync."""
    group = dist.new_group(timeout=timedelta(seconds=patience))
    model = net()
    transport, seen = spied(model, group=group)
    opt = palsgd.DiLoCo(model, adamw(model), sync_every=H, transport=transport)
    to_the_eve_of_a_sync(model, opt, batches(dtype=torch.float32))
    if dist.get_rank() == 1:
        if how == "exit":
            os._exit(0)
        if how == "stall":
            time.sleep(patience + 1.5)
        del opt, transport, model  # the group is closed when the last reference to it is gone
        gc.collect()
        dist.destroy_process_group(group)
        return None
    began = time.monotonic()
    return watched_step(model, opt, seen) | dict(seconds=time.monotonic() - began)


def check_lost(got, within):
    assert got["error"] == "SyncError"
    assert f"clock {2 * H}" in got["message"]
    assert "\n" not in got["message"]
    assert got["anchor_kept"]
    assert got["outer_kept"]
    assert got["buffers_kept"]
    assert got["model_kept"]
    assert got["seconds"] < patient(within)


def test_a_worker_that_closes_its_group_is_missed_at_once(world):
    check_lost(world.run(leave, workers=2, how="close", patience=patient(40))[0], within=20)


def test_a_worker_that_never_comes_is_missed_after_the_timeout(world):
    check_lost(world.run(leave, workers=2, how="stall", patience=1)[0], within=5)


@pytest.mark.slow
def test_a_worker_whose_process_ends_is_missed_at_once():
    own = World()  # one of its processes is lost
    try:
        first, second = own.outcomes(leave, workers=2, how="exit", patience=patient(40))
    finally:
        own.close()
    assert second.error == "Exit"
    check_lost(first.value, within=20)


STOPS = {"lost link": RuntimeError("Connection reset by peer"), "ctrl-c": KeyboardInterrupt()}
RAISED = {"lost link": "SyncError", "ctrl-c": "KeyboardInterrupt"}


def stopped_midway(stop, message, dtype=torch.float32):
    """The exchange fails at one of the eight messages of the second sync, counted from 1."""
    model = net(dtype=dtype)

    def fail(call):
        if call == 1 + 8 + message:
            raise STOPS[stop]

    transport, seen = spied(model, fail)
    bucket_mb = EIGHT_BUCKETS * dtype.itemsize / 4
    opt = palsgd.DiLoCo(model, adamw(model), sync_every=H, transport=transport, bucket_mb=bucket_mb)
    data = batches(dtype=dtype)
    to_the_eve_of_a_sync(model, opt, data)
    got = watched_step(model, opt, seen)
    transport._look = lambda call: None
    backward(model, opt, data)
    for _ in range(H):  # whoever catches the error can train on
        backward(model, opt, data)
        opt.step()
    return got | dict(end=vector(model))


@pytest.mark.parametrize("message", [1, 2, 5, 8])
@pytest.mark.parametrize("stop", STOPS)
def test_an_exchange_stopped_midway_leaves_the_global_model_as_it_was(world, stop, message):
    ends = []
    for got in world.run(stopped_midway, workers=2, stop=stop, message=message):
        assert got["error"] == RAISED[stop]
        assert got["anchor_kept"]
        assert got["outer_kept"]
        assert got["buffers_kept"]
        # the first mean to arrive is the first to overwrite a part of the local model
        assert got["model_kept" if message == 1 else "model_is_anchor"]
        assert got["finite"]
        ends.append(got["end"])
    np.testing.assert_array_equal(*ends)


def stopped_in_one_bucket(stop):
    model = net()

    def fail(call):
        if call == 1 + 1 + 1:
            raise STOPS[stop]

    transport, seen = spied(model, fail)
    opt = palsgd.DiLoCo(model, adamw(model), sync_every=H, transport=transport)
    to_the_eve_of_a_sync(model, opt, batches(dtype=torch.float32))
    return watched_step(model, opt, seen)


@pytest.mark.parametrize("stop", STOPS)
def test_an_exchange_in_one_bucket_that_is_stopped_leaves_the_local_model_too(world, stop):
    for got in world.run(stopped_in_one_bucket, workers=2, stop=stop):
        assert got["error"] == RAISED[stop]
        assert got["anchor_kept"]
        assert got["outer_kept"]
        assert got["buffers_kept"]
        assert got["model_kept"]


# -- waiting -----------------------------------------------------------------------------------


def sleep_before_the_first_sync(sleeper):
    model = linear()
    opt = palsgd.DiLoCo(model, adamw(model), sync_every=H)
    for _ in range(2 * H):
        backward(model, opt, batches())
        if opt.clock == H - 1 and dist.get_rank() == sleeper:
            time.sleep(0.3)
        opt.step()
    waits = [entry["waiting_s"] for entry in opt.ledger.history]
    return opt.ledger.waiting_s, waits, opt.ledger.sync_s


@pytest.mark.parametrize("sleeper", [0, 1])
def test_the_time_spent_waiting_for_a_late_worker_is_booked_by_the_others(world, sleeper):
    got = world.run(sleep_before_the_first_sync, workers=2, sleeper=sleeper)
    late, prompt = got[sleeper], got[1 - sleeper]
    assert late[0] < prompt[0]
    assert prompt[0] > 0.1
    for total, waits, sync_s in got:
        assert waits[0] == total
        assert np.isnan(waits[1])  # learnt at the next sync only
        assert sync_s > -1e-3
    assert prompt[2] < 0.3  # waiting is not counted as sync time as well


# -- other transports --------------------------------------------------------------------------

RULES = dict(sync_every=H, mix_prob=0.3, mix_rate=2.0, seed=5, warmup_steps=3)


def trained(worker=None, **transport):
    model = linear()
    opt = palsgd.PALSGD(model, adamw(model), **RULES, **transport)
    train(model, opt, batches(worker), steps=3 + 3 * H + 1)
    return vector(model)


def test_a_transport_in_memory_needs_no_process_group_and_matches_one_process(world):
    assert not dist.is_initialized()
    got = trained(worker=0, transport=Alone())
    np.testing.assert_array_equal(got, world.run(trained, workers=1)[0])


class Meeting:
    """Threads of one process as workers."""

    def __init__(self, workers):
        self._barrier = threading.Barrier(workers, timeout=patient(20))
        self._brought = [None] * workers

    def transport(self, worker):
        seat = Alone()
        seat.worker, seat.workers = worker, len(self._brought)
        seat.mean = lambda message: self._mean(worker, message.values)
        return seat

    def _mean(self, worker, values):
        self._brought[worker] = values.clone()
        self._barrier.wait()
        values.copy_(sum(self._brought) / len(self._brought))
        self._barrier.wait()
        return values.nbytes


def test_workers_in_threads_match_workers_in_processes(world):
    meeting, got = Meeting(2), [None, None]

    def work(k):
        got[k] = trained(worker=k, transport=meeting.transport(k))

    threads = [threading.Thread(target=work, args=(k,)) for k in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for mine, theirs in zip(got, world.run(trained, workers=2), strict=True):
        np.testing.assert_array_equal(mine, theirs)

"""Training with coded messages: in processes, in simulation, in several buckets, interrupted."""

from copy import deepcopy

import numpy as np
import pytest
import torch
import torch.distributed as dist

import palsgd
from palsgd.codecs import BLOCK
from palsgd.simulator.exact import exchanged
from palsgd.transports import SimulatedTransport
from support.core_access import layout_size, residues_of
from support.problems import batches, linear, mse, train, vector

CODECS = ["bf16", "int8", "int4", "topk:0.05"]


def train_job(method="DiLoCo", steps=40, wide=False, bucket_mb=128.0, **kw):
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 3).double() if not wide else wide_net()
    kind = palsgd.DiLoCo if method == "DiLoCo" else palsgd.LocalSGD
    inner = torch.optim.SGD(model.parameters(), lr=0.05)
    opt = kind(model, inner, sync_every=5, bucket_mb=bucket_mb, **kw)
    train(model, opt, batches(dtype=next(model.parameters()).dtype), steps)
    return vector(model), opt.ledger.as_dict(), layout_size(opt)


def wide_net():
    return torch.nn.Sequential(torch.nn.Linear(4, 300), torch.nn.Tanh(), torch.nn.Linear(300, 3))


@pytest.mark.parametrize("compress", CODECS)
def test_all_workers_hold_the_same_global_model(world, compress):
    """The consensus guard compares them at each sync."""
    got = world.run(train_job, workers=3, compress=compress, wide=True)
    for weights, _, _ in got:
        np.testing.assert_array_equal(weights, got[0][0])


@pytest.mark.parametrize(
    ("compress", "tolerance"), [("bf16", 2e-4), ("int8", 2e-4), ("int4", 2e-3)]
)
def test_a_compressed_run_stays_near_the_uncompressed_one(world, compress, tolerance):
    plain = world.run(train_job, workers=2, wide=True, method="LocalSGD")[0][0]
    coded = world.run(train_job, workers=2, wide=True, method="LocalSGD", compress=compress)[0][0]
    assert 0 < np.abs(coded - plain).max() < tolerance


@pytest.mark.parametrize(("compress", "width"), [("bf16", 512), ("int8", 260), ("int4", 136)])
def test_the_ledger_counts_what_is_handed_to_the_sockets(world, compress, width):
    """Blocks of 256 in equal chunks for two workers, and nine numbers of each in the header."""
    _, ledger, size = world.run(train_job, workers=2, wide=True, compress=compress)[0]
    blocks = -(-size // (2 * BLOCK)) * 2
    assert {e["bytes_sent"] for e in ledger["history"]} == {blocks * width + 18 * 4}


def counted_job(compress):
    """What the process group is given, counted there."""
    sent = []
    all_to_all, all_gather = dist.all_to_all_single, dist.all_gather_into_tensor

    def counting_all_to_all(out, chunks, **kw):
        sent.append(chunks.nbytes)
        return all_to_all(out, chunks, **kw)

    def counting_all_gather(out, chunk, **kw):
        sent.append(out.nbytes)
        return all_gather(out, chunk, **kw)

    dist.all_to_all_single, dist.all_gather_into_tensor = counting_all_to_all, counting_all_gather
    try:
        _, ledger, _ = train_job(wide=True, compress=compress)
    finally:
        dist.all_to_all_single, dist.all_gather_into_tensor = all_to_all, all_gather
    return sent, [e["bytes_sent"] for e in ledger["history"]]


def test_nothing_but_codes_travels_in_either_direction(world):
    """Of what each collective is given, every worker sends (K - 1) / K, as in a ring all-reduce."""
    sent, recorded = world.run(counted_job, workers=3, compress="int4")[0]
    sent = sent[2:]  # before training workers compare their settings: a length, and a text
    assert sent[0::2] == sent[1::2] == recorded


def test_a_model_in_several_messages_is_compressed_as_well(world):
    several = world.run(train_job, workers=2, wide=True, compress="int8", bucket_mb=0.002)
    one = world.run(train_job, workers=2, wide=True, compress="int8")
    assert several[0][1]["messages"] > 3 * one[0][1]["messages"]
    np.testing.assert_array_equal(several[0][0], several[1][0])
    np.testing.assert_allclose(several[0][0], one[0][0], atol=1e-3)


def interrupted_job(fail_at):
    """The second message of a sync fails once; the sync is then done again."""
    model = wide_net()
    torch.manual_seed(0)
    inner = torch.optim.SGD(model.parameters(), lr=0.05)
    opt = palsgd.DiLoCo(model, inner, sync_every=5, bucket_mb=0.002, compress="int4")
    with torch.no_grad():
        for p in model.parameters():
            p.fill_(0.1)
    exchange, calls = opt.transport.exchange, []

    def flaky(message):
        calls.append(1)
        if len(calls) == fail_at:
            raise KeyboardInterrupt
        return exchange(message)

    opt.transport.exchange = flaky
    data = batches(dtype=torch.float32)
    opt.run_until(20)
    failed, i = 0, 0
    while opt.clock < 20:
        try:
            if not failed or opt.clock % 5:
                opt.zero_grad()
                mse(model, data[i % len(data)]).backward()
                i += 1
                opt.step()
            else:
                failed = 0
                opt.run_until(20)
        except KeyboardInterrupt:
            failed = 1
    return vector(model), {k: r.own.numpy() for k, r in residues_of(opt).items()}


def test_a_sync_that_is_done_again_leaves_all_workers_with_the_same_model(world):
    """Both workers stop at the same message and go back to the anchor, so the round's progress
    is lost. The residues of the messages before it are those of the first try."""
    got = world.run(interrupted_job, workers=2, fail_at=5)
    np.testing.assert_array_equal(got[0][0], got[1][0])
    assert all(np.isfinite(r).all() for r in got[0][1].values())


def resumed_job(first_mb, then_mb, compress, offload=(False, False), delay=0):
    """A run that goes on with messages of another size in the middle of a round."""
    torch.manual_seed(0)
    models, opts = [], []
    for mb, away in zip((first_mb, then_mb), offload, strict=True):
        torch.manual_seed(0)
        models.append(wide_net())
        inner = torch.optim.SGD(models[-1].parameters(), lr=0.05)
        settings = dict(bucket_mb=mb, compress=compress, offload=away, delay=delay)
        outer = palsgd.nesterov(0.2, 0.9)
        opts.append(palsgd.DiLoCo(models[-1], inner, sync_every=5, outer=outer, **settings))
    data = batches(dtype=torch.float32)
    steps(models[0], opts[0], data, 17)
    models[1].load_state_dict(models[0].state_dict())
    opts[1].load_state_dict(deepcopy(opts[0].state_dict()))  # torch's optimizers share tensors
    for model, opt in zip(models, opts, strict=True):
        steps(model, opt, data, 13)
    return [vector(model) for model in models]


def steps(model, opt, data, count):
    for i in range(count):
        opt.zero_grad()
        mse(model, data[i % len(data)]).backward()
        opt.step()


@pytest.mark.parametrize("compress", ["int8", "int4", "topk:0.05"])
@pytest.mark.parametrize(("first_mb", "then_mb"), [(128.0, 0.002), (0.002, 128.0), (0.003, 0.002)])
def test_a_compressed_run_goes_on_with_messages_of_another_size(world, first_mb, then_mb, compress):
    """Only blocks are cut at other places, so the runs stay as near as codes are fine."""
    sizes = dict(first_mb=first_mb, then_mb=then_mb)
    (straight, other), second = world.run(resumed_job, workers=2, compress=compress, **sizes)
    np.testing.assert_array_equal(other, second[1])
    fine = {"int8": 1e-3, "int4": 5e-3, "topk:0.05": 1e-1}
    np.testing.assert_allclose(other, straight, atol=fine[compress])


@pytest.mark.parametrize("compress", [None, "int8"])
@pytest.mark.parametrize("offload", [(False, True), (True, False)])
@pytest.mark.parametrize("delay", [0, 3])
def test_a_state_goes_on_bit_for_bit_with_offload_and_without(world, compress, offload, delay):
    given = dict(first_mb=128.0, then_mb=128.0, compress=compress, offload=offload, delay=delay)
    for straight, resumed in world.run(resumed_job, workers=2, **given):
        np.testing.assert_array_equal(straight, resumed)


def alone(compress):
    model = linear()
    opt = palsgd.DiLoCo(
        model, torch.optim.SGD(model.parameters(), lr=0.05), sync_every=5, compress=compress,
        transport=palsgd.Alone(),
    )  # fmt: skip
    train(model, opt, batches(0), 20)
    return vector(model)


def test_a_single_worker_has_nobody_to_send_codes_to():
    np.testing.assert_array_equal(alone("int4"), alone(None))


@pytest.mark.filterwarnings("ignore:the last . steps")  # the runs are dropped after one sync
def test_a_gathered_message_is_counted_alike_when_it_was_saved_on_its_way():
    straight, resumed = (top_k_under_way(resume=resume) for resume in (False, True))
    assert straight == resumed


def top_k_under_way(*, resume):
    """The bytes on the wire of three workers' first delayed sync of the largest values."""
    settings, models, opts = [], [], []
    for worker in range(3):
        transport = SimulatedTransport(worker, 3, settings)
        model = linear()
        inner = torch.optim.SGD(model.parameters(), lr=0.1)
        opts.append(
            palsgd.LocalSGD(
                model, inner, sync_every=4, delay=2, compress="topk:0.1", transport=transport
            )
        )
        models.append(model)
    for step in range(6):
        for worker, model in enumerate(models):
            mse(model, batches(worker)[step % 5]).backward()
        run_together([opt.simulated_step() for opt in opts])
        if resume and step == 4:
            for opt in opts:
                opt.load_state_dict(opt.state_dict())
    return [opt.ledger.bytes_on_the_wire for opt in opts]


def run_together(exchanges):
    requests = [next(exchange, None) for exchange in exchanges]
    while any(request is not None for request in requests):
        sent = exchanged(requests, 0)
        requests = [_resumed(exchange, sent) for exchange in exchanges]


def _resumed(exchange, sent):
    try:
        return exchange.send(sent)
    except StopIteration:
        return None

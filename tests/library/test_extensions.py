"""Parts of one's own: a codec in a dozen lines, a transport with one call, a method in one file."""

import numpy as np
import pytest
import torch
import torch.distributed as dist

import palsgd
from support.problems import batches, linear, mse, train, vector

H = 4


# -- a codec -----------------------------------------------------------------------------------


class Sign(palsgd.Codec):
    """One bit per value, and the mean size of a block's values."""

    gathered, decay = True, 0.8

    def encode(self, blocks):
        bits = (blocks >= 0).view(len(blocks), 32, 8).to(torch.uint8)
        packed = (bits << torch.arange(8, dtype=torch.uint8)).sum(dim=2, dtype=torch.uint8)
        size = blocks.abs().mean(dim=1, keepdim=True).contiguous().view(torch.uint8)
        return torch.cat([packed, size], dim=1)

    def decode(self, codes):
        bits = (codes[:, :32, None] >> torch.arange(8, dtype=torch.uint8)) & 1
        size = codes[:, 32:].contiguous().view(torch.float32)
        return (bits.view(len(codes), 256).float() * 2 - 1) * size


def coded_job(codec, **rules):
    model = linear(torch.float32)
    opt = palsgd.DiLoCo(
        model, torch.optim.SGD(model.parameters(), lr=0.05), sync_every=H, compress=codec, **rules
    )
    data = batches(dtype=torch.float32)
    before = sum(mse(model, b).item() for b in data)
    train(model, opt, data, 120)
    after = sum(mse(model, b).item() for b in data)
    return vector(model), before, after, opt.config["compress"], opt.ledger.bytes_sent


@pytest.mark.parametrize("rules", [dict(), dict(delay=2), dict(fragments=2)], ids=str)
def test_a_codec_of_ones_own_trains_and_all_workers_decode_the_same(world, rules):
    got = world.run(coded_job, workers=2, codec=Sign(), **rules)
    for weights, before, after, name, sent in got:
        np.testing.assert_array_equal(weights, got[0][0])
        assert after < 0.7 * before
        assert name == "sign"
        assert sent == got[0][4]


def test_a_codec_of_ones_own_has_the_same_bits_in_processes_and_in_simulation(world):
    real = world.run(coded_job, workers=2, codec=Sign())
    result = palsgd.simulate(
        workers=2, steps=120, model=lambda: linear(torch.float32), loss=mse, vectorize=False,
        data=lambda k: batches(k, torch.float32),
        method=lambda m: palsgd.DiLoCo(
            m, torch.optim.SGD(m.parameters(), lr=0.05), sync_every=H, compress=Sign()
        ),
    )  # fmt: skip
    np.testing.assert_array_equal(vector(result.model), real[0][0])


class Shrunk(Sign):
    def decode(self, codes):
        return super().decode(codes)[:, :10]


@pytest.mark.parametrize(
    ("compress", "words"),
    [
        (Shrunk(), "Shrunk.decode returns"),
        (Sign, "class"),
        ("sing", "compress='sing' is unknown"),
        (3, "compress=3"),
    ],
)
def test_what_is_no_codec_is_refused_at_construction(compress, words):
    model = linear()
    inner = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(ValueError, match=words):
        palsgd.DiLoCo(model, inner, sync_every=4, compress=compress, transport=palsgd.Alone())


# -- a transport -------------------------------------------------------------------------------


class Plain(palsgd.Transport):
    """The one call that must be written."""

    def __init__(self):
        self.worker, self.workers = dist.get_rank(), dist.get_world_size()

    def mean(self, message):
        dist.all_reduce(message.values)
        message.values /= self.workers


def transport_job(own, **rules):
    model = linear()
    transport = Plain() if own else None
    opt = palsgd.PALSGD(
        model, torch.optim.SGD(model.parameters(), lr=0.05), sync_every=H, mix_prob=0.3,
        mix_rate=1.0, warmup_steps=2, transport=transport, **rules,
    )  # fmt: skip
    train(model, opt, batches(), 22)
    return vector(model), opt.ledger.bytes_sent, opt.ledger.messages


@pytest.mark.parametrize("rules", [dict(), dict(delay=2), dict(fragments=2, delay=1)], ids=str)
def test_a_transport_with_one_call_trains_plainly_and_with_delay(world, rules):
    own = world.run(transport_job, workers=2, own=True, **rules)
    for mine, theirs in zip(
        own, world.run(transport_job, workers=2, own=False, **rules), strict=True
    ):
        np.testing.assert_array_equal(mine[0], theirs[0])
        assert mine[1:] == theirs[1:]  # what is handed over is counted


def refused_job():
    try:
        transport_job(own=True, compress="int8")
    except ValueError as error:
        return str(error)
    return None


def test_a_transport_with_one_call_refuses_codes_at_construction(world):
    for said in world.run(refused_job, workers=2):
        assert "Plain has no scatter()" in said
        assert "compress" in said


def disagreeing_job():
    model = linear()
    inner = torch.optim.SGD(model.parameters(), lr=0.05)
    try:
        palsgd.DiLoCo(model, inner, sync_every=4 + dist.get_rank(), transport=Plain())
    except ValueError as error:
        return str(error)
    return None


def test_workers_with_other_settings_are_told_apart_over_a_transport_with_one_call(world):
    for said in world.run(disagreeing_job, workers=2):
        assert "has other settings than the rest" in said


def test_a_transport_without_a_mean_cannot_be_made():
    class Nothing(palsgd.Transport):
        pass

    with pytest.raises(TypeError, match="mean"):
        Nothing()


# -- a method ----------------------------------------------------------------------------------


def test_a_method_of_release_0_1_is_refused_with_the_new_names():
    with pytest.raises(
        ValueError, match=r"Old\.local_rule is of palsgd 0\.1; write after_gradient"
    ):

        class Old(palsgd.Method):
            def local_rule(self, replica, rates):
                pass

    with pytest.raises(ValueError, match=r"Older\.global_rule .* write apply"):

        class Older(palsgd.Method):
            def global_rule(self, outer):
                pass


class Short(palsgd.Method):
    def plan(self, worker, round, length, facts):
        return [False] * (length - 1)


class Endless(palsgd.Method):
    def length(self, round, facts):
        return 0


class Never(palsgd.Method):
    def payload(self, w):
        return palsgd.Payload((palsgd.Part("model", every=2),))


class Odd(palsgd.Method):
    def payload(self, w):
        return palsgd.Payload((palsgd.Part("model", reduction="median"),))


@pytest.mark.parametrize(
    ("method", "words"),
    [
        (Short(), r"Short\.plan gives 3 steps for a round of 4"),
        (Endless(), r"Endless\.length gives 0 for round 0"),
        (Never(), "no part of the payload travels with round 0"),
        (Odd(), "the reduction of 'model'='median' is unknown"),
    ],
)
def test_a_method_that_breaks_its_contract_is_told_what_it_must_give(method, words):
    model = linear()
    inner = torch.optim.SGD(model.parameters(), lr=0.1)
    opt = palsgd.LocalOptimizer(model, inner, method=method, sync_every=4, transport=palsgd.Alone())
    with pytest.raises(ValueError, match=words):
        train(model, opt, batches(0), 8)


class Keeps(palsgd.Method):
    def restart(self, w):
        pass


class Varied(palsgd.Method):
    def length(self, round, facts):
        return 3


@pytest.mark.parametrize(
    ("method", "rules", "words"),
    [
        (Keeps(), dict(delay=1), "delay=1 means nothing for Keeps: the method says itself"),
        (Varied(), dict(delay=1), "delay=1 means nothing for Varied: rounds of varying length"),
        (Varied(), dict(fragments=2), "fragments=2 means nothing for Varied"),
        (Keeps, dict(), "method=Keeps is a class; give an instance"),
        ("diloco", dict(), "method='diloco' must be a palsgd.Method"),
        ([Keeps(), Keeps()], dict(), "both override restart"),
    ],
)
def test_what_means_nothing_for_a_method_is_refused_with_the_reason(method, rules, words):
    model = linear()
    inner = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(ValueError, match=words):
        palsgd.LocalOptimizer(
            model, inner, method=method, sync_every=4, transport=palsgd.Alone(), **rules
        )

"""The mean of coded messages: its bits, what it leaves for later, and what it weighs."""

import pytest
import torch

from palsgd.codecs import BLOCK, Codec, TopK, coded_mean, message_bytes
from palsgd.codecs.residues import PartResidue
from palsgd.transports import Message, Transport, average_in_memory
from palsgd.transports.transport import CodecError
from support.allocations import Allocations
from support.exchanges import CODECS, codec_of, digest, rounds_in_memory


@pytest.mark.parametrize(
    ("name", "workers", "bits"),
    [
        ("bf16", 2, "3522f3eefbbba0e3"),
        ("bf16", 3, "489d4ef4c96959d9"),
        ("int8", 2, "eba73e5a4cb04948"),
        ("int8", 3, "b7161ca82072f44a"),
        ("int4", 2, "07517e9f74c94770"),
        ("int4", 3, "8556bc5fa3be2e2d"),
    ],
)
def test_the_two_step_mean_has_the_bits_it_always_had(name, workers, bits):
    """Three rounds with error feedback on both steps; recorded from the first version, so that
    runs saved by it go on bit for bit."""
    assert digest(rounds_in_memory(name, workers)[0]) == bits


@pytest.mark.parametrize("name", CODECS)
@pytest.mark.parametrize("workers", [2, 3, 5])
@pytest.mark.parametrize("size", [1, 255, 1000, 5000])
def test_nothing_is_lost_what_is_not_in_the_mean_is_left_for_later(name, workers, size):
    """mean of what was brought = mean that came out + what stays: exactly what error feedback
    means, over both steps where there are two."""
    torch.manual_seed(0)
    brought = [torch.randn(size + 7) for _ in range(workers)]
    messages = [Message(b.clone(), 7, codec_of(name)) for b in brought]
    average_in_memory(messages)
    stays = torch.stack([m.residue.own for m in messages]).double().mean(dim=0)
    if not messages[0].codec.gathered:
        stays += torch.cat([m.residue.mean for m in messages]).double()
    expected = torch.stack([b.double() for b in brought]).mean(dim=0)
    got = messages[0].values.double()[:size] + stays[:size]
    torch.testing.assert_close(got, expected[:size], rtol=0, atol=1e-5)
    torch.testing.assert_close(messages[0].values[size:], expected[size:].float())
    assert all(torch.equal(m.values, messages[0].values) for m in messages)


@pytest.mark.parametrize("name", ["bf16", "int8", "int4"])
def test_with_error_feedback_the_sum_over_rounds_stays_near_the_true_sum(name):
    torch.manual_seed(0)
    workers, size, rounds = 3, 2000, 200
    direction = [torch.randn(size) for _ in range(workers)]
    true = torch.stack(direction).mean(dim=0) * rounds
    total, left, codec = torch.zeros(size), [None] * workers, codec_of(name)
    for _ in range(rounds):
        pairs = zip(direction, left, strict=True)
        messages = [Message(d.clone(), 0, codec, residue) for d, residue in pairs]
        average_in_memory(messages)
        left = [message.residue for message in messages]
        total += messages[0].values
    assert float((total - true).norm() / true.norm()) < 1e-3


def test_top_k_sends_the_code_of_its_values_and_of_a_decayed_residue():
    """e <- 0.95 e + D; q = code(e); e - q stays; the mean is that of the q, worker by worker."""
    torch.manual_seed(0)
    codec, before = TopK(), torch.randn(3, 2 * BLOCK)
    brought = torch.randn(3, 2 * BLOCK)
    messages = [Message(b.clone(), 0, codec) for b in before]
    average_in_memory(messages)
    messages = [
        Message(b.clone(), 0, codec, m.residue) for b, m in zip(brought, messages, strict=True)
    ]
    average_in_memory(messages)
    sent = []
    for message, first, second in zip(messages, before, brought, strict=True):
        e = first - codec.decode(codec.encode(first.view(-1, BLOCK))).view(-1)
        e = 0.95 * e + second
        sent.append(codec.decode(codec.encode(e.view(-1, BLOCK))).view(-1))
        assert torch.equal(message.residue.own, e - sent[-1])
        assert message.residue.mean.numel() == 0
    assert torch.equal(messages[2].values, (sent[0] + sent[1] + sent[2]) / 3)


@pytest.mark.parametrize("name", CODECS)
def test_the_exact_tail_of_a_64_bit_message_keeps_64_bits(name):
    messages = [Message(torch.full((9,), 1 / 3, dtype=torch.float64), 5, codec_of(name))] * 2
    average_in_memory(messages)
    assert messages[0].values[4:].tolist() == [1 / 3] * 5


def test_one_worker_hands_over_nothing():
    for codec in (None, TopK(), codec_of("int8")):
        assert message_bytes(elements=999, exact=9, itemsize=4, codec=codec, workers=1) == 0


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("none", 1007 * 4),
        ("int8", 3 * (2 * 260 + 3 * 4)),  # chunks of two blocks and of three values of the tail
        ("topk:0.03125", 4 * 24 + 7 * 4),  # four blocks and the whole tail
    ],
)
def test_the_bytes_of_a_message_are_those_of_its_blocks_and_its_tail(name, expected):
    codec = codec_of(name)
    got = message_bytes(elements=1007, exact=7, itemsize=4, codec=codec, workers=3)
    assert got == expected


@pytest.mark.parametrize("name", CODECS)
@pytest.mark.parametrize("workers", [2, 3])
def test_a_message_in_segments_and_pieces_has_the_bits_of_one_that_is_coded_at_once(
    monkeypatch, name, workers
):
    """Residues of two earlier rounds included; a segment has two blocks for every worker."""
    whole, sent = rounds_in_memory(name, workers, size=20_000)
    monkeypatch.setattr(coded_mean, "SEGMENT", 2 * workers * BLOCK)
    monkeypatch.setattr(coded_mean, "PIECE", {"cpu": BLOCK})
    cut, sent_too = rounds_in_memory(name, workers, size=20_000)
    assert sent == sent_too
    for one, other in zip(whole, cut, strict=True):
        assert torch.equal(one.values, other.values)
        assert torch.equal(one.residue.own, other.residue.own)
    if not whole[0].codec.gathered:  # a mean's residue lies with the worker that codes the mean
        assert sorted(means(whole)) == sorted(means(cut))


def means(messages):
    return torch.cat([message.residue.mean for message in messages]).tolist()


class Twice(Transport):
    """The second of two workers brings what the first one brings."""

    workers = 2

    def mean(self, message):
        pass

    def scatter(self, rows):
        return rows[:1].repeat(2, 1)

    def gather(self, row):
        return row.repeat(2, 1)


@pytest.mark.parametrize("name", ["bf16", "int8", "int4", "topk:0.03"])
def test_a_coded_message_takes_no_more_than_its_residues_and_64_mib(name):
    message = Message(torch.randn(3 << 23), 0, codec_of(name))
    with Allocations() as seen:
        Twice().exchange(message)
    residues = message.residue.own.nbytes + message.residue.mean.nbytes
    assert seen.alive == residues
    assert residues <= 1.5 * message.values.nbytes
    assert seen.peak - residues <= 64 * 2**20


def test_an_exchange_that_fails_leaves_the_residue_as_it_was():
    class Flaky(Twice):
        def gather(self, row):
            raise ConnectionResetError("the peer is gone")

    codec = codec_of("int8")
    message = Message(torch.randn(1000), 0, codec)
    Twice().exchange(message)
    before = message.residue.own.clone(), message.residue.mean.clone()
    with pytest.raises(ConnectionResetError):
        Flaky().exchange(Message(torch.randn(1000), 0, codec, message.residue))
    assert torch.equal(message.residue.own, before[0])
    assert torch.equal(message.residue.mean, before[1])


class Broken(Codec):
    """It cannot code a message that has a 3 in it."""

    def encode(self, blocks):
        if (blocks == 3).any():
            torch.ones(2) + torch.ones(3)
        return torch.zeros(len(blocks), 1, dtype=torch.uint8)

    def decode(self, codes):
        return torch.zeros(len(codes), BLOCK)


def test_a_codec_that_fails_is_no_lost_worker():
    with pytest.raises(CodecError, match=r"'broken' failed on a message of 5 values \(The size"):
        Twice().exchange(Message(torch.full((5,), 3.0), 0, Broken()))


@pytest.mark.parametrize("workers", [2, 3])
def test_residues_that_are_cut_otherwise_lose_nothing(workers):
    """What the next mean will have of them, the mean of all own residues plus the residue of the
    mean, is the same under messages of another size."""
    torch.manual_seed(0)
    codec, before, after = codec_of("int8"), [range(5000)], [range(1700), range(1700, 5000)]
    total = {"before": torch.zeros(5000), "after": torch.zeros(5000)}
    for worker in range(workers):
        who = dict(worker=worker, workers=workers)
        kept = PartResidue.of(before, codec, like=torch.empty(0), **who)
        kept.own.normal_()
        kept.mean.normal_()
        for name, messages in (("before", before), ("after", after)):
            kept.cut(messages, codec, **who)
            total[name] += kept.own / workers
            covered = torch.cat([torch.tensor([*each], dtype=torch.long) for each in kept.ranges])
            total[name][covered] += kept.mean
    torch.testing.assert_close(total["after"], total["before"])


def test_residues_that_are_cut_otherwise_are_added_to_the_next_message():
    """As after the loss of one of three workers, in a run in which nothing was saved and loaded."""
    messages, codec, place = [range(5000)], codec_of("int8"), {"worker": 0, "workers": 3}
    kept = PartResidue.of(messages, codec, like=torch.empty(0), **place)
    (sent,) = kept.cut(messages, codec, **place)
    assert sent.fresh
    sent.fresh = False  # as an exchange leaves it
    (left,) = kept.cut(messages, codec, worker=0, workers=2)
    assert not left.fresh

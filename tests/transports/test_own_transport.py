"""A transport of one's own: with `mean` alone, and with all that compression needs."""

import threading

import pytest
import torch

from palsgd.codecs import TopK, find_codec
from palsgd.transports import Alone, Message, Transport, UnsupportedError
from support.exchanges import CODECS, codec_of, rounds_in_memory, rounds_over


class Table:
    """Where workers that are threads lay down what they send."""

    def __init__(self, workers):
        self.places, self.barrier = [None] * workers, threading.Barrier(workers)

    def collect(self, worker, mine):
        self.places[worker] = mine
        self.barrier.wait(10)
        found = [place.clone() for place in self.places]
        self.barrier.wait(10)
        return found


class MeanOnly(Transport):
    def __init__(self, worker, table):
        self.worker, self.workers, self.table = worker, len(table.places), table

    def mean(self, message):
        found = self.table.collect(self.worker, message.values)
        message.values.copy_(sum(found[1:], start=found[0]) / self.workers)


class Full(MeanOnly):
    """It notes the bytes of what it is given to send first."""

    given = 0

    def scatter(self, rows):
        self.given = self.given or rows.nbytes
        return torch.stack([row[self.worker] for row in self.table.collect(self.worker, rows)])

    def gather(self, row):
        self.given = self.given or row.nbytes
        return torch.stack(self.table.collect(self.worker, row))


def together(kind, workers, job):
    """What job(transport) returns, or the error it raises, in a thread for each worker."""
    table, found = Table(workers), [None] * workers

    def work(worker):
        try:
            found[worker] = job(kind(worker, table))
        except Exception as error:
            found[worker] = error

    threads = [threading.Thread(target=work, args=(k,)) for k in range(workers)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    return found


def error_of(found):
    assert isinstance(found, Exception)
    return f"{type(found).__name__}: {found}"


def test_mean_alone_is_enough_for_plain_messages():
    got = together(MeanOnly, 3, lambda transport: rounds_over(transport, "none"))
    expected, sent = rounds_in_memory("none", 3)
    for values, _, _, nbytes in got:
        torch.testing.assert_close(torch.tensor(values), expected[0].values)
        assert nbytes == sent == expected[0].values.nbytes


def test_mean_alone_is_enough_for_exchanges_that_are_started_and_finished():
    def job(transport):
        transport.prepare(torch.device("cpu"))
        message = Message(torch.full((5,), float(transport.worker)))
        transport.start(message)
        return transport.finish(message), transport.finish(message), message.values.tolist()

    assert together(MeanOnly, 3, job) == [(20, 20, [1.0] * 5)] * 3


@pytest.mark.parametrize("name", ["int8", "topk", "sign"])
def test_without_scatter_and_gather_compression_is_refused_before_training(name):
    codec = codec_of(name)
    missing = "gather" if codec.gathered else "scatter"
    with pytest.raises(UnsupportedError, match=rf"MeanOnly has no {missing}\(\).*{codec.name}"):
        MeanOnly(0, Table(2)).check(codec)


def test_what_a_codec_does_not_need_is_not_asked_for():
    class WithGather(MeanOnly):
        gather = Full.gather

    WithGather(0, Table(2)).check(TopK())
    with pytest.raises(UnsupportedError, match=r"scatter\(\)"):
        WithGather(0, Table(2)).check(find_codec("int8"))
    MeanOnly(0, Table(2)).check(None)
    MeanOnly(0, Table(1)).check(TopK())  # one worker sends nothing
    Full(0, Table(2)).check(TopK())


def test_a_gather_without_the_method_is_refused_when_it_is_tried():
    with pytest.raises(UnsupportedError, match=r"MeanOnly has no gather\(\)"):
        MeanOnly(0, Table(2)).exchange(Message(torch.ones(3), gather=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", CODECS)
@pytest.mark.parametrize("workers", [2, 3])
def test_workers_get_the_bits_of_memory_and_hand_over_what_is_counted(name, workers, dtype):
    expected, sent = rounds_in_memory(name, workers, turns=1, dtype=dtype)
    got = together(Full, workers, lambda t: (*rounds_over(t, name, turns=1, dtype=dtype), t.given))
    for message, (values, own, mean, nbytes, given) in zip(expected, got, strict=True):
        assert torch.equal(message.values, torch.tensor(values))
        assert torch.equal(message.residue.own, torch.tensor(own))
        assert torch.equal(message.residue.mean, torch.tensor(mean))
        assert nbytes == sent == given


def test_a_gather_collects_all_workers_values_and_keeps_ones_own():
    def job(transport):
        message = Message(torch.full((2,), float(transport.worker)), gather=True)
        return transport.exchange(message), message.values.tolist(), message.rows.tolist()

    rows = [[0.0, 0.0], [1.0, 1.0], [2.0, 2.0]]
    assert together(Full, 3, job) == [(8, row, rows) for row in rows]


def test_equal_settings_are_agreed_on_through_the_mean():
    settings = {"sync_every": 64, "compress": None, "names": ("a", "b")}
    assert together(MeanOnly, 3, lambda transport: transport.agree(settings)) == [None] * 3


def test_workers_whose_settings_differ_are_named_to_every_worker():
    def job(transport):
        transport.agree({"sync_every": 65 if transport.worker == 2 else 64})

    for worker, found in enumerate(together(MeanOnly, 4, job)):
        assert "ValueError: worker 2 of 4 has other settings" in error_of(found)
        assert f"This is worker {worker}, with {{'sync_every': 6" in error_of(found)


def test_a_single_worker_keeps_its_values_and_sends_nothing():
    for codec in (None, TopK(), find_codec("int8")):
        message = Message(torch.tensor([1.0, 2.0]), codec=codec)
        Alone().check(codec)
        assert Alone().exchange(message) == 0
        assert message.values.tolist() == [1.0, 2.0]
    message = Message(torch.tensor([1.0, 2.0]), gather=True)
    assert Alone().exchange(message) == 0
    assert message.rows.tolist() == [[1.0, 2.0]]
    Alone().agree({"anything": object()})

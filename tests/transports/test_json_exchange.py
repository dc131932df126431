"""Values of all ranks as JSON: a rank that sends anything else is named, and nothing of it runs."""

import json
import os
import pickle

import pytest
import torch
import torch.distributed as dist

import palsgd
from palsgd.transports import ProcessGroupTransport
from palsgd.transports.byte_means import bytes_of_all
from palsgd.transports.json_exchange import MOST_BYTES, announced, gathered
from support.forked import driven, forked, values_of

CPU = torch.device("cpu")


def values_job():
    rank = dist.get_rank()
    return gathered({"rank": rank, "text": "ü" * rank, "nan": float("nan"), "pair": (1, 2.5)})


def test_every_rank_gets_the_values_of_all_in_their_order(world):
    for found in world.run(values_job, workers=3):
        assert [each["rank"] for each in found] == [0, 1, 2]
        assert [each["text"] for each in found] == ["", "ü", "üü"]
        assert all(each["nan"] != each["nan"] and each["pair"] == [1, 2.5] for each in found)


class Evil:
    """What a rogue rank sends: whoever unpickles it makes a file."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (self.path,)


def rogue_job(sends, path, honest):
    """Rank 1 speaks the protocol of torch's own object collectives with bytes of its choice."""
    if dist.get_rank() == 0:
        return honest()
    if sends == "pickle":
        dist.all_gather_object([None, None], Evil(path))
        return None
    texts = {
        "garbage": bytes(range(256)),
        "nested": b"[" * 200_000,
        "shape": json.dumps({"no": "list"}).encode(),
        "number": b"9" * 10_000,
    }
    length = {"huge": 2**62, "negative": -1, "zero": 0}.get(sends) or len(texts.get(sends, b""))
    lengths = torch.empty(2, dtype=torch.int64)
    dist.all_gather_into_tensor(lengths, torch.tensor([length]))
    if sends in texts:
        row = torch.zeros(int(lengths.max()), dtype=torch.uint8)
        row[:length] = torch.frombuffer(bytearray(texts[sends]), dtype=torch.uint8)
        dist.all_gather_into_tensor(row.new_empty(2 * len(row)), row)
    return None


def agree():
    ProcessGroupTransport().agree({"sync_every": 64})


@pytest.mark.parametrize(
    ("sends", "words"),
    [
        ("pickle", "cannot be read"),
        ("garbage", "cannot be read"),
        ("nested", "nested too deeply"),
        ("shape", "cannot be read"),
        ("number", "cannot be read"),
        ("huge", f"announced {2**62} bytes, and 1 to {MOST_BYTES} can be read"),
        ("negative", "announced -1 bytes"),
        ("zero", "announced 0 bytes"),
    ],
)
def test_a_rogue_rank_is_named_in_one_line_and_nothing_of_it_runs(world, tmp_path, sends, words):
    path = tmp_path / "executed"
    outcome, _ = world.outcomes(rogue_job, workers=2, sends=sends, path=str(path), honest=agree)
    assert outcome.error == "ValueError", outcome.trace
    assert outcome.message.startswith("rank 1 ")
    assert words in outcome.message
    assert len(outcome.message.splitlines()) == 1
    assert len(outcome.message) < 400
    assert not path.exists()
    pickle.loads(pickle.dumps(Evil(str(path))))  # the means would have worked
    assert path.exists()


def long_job():
    return gathered("x" * (MOST_BYTES if dist.get_rank() else 1))


def test_a_rank_that_has_too_much_to_say_is_named_on_all_ranks(world):
    for outcome in world.outcomes(long_job, workers=2):
        assert outcome.error == "ValueError"
        assert "rank 1 announced" in outcome.message


# -- through means alone -------------------------------------------------------------------------


def hears(transport, values):
    return driven(transport, announced(transport, values[transport.worker], CPU))


@pytest.mark.parametrize("workers", [1, 2, 5])
def test_every_worker_hears_the_values_of_all_whatever_their_length(workers):
    values = [{"a": [1, None, "é" * 3]}, "", "x" * 70_001, [], 2**53 + 1][:workers]
    for heard in values_of(forked(hears, workers=workers, values=values)):
        assert heard == [[value] for value in values]


def rogue_means_job(transport, length, text):
    """Worker 1 sends numbers of its choice."""
    if transport.worker == 0:
        return driven(transport, announced(transport, "honest", CPU, str.upper))
    driven(transport, bytes_of_all(transport, torch.tensor([length]).view(torch.uint8), CPU))
    if 0 < length <= MOST_BYTES:
        row = torch.zeros(max(length, len('["HONEST"]')), dtype=torch.uint8)
        row[: len(text)] = torch.frombuffer(bytearray(text), dtype=torch.uint8)
        driven(transport, bytes_of_all(transport, row, CPU))
    return None


@pytest.mark.parametrize(
    ("length", "text", "words"),
    [
        (2**62, b"", f"announced {2**62} bytes, and 1 to {MOST_BYTES} can be read"),
        (-1, b"", "announced -1 bytes"),
        (256, bytes(range(256)), "cannot be read"),
        (100_000, b"[" * 100_000, "nested too deeply"),
        (4, b"[{}]", "cannot be read (TypeError"),
        (4, b'"no"', "it is no list"),
    ],
)
def test_a_rogue_worker_is_named_whose_numbers_are_no_values(length, text, words):
    outcome, _ = forked(rogue_means_job, workers=2, length=length, text=text)
    assert outcome.error == "ValueError", outcome.trace
    assert outcome.message.startswith("worker 1 ")
    assert words in outcome.message
    assert len(outcome.message.splitlines()) == 1


def not_finite_job(transport):
    if transport.worker == 0:
        return driven(transport, announced(transport, "honest", CPU))
    transport.mean(palsgd.Message(torch.full((10,), float("nan"))))
    return None


def test_numbers_that_are_not_finite_are_no_lengths():
    outcome, _ = forked(not_finite_job, workers=2)
    assert (outcome.error, "announced 0 bytes" in outcome.message) == ("ValueError", True)

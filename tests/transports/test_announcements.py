"""Values and bytes that all ranks hear of, through means alone."""

import pytest
import torch

from palsgd import announcements
from support.forked import forked, values_of


def driven(transport, exchange):
    """What a generator of messages returns."""
    while True:
        try:
            transport.exchange(next(exchange))
        except StopIteration as end:
            return end.value


def hears(transport, values):
    mine = values[transport.worker]
    return driven(transport, announcements.announced(transport, mine, torch.device("cpu")))


@pytest.mark.parametrize("workers", [1, 2, 5])
def test_every_worker_hears_the_values_of_all_whatever_their_length(workers):
    values = [{"a": [1, None, "é" * 3]}, "", "x" * 70_001, [], 2**53 + 1][:workers]
    for heard in values_of(forked(hears, workers=workers, values=values)):
        assert heard == [[value] for value in values]


def takes(transport, size, source):
    announcements._PIECE = 3  # numbers in a message
    data = torch.arange(size).mul(37).to(torch.uint8) if transport.worker == source else None
    exchange = announcements.sent_from(transport, source, data, size, torch.device("cpu"))
    return driven(transport, exchange).tolist()


@pytest.mark.parametrize("size", [0, 1, 5, 6, 7, 257])
@pytest.mark.parametrize("source", [0, 2])
def test_bytes_arrive_as_they_were_sent_in_pieces_of_any_size(size, source):
    for got in values_of(forked(takes, workers=3, size=size, source=source)):
        assert got == [37 * i % 256 for i in range(size)]

"""Bytes of one worker reach all others, through means alone."""

import pytest
import torch

from palsgd.transports import byte_means
from support.forked import driven, forked, values_of


def takes(transport, size, source):
    byte_means._PIECE = 3  # numbers in a message
    data = torch.arange(size).mul(37).to(torch.uint8) if transport.worker == source else None
    exchange = byte_means.sent_from(transport, source, data, size, torch.device("cpu"))
    return driven(transport, exchange).tolist()


@pytest.mark.parametrize("size", [0, 1, 5, 6, 7, 257])
@pytest.mark.parametrize("source", [0, 2])
def test_bytes_arrive_as_they_were_sent_in_pieces_of_any_size(size, source):
    for got in values_of(forked(takes, workers=3, size=size, source=source)):
        assert got == [37 * i % 256 for i in range(size)]

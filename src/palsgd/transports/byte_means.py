"""Bytes of one worker or of all, through means alone, which every transport has.

Two bytes are sent as one number below 2^16, which a mean keeps exactly (see `palsgd.rows`).
"""

from collections.abc import Generator

import numpy as np
import torch
from torch import Tensor

from palsgd.transports.transport import Message, Transport

_PIECE = 1 << 21  # numbers in one message of a file that is sent


def bytes_of_all(
    transport: Transport, row: Tensor, device: torch.device
) -> Generator[Message, int, Tensor]:
    """The rows of bytes that all workers give, each as long as this worker's."""
    numbers = _numbers(row)
    matrix = torch.zeros(transport.workers, len(numbers), device=device)
    matrix[transport.worker] = numbers.to(device)
    values = matrix.view(-1)
    yield Message(values)
    rows = [_bytes_of(each, transport.workers) for each in values.view(transport.workers, -1)]
    return torch.stack([each[: len(row)] for each in rows])


def sent_from(
    transport: Transport, source: int, data: Tensor | None, size: int, device: torch.device
) -> Generator[Message, int, Tensor]:
    """The bytes that worker `source` has in `data`, on all workers. All ranks call this, and those
    of the source give the same bytes, or each its own if the worker is sharded."""
    found = torch.empty(size, dtype=torch.uint8)
    for start in range(0, size, 2 * _PIECE):
        stop = min(size, start + 2 * _PIECE)
        numbers = torch.zeros((stop - start) // 2 + 1)
        if transport.worker == source:
            assert data is not None
            numbers = _numbers(data[start:stop])
        values = numbers.to(device)
        yield Message(values)
        found[start:stop] = _bytes_of(values, transport.workers)[: stop - start]
    return found


def _numbers(data: Tensor) -> Tensor:
    """Two bytes in each number, and one number more, so that every length is a whole one."""
    content = data.numpy().tobytes()
    padded = content + bytes(2 - len(content) % 2)
    return torch.from_numpy(np.frombuffer(padded, dtype="<u2").astype(np.float32))


def _bytes_of(mean: Tensor, workers: int) -> Tensor:
    """The bytes behind a mean. Numbers that nobody who follows the protocol sends, nan among them,
    become bytes too, as whoever asked for the bytes has to check them anyway."""
    numbers = (mean.cpu().double() * workers).round().nan_to_num(0.0).clamp(0, 0xFFFF)
    return torch.from_numpy(numbers.numpy().astype("<u2").view(np.uint8))

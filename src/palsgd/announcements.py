"""A value that every rank announces to all others, through means alone, which all transports have.

The ranks of a worker collect their values first. The workers then exchange one text each: the bytes
of a text are sent as numbers below 2^16, which a mean keeps exactly (see `palsgd.rows`).
"""

import json
from collections.abc import Generator
from typing import Any

import numpy as np
import torch
from torch import Tensor

from palsgd.rows import halves, joined, own_row, rows_of_all
from palsgd.transports.transport import Message, Transport

_PIECE = 1 << 21  # numbers in one message of a file that is sent


def announced(
    transport: Transport, value: Any, device: torch.device
) -> Generator[Message, int, list[list[Any]]]:
    """The values of all ranks: one list for each worker, one entry for each of its ranks. All ranks
    call this. Values are those of JSON."""
    like = torch.empty(0, device=device)
    worker, workers = transport.worker, transport.workers
    text = json.dumps(_of_ranks(transport, value, device)).encode()
    lengths = own_row(worker, workers, halves(len(text)), like)
    yield Message(lengths)
    sizes = [joined(*row) for row in rows_of_all(lengths, workers)]
    rows = like.new_zeros(workers, max(sizes) // 2 + 1)
    rows[worker, : len(text) // 2 + 1] = _numbers(text).to(device)
    values = rows.view(-1)
    yield Message(values)
    texts = [_bytes_of(row, workers) for row in values.view(workers, -1)]
    return [json.loads(text[:size]) for text, size in zip(texts, sizes, strict=True)]


def _of_ranks(transport: Transport, value: Any, device: torch.device) -> list[Any]:
    """The values of the ranks of this worker."""
    text = json.dumps(value).encode()
    if transport.inside is None:
        return [json.loads(text)]
    sizes = transport.gather_inside(torch.tensor([len(text)], device=device)).view(-1).tolist()
    row = torch.zeros(max(sizes), dtype=torch.uint8)
    row[: len(text)] = torch.from_numpy(np.frombuffer(text, dtype=np.uint8).copy())
    rows = transport.gather_inside(row.to(device)).cpu()
    return [json.loads(each[:n].numpy().tobytes()) for each, n in zip(rows, sizes, strict=True)]


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
            numbers = _numbers(data[start:stop].numpy().tobytes())
        values = numbers.to(device)
        yield Message(values)
        piece = np.frombuffer(_bytes_of(values, transport.workers), dtype=np.uint8)
        found[start:stop] = torch.from_numpy(piece[: stop - start].copy())
    return found


def _numbers(data: bytes) -> Tensor:
    """Two bytes in each number, and one number more, so that every length is a whole one."""
    padded = data + bytes(2 - len(data) % 2)
    return torch.from_numpy(np.frombuffer(padded, dtype="<u2").astype(np.float32))


def _bytes_of(mean: Tensor, workers: int) -> bytes:
    numbers = (mean.cpu().double() * workers).round().numpy()
    return numbers.astype("<u2").tobytes()

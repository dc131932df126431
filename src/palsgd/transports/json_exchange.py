"""Settings, paths and records of all ranks of a process group, sent as JSON.

Whoever can pose as a rank could run code on all others if they unpickled what it sends, as
torch's own collectives of objects do. JSON holds data only.
"""

import json
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from palsgd.process_groups import device_of, ranks_of
from palsgd.transports.waiting import waiting_for

MOST_BYTES = 2**26  # of one rank


def gathered(
    mine: Any, group: ProcessGroup | None = None, read: Callable[[Any], Any] | None = None
) -> list[Any]:
    """The values of all ranks of `group`, in their order. Tuples arrive as lists, and what JSON
    does not have as its text. Every rank must call this.

    Args:
        mine: the value of this rank.
        group: by default all ranks.
        read: what makes of a value what the caller expects; it raises if the value is something
            else.

    Raises:
        ValueError: on every rank, if a rank sent no JSON, too much of it, or something that
            `read` refuses. It names the rank.
    """
    sent, device, ranks = _encoded(mine), device_of(group), ranks_of(group)
    with waiting_for(group):
        lengths = _of_all(torch.tensor([len(sent)], device=device), group)
        sizes = [int(length) for length in lengths.view(-1)]
        for rank, size in zip(ranks, sizes, strict=True):
            if not 0 < size <= MOST_BYTES:
                raise ValueError(
                    f"rank {rank} announced {size} bytes, and 1 to {MOST_BYTES} can be read; start "
                    "all ranks from the same program, on a network that nobody else can reach"
                )
        padded = torch.zeros(max(sizes), dtype=torch.uint8)
        padded[: len(sent)] = torch.frombuffer(sent, dtype=torch.uint8)
        rows = _of_all(padded.to(device), group).cpu()
    return [
        _decoded(row[:size], rank, read) for row, size, rank in zip(rows, sizes, ranks, strict=True)
    ]


def _of_all(mine: Tensor, group: ProcessGroup | None) -> Tensor:
    rows = mine.new_empty(dist.get_world_size(group), len(mine))
    dist.all_gather_into_tensor(rows.view(-1), mine, group=group)
    return rows


def _encoded(value: Any) -> bytearray:
    return bytearray(json.dumps(value, default=_as_data).encode())


def _as_data(value: Any) -> Any:
    """NumPy's numbers are numbers, anything else is its text."""
    return value.item() if hasattr(value, "item") else repr(value)


def _decoded(row: Tensor, rank: int, read: Callable[[Any], Any] | None) -> Any:
    text = row.numpy().tobytes()
    try:
        value = json.loads(text)
        return value if read is None else read(value)
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise ValueError(
            f"rank {rank} sent {len(text)} bytes that cannot be read ({_reason(error)}): "
            f"{text[:40]!r}; start all ranks from the same program, on a network that nobody else "
            "can reach"
        ) from None


def _reason(error: Exception) -> str:
    deep = isinstance(error, RecursionError)
    return "nested too deeply" if deep else f"{type(error).__name__}: {str(error)[:80]}"

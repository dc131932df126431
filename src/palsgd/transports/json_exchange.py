"""Settings, paths and records that all ranks tell each other, sent as JSON.

Whoever can pose as a rank could run code on all others if they unpickled what it sends, as
torch's own collectives of objects do. JSON holds data only. Two ways carry it: the collectives of a
process group, and the means of any transport.
"""

import json
from collections.abc import Callable, Generator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from palsgd.process_groups import device_of, ranks_of
from palsgd.transports.byte_means import bytes_of_all
from palsgd.transports.transport import Message, Transport
from palsgd.transports.waiting import waiting_for

MOST_BYTES = 2**26  # of one rank

Reader = Callable[[Any], Any]  # makes of a value what the caller expects, or raises


def gathered(mine: Any, group: ProcessGroup | None = None, read: Reader | None = None) -> list[Any]:
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
    device, ranks = device_of(group), ranks_of(group)
    exchange = _exchanged(mine, lambda place: f"rank {ranks[place]}", read)
    with waiting_for(group):
        return _carried(exchange, lambda row: _of_all(row.to(device), group))


def announced(
    transport: Transport, mine: Any, device: torch.device, read: Reader | None = None
) -> Generator[Message, int, list[list[Any]]]:
    """The values of all ranks of all workers: one list for each worker, one entry for each of its
    ranks. The ranks of a worker collect theirs first, then the workers exchange those lists. All
    ranks call this. It raises as `gathered` does."""
    inside = _carried(
        _exchanged(mine, lambda rank: f"rank {rank} of worker {transport.worker}", None),
        lambda row: transport.gather_inside(row.to(device)),
    )
    exchange = _exchanged(inside, "worker {}".format, lambda found: _list_of(found, read))
    row = next(exchange)
    while True:
        rows = yield from bytes_of_all(transport, row.view(torch.uint8), device)
        try:
            row = exchange.send(rows.view(row.dtype))
        except StopIteration as end:
            return end.value


def _exchanged(
    mine: Any, name: Callable[[int], str], read: Reader | None
) -> Generator[Tensor, Tensor, list[Any]]:
    """The values of all who take part, the first of whom is called `name(0)`. It yields this one's
    row, of a length that all have in common, and is sent the rows of all."""
    text = _encoded(mine)
    sizes = [int(size) for size in (yield torch.tensor([len(text)])).view(-1)]
    for place, size in enumerate(sizes):
        if not 0 < size <= MOST_BYTES:
            raise ValueError(
                f"{name(place)} announced {size} bytes, and 1 to {MOST_BYTES} can be read; start "
                "all ranks from the same program, on a network that nobody else can reach"
            )
    padded = torch.zeros(max(sizes), dtype=torch.uint8)
    padded[: len(text)] = torch.frombuffer(text, dtype=torch.uint8)
    rows = (yield padded).cpu()
    return [_decoded(rows[place, :size], name(place), read) for place, size in enumerate(sizes)]


def _carried(
    exchange: Generator[Tensor, Tensor, list[Any]], carry: Callable[[Tensor], Tensor]
) -> list[Any]:
    """What an exchange returns whose rows are carried by a call."""
    row = next(exchange)
    while True:
        try:
            row = exchange.send(carry(row))
        except StopIteration as end:
            return end.value


def _of_all(mine: Tensor, group: ProcessGroup | None) -> Tensor:
    rows = mine.new_empty(dist.get_world_size(group), len(mine))
    dist.all_gather_into_tensor(rows.view(-1), mine, group=group)
    return rows


def _list_of(found: Any, read: Reader | None) -> list[Any]:
    if not isinstance(found, list):
        raise TypeError("it is no list")
    return found if read is None else [read(each) for each in found]


def _encoded(value: Any) -> bytearray:
    return bytearray(json.dumps(value, default=_as_data).encode())


def _as_data(value: Any) -> Any:
    """NumPy's numbers are numbers, anything else is its text."""
    return value.item() if hasattr(value, "item") else repr(value)


def _decoded(row: Tensor, name: str, read: Reader | None) -> Any:
    text = row.numpy().tobytes()
    try:
        value = json.loads(text)
        return value if read is None else read(value)
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise ValueError(
            f"{name} sent {len(text)} bytes that cannot be read ({_reason(error)}): "
            f"{text[:40]!r}; start all ranks from the same program, on a network that nobody else "
            "can reach"
        ) from None


def _reason(error: Exception) -> str:
    deep = isinstance(error, RecursionError)
    return "nested too deeply" if deep else f"{type(error).__name__}: {str(error)[:80]}"

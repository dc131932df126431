"""The mean of coded messages, in one of two forms that the codec chooses.

`CodedMean` has two steps, as a ring all-reduce has. First, chunk j of every worker's message is
coded and sent to worker j. Second, worker j takes the mean of these chunks in full precision, codes
the mean and sends it to all workers. What a code loses is kept (`Residue`) and added to the next
message; this is error feedback, and both steps have it.

`GatheredMean` has one step. Every worker codes its message once and sends it to all workers, and
each worker takes the mean of the decoded messages. There is one loss, with error feedback.

In both forms only codes are sent, apart from the last `exact` values of a message. All workers
compute the mean from the same bytes in the order of the workers, so all get the same bits.

A long message is exchanged in segments, and a segment is coded in pieces, so that the codes and the
intermediate results of a message of any length take some tens of MiB. Blocks are coded one by one
and segments are whole blocks, so neither changes the bits of the mean.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from palsgd.codecs.codec import BLOCK, Codec, to_bytes, to_numbers

# Elements of a segment. With two workers the codes of a segment, those that come back and the new
# residue of the mean take 24 MiB in bf16, and less in all shorter codes. gloo copies what it
# gathers once more, and a process keeps some of the memory that it has freed.
SEGMENT = 1 << 22
GATHERED = 1 << 24  # bytes of the codes of all workers in a segment that is gathered
# Elements that are coded together: what lies between the passes over a piece stays in the cache of
# a CPU. On a GPU a kernel on so few elements would take less time than its launch.
PIECE = {"cpu": 1 << 17}
LARGE_PIECE = 1 << 20


@dataclass
class Residue:
    """What earlier messages left unsent: `own` of this worker's messages, `mean` of the means that
    this worker coded. An exchange that ends well replaces both in place."""

    own: Tensor  # float32, one entry for each coded value of a message
    mean: Tensor  # of this worker's chunks; empty if messages are gathered
    fresh: bool = True  # has no message been exchanged yet?


class Exchanger(Protocol):
    """The methods of a transport that a coded mean uses."""

    def scatter(self, rows: Tensor) -> Tensor: ...

    def gather(self, row: Tensor) -> Tensor: ...


def message_bytes(
    *, elements: int, exact: int, itemsize: int, codec: Codec | None, workers: int
) -> int:
    """The bytes that one worker hands over for a message of `elements` values of `itemsize` bytes,
    the last `exact` of which are not coded.

    The bytes of a mean are counted once, although they are sent in two steps. The bytes of a
    gathered message are those of this worker's own codes, which every other worker receives.
    """
    if workers == 1:
        return 0
    if codec is None:
        return elements * itemsize
    if codec.gathered:
        return _blocks(elements - exact, 1) * codec.width + exact * itemsize
    tail = math.ceil(exact / workers) * itemsize
    return workers * (_blocks(elements - exact, workers) * codec.width + tail)


def _blocks(elements: int, chunks: int) -> int:
    """The number of blocks in each of `chunks` equal chunks. It is at least 1, as a codec need not
    accept an empty tensor."""
    return max(1, math.ceil(elements / (chunks * BLOCK)))


# -- where things lie in a message -----------------------------------------------------------------


def segments(elements: int, codec: Codec, workers: int) -> list[range]:
    """The coded values of a message, cut into segments. All but the last have whole blocks for
    every worker, so that the cuts change neither blocks nor bytes."""
    blocks = SEGMENT // (workers * BLOCK)
    if codec.gathered:
        blocks = min(blocks, GATHERED // (workers * workers * codec.width))
    width = max(1, blocks) * workers * BLOCK
    return [range(low, min(low + width, elements)) for low in range(0, max(1, elements), width)]


def chunk(segment: range, worker: int, workers: int) -> range:
    """The values of a segment whose mean this worker codes."""
    width = _blocks(len(segment), workers) * BLOCK
    low = min(segment.start + worker * width, segment.stop)
    return range(low, min(low + width, segment.stop))


def owned(elements: int, codec: Codec, worker: int, workers: int) -> list[range]:
    """The values of a message whose mean this worker codes, segment by segment."""
    if codec.gathered:
        return []
    return [chunk(each, worker, workers) for each in segments(elements, codec, workers)]


def new_residue(
    elements: int, codec: Codec, *, worker: int, workers: int, device: torch.device
) -> Residue:
    """The residue of a message that nothing precedes."""
    coded = sum(map(len, owned(elements, codec, worker, workers)))
    return Residue(torch.zeros(elements, device=device), torch.zeros(coded, device=device))


class Cut(NamedTuple):
    """Some blocks of a chunk: their place in its codes, and that of their values in the segment.
    The last block of a segment may have more room than values."""

    blocks: slice
    values: slice


def cuts(width: int, low: int, elements: int, piece: int) -> Iterator[Cut]:
    """The pieces of a chunk of `width` blocks that begins at the value `low` of `elements`."""
    step = max(1, piece // BLOCK)
    for first in range(0, width, step):
        last = min(first + step, width)
        start = min(low + first * BLOCK, elements)
        yield Cut(slice(first, last), slice(start, min(low + last * BLOCK, elements)))


# -- the exchange ----------------------------------------------------------------------------------


def coded_segments(
    values: Tensor,
    exact: int,
    codec: Codec,
    residue: Residue,
    *,
    worker: int,
    workers: int,
    device: torch.device | None = None,
) -> "list[Coded]":
    """One worker's message, segment by segment. The exact values go with the last segment. The
    arithmetic is done on `device`, where the values may or may not lie."""
    kind: type[Coded] = GatheredMean if codec.gathered else CodedMean
    elements, found, coded = len(values) - exact, [], 0
    for segment in segments(elements, codec, workers):
        last = segment.stop == elements
        own = 0 if codec.gathered else len(chunk(segment, worker, workers))
        found.append(
            kind(
                values[segment.start : len(values) if last else segment.stop],
                exact if last else 0,
                codec,
                Residue(
                    residue.own[segment.start : segment.stop],
                    residue.mean[coded : coded + own],
                    residue.fresh,
                ),
                worker=worker,
                workers=workers,
                device=device or values.device,
            )
        )
        coded += own
    return found


class Coded(ABC):
    """One segment of a worker's message: the code that both forms share.

    While the codes are on their way, what they lose lies in the memory of the values. It becomes
    the residue when the mean has arrived, so a failed exchange leaves the residue of its segment as
    it was.
    """

    def __init__(
        self,
        values: Tensor,
        exact: int,
        codec: Codec,
        residue: Residue,
        *,
        worker: int,
        workers: int,
        device: torch.device,
    ):
        self._codec, self._residue = codec, residue
        self._worker, self._workers, self._device = worker, workers, device
        self._payload, self._tail = values[: len(values) - exact], values[len(values) - exact :]
        self._piece = PIECE.get(device.type, LARGE_PIECE)

    @abstractmethod
    def exchange(self, transport: Exchanger) -> None:
        """Replace the values by the mean, through a transport."""

    @staticmethod
    @abstractmethod
    def in_memory(everyone: Sequence[Any]) -> None:
        """Replace the first worker's values by the mean, from the messages of all workers in their
        order."""

    def _encode(self, codes: Tensor, low: int) -> None:
        """Write the codes of a chunk of the values, which begins at `low`, and put what they lose
        into the place of the values."""
        for blocks, place in cuts(len(codes), low, len(self._payload), self._piece):
            whole = self._padded(self._payload[place], blocks)
            self._add(whole, self._residue.own[place])
            found = codes[blocks] = self._codec.encode(whole)
            whole.sub_(self._codec.decode(found))
            self._payload[place] = whole.view(-1)[: place.stop - place.start]

    def _padded(self, values: Tensor, blocks: slice) -> Tensor:
        """Values as blocks of 32-bit floats, with zeros up to whole blocks."""
        size = (blocks.stop - blocks.start) * BLOCK
        if len(values) == size:
            found = values.to(self._device, torch.float32, copy=True)
        else:
            found = torch.zeros(size, dtype=torch.float32, device=self._device)
            found[: len(values)] = values
        return found.view(-1, BLOCK)

    def _add(self, whole: Tensor, residue: Tensor) -> None:
        if not self._residue.fresh:
            more, decay = residue.to(self._device), self._codec.decay
            flat = whole.view(-1)[: len(more)]
            flat += more if decay == 1 else more * decay

    def _mean_of(self, codes: Sequence[Tensor]) -> Tensor:
        """The mean of the workers' decoded blocks, added in the order of the workers, so that every
        engine gets the same bits."""
        total = self._codec.decode(codes[0])
        for each in codes[1:]:
            total += self._codec.decode(each)
        return total.div_(self._workers)

    def _codes(self, row: Tensor, blocks: int) -> Tensor:
        width = self._codec.width
        return row[: blocks * width].view(blocks, width)

    def _numbers(self, row: Tensor, blocks: int) -> Tensor:
        """The exact values behind the codes of a row."""
        return to_numbers(row[blocks * self._codec.width :], self._tail.dtype)

    def keep(self) -> None:
        """Keep what the codes have lost as the residue of the next message."""
        self._residue.own.copy_(self._payload)


class CodedMean(Coded):
    """The mean of one worker's `values` with those of the others, in two coded steps."""

    def __init__(self, values: Tensor, exact: int, *rest: Any, **known: Any):
        super().__init__(values, exact, *rest, **known)
        self._rows = _blocks(len(self._payload), self._workers)  # blocks in a chunk
        self._tail_values = math.ceil(exact / self._workers)  # that go with a chunk
        self._mean_left: Tensor | None = None

    def exchange(self, transport: Exchanger) -> None:
        row = self.mean(transport.scatter(self.chunks()))
        means = transport.gather(row)
        self.keep()
        self.accept(means)

    @staticmethod
    def in_memory(everyone: "Sequence[CodedMean]") -> None:
        sent = [each.chunks() for each in everyone]
        means = [each.mean([row[k] for row in sent]) for k, each in enumerate(everyone)]
        for each in everyone:
            each.keep()
        everyone[0].accept(means)

    def _low(self, worker: int) -> int:
        """Where the chunk of a worker begins."""
        return worker * self._rows * BLOCK

    def chunks(self) -> Tensor:
        """The bytes to send: one row for each worker."""
        codes, tail = self._rows * self._codec.width, self._tail_values * self._tail.itemsize
        sent = torch.empty(self._workers, codes + tail, dtype=torch.uint8, device=self._device)
        for worker, row in enumerate(sent):
            self._encode(self._codes(row, self._rows), self._low(worker))
        if tail:
            numbers = self._tail.new_zeros(self._workers * self._tail_values)
            numbers[: len(self._tail)] = self._tail
            sent[:, codes:] = to_bytes(numbers.view(self._workers, -1))
        return sent

    def mean(self, received: Sequence[Tensor] | Tensor) -> Tensor:
        """The coded mean of this worker's chunk, from the rows that all workers sent."""
        row = torch.empty_like(received[0])
        codes, rows = self._codes(row, self._rows), [self._codes(r, self._rows) for r in received]
        left = self._mean_left = torch.empty_like(self._residue.mean)
        for blocks, place in cuts(self._rows, 0, len(left), self._piece):
            whole = self._mean_of([each[blocks] for each in rows])
            self._add(whole, self._residue.mean[place])
            found = codes[blocks] = self._codec.encode(whole)
            whole.sub_(self._codec.decode(found))
            left[place] = whole.view(-1)[: place.stop - place.start]
        if self._tail_values:
            tail = self._numbers(received[0], self._rows)
            for each in received[1:]:
                tail += self._numbers(each, self._rows)
            row[self._rows * self._codec.width :] = to_bytes(tail.div_(self._workers))
        return row

    def keep(self) -> None:
        super().keep()
        assert self._mean_left is not None
        self._residue.mean.copy_(self._mean_left)
        self._mean_left = None

    def accept(self, means: Sequence[Tensor] | Tensor) -> None:
        """Replace the values by the mean, whose rows are in the order of the workers that made
        them."""
        for worker, row in enumerate(means):
            codes, low = self._codes(row, self._rows), self._low(worker)
            for blocks, place in cuts(self._rows, low, len(self._payload), self._piece):
                if place.stop > place.start:
                    decoded = self._codec.decode(codes[blocks]).view(-1)
                    self._payload[place] = decoded[: place.stop - place.start]
        if self._tail_values:
            tail = torch.cat([self._numbers(row, self._rows) for row in means])
            self._tail.copy_(tail[: len(self._tail)])


class GatheredMean(Coded):
    """The mean of one worker's `values` with those of the others, from the codes of all workers."""

    def exchange(self, transport: Exchanger) -> None:
        rows = transport.gather(self.row())
        self.keep()
        self.accept(rows)

    @staticmethod
    def in_memory(everyone: "Sequence[GatheredMean]") -> None:
        rows = [each.row() for each in everyone]
        for each in everyone:
            each.keep()
        everyone[0].accept(rows)

    @property
    def _rows(self) -> int:
        return _blocks(len(self._payload), 1)

    def row(self) -> Tensor:
        """The bytes to send to every worker."""
        codes = self._rows * self._codec.width
        row = torch.empty(codes + self._tail.nbytes, dtype=torch.uint8, device=self._device)
        self._encode(self._codes(row, self._rows), 0)
        row[codes:] = to_bytes(self._tail)
        return row

    def accept(self, rows: Sequence[Tensor] | Tensor) -> None:
        """Replace the values by the mean of the workers' rows."""
        codes = [self._codes(row, self._rows) for row in rows]
        for blocks, place in cuts(self._rows, 0, len(self._payload), self._piece):
            mean = self._mean_of([each[blocks] for each in codes]).view(-1)
            self._payload[place] = mean[: place.stop - place.start]
        tail = self._numbers(rows[0], self._rows)
        for row in rows[1:]:
            tail += self._numbers(row, self._rows)
        self._tail.copy_(tail.div_(self._workers))

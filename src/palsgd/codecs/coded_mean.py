"""The mean of coded messages, in one of two forms that the codec chooses.

`CodedMean` has two steps, as a ring all-reduce has. First, chunk j of every worker's message is
coded and sent to worker j. Second, worker j takes the mean of these chunks in full precision, codes
the mean and sends it to all workers. What a code loses is kept (`Residue`) and added to the next
message; this is error feedback, and both steps have it.

`GatheredMean` has one step. Every worker codes its message once and sends it to all workers, and
each worker takes the mean of the decoded messages. There is one loss, with error feedback.

In both forms only codes are sent, apart from the last `exact` values of a message. All workers
compute the mean from the same bytes in the order of the workers, so all get the same bits.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from palsgd.codecs.codec import BLOCK, Codec, to_bytes, to_numbers


@dataclass
class Residue:
    """What earlier messages left unsent: `own` of this worker's messages, `mean` of the means that
    this worker coded."""

    own: Tensor
    mean: Tensor  # empty if messages are gathered, as no worker codes a mean then


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


def coded_mean(
    values: Tensor, exact: int, codec: Codec, residue: Residue | None, workers: int
) -> "Coded":
    kind: type[Coded] = GatheredMean if codec.gathered else CodedMean
    return kind(values, exact, codec, residue, workers)


class Coded(ABC):
    """The code that both forms share: it turns the coded and the exact part of a message into bytes
    and back."""

    def __init__(
        self, values: Tensor, exact: int, codec: Codec, residue: Residue | None, workers: int
    ):
        self._codec, self._workers, self._residue = codec, workers, residue
        self._payload, self._tail = values[: len(values) - exact], values[len(values) - exact :]
        # what this exchange leaves unsent, set by the exchange
        self.left = Residue(values[:0], values[:0])

    @abstractmethod
    def exchange(self, transport: Exchanger) -> None:
        """Replace the values by the mean, through a transport."""

    @staticmethod
    @abstractmethod
    def in_memory(everyone: Sequence[Any]) -> None:
        """Replace the first worker's values by the mean, from the messages of all workers in their
        order."""

    def _coded(self, whole: Tensor, residue: Tensor | None) -> tuple[Tensor, Tensor]:
        """The codes of `whole` plus the residue; and the new residue, in the memory of `whole`."""
        if residue is not None:
            decay = self._codec.decay
            whole += residue if decay == 1 else residue * decay
        codes = self._codec.encode(whole.view(-1, BLOCK))
        return codes, whole.sub_(self._codec.decode(codes).reshape(-1))

    def _padded(self, blocks: int) -> Tensor:
        """The values to be coded as 32-bit floats, with zeros up to whole blocks."""
        whole = self._payload.new_zeros(blocks * BLOCK, dtype=torch.float32)
        whole[: len(self._payload)] = self._payload
        return whole

    def _decoded(self, row: Tensor, tail_bytes: int) -> tuple[Tensor, Tensor]:
        codes, tail = row.split([len(row) - tail_bytes, tail_bytes])
        decoded = self._codec.decode(codes.view(-1, self._codec.width)).reshape(-1)
        return decoded, to_numbers(tail, self._tail.dtype)

    def _mean(self, rows: Tensor, tail_bytes: int) -> tuple[Tensor, Tensor]:
        """The mean of the decoded rows, added in the order of the workers, so that every engine
        gets the same bits."""
        total, tail = self._decoded(rows[0], tail_bytes)
        for row in rows[1:]:
            more, more_tail = self._decoded(row, tail_bytes)
            total += more
            tail += more_tail
        return total.div_(self._workers), tail.div_(self._workers)

    def _put(self, payload: Tensor, tail: Tensor) -> None:
        self._payload.copy_(payload[: len(self._payload)])
        self._tail.copy_(tail[: len(self._tail)])


class CodedMean(Coded):
    """The mean of one worker's `values` with those of the others, in two coded steps."""

    def __init__(
        self, values: Tensor, exact: int, codec: Codec, residue: Residue | None, workers: int
    ):
        super().__init__(values, exact, codec, residue, workers)
        self._rows = _blocks(len(self._payload), workers)  # blocks in a chunk
        self._tail_width = math.ceil(exact / workers) * values.itemsize

    def exchange(self, transport: Exchanger) -> None:
        received = transport.scatter(self.chunks())
        self.accept(transport.gather(self.mean(received)))

    @staticmethod
    def in_memory(everyone: "Sequence[CodedMean]") -> None:
        sent = torch.stack([each.chunks() for each in everyone])
        means = torch.stack([each.mean(sent[:, k]) for k, each in enumerate(everyone)])
        everyone[0].accept(means)

    def chunks(self) -> Tensor:
        """The bytes to send: one row for each worker."""
        own = None if self._residue is None else self._residue.own
        codes, self.left.own = self._coded(self._padded(self._workers * self._rows), own)
        tail = self._tail.new_zeros(self._workers * self._tail_width // self._tail.itemsize)
        tail[: len(self._tail)] = self._tail
        return torch.cat(
            [codes.reshape(self._workers, -1), to_bytes(tail.view(self._workers, -1))], 1
        )

    def mean(self, received: Tensor) -> Tensor:
        """The coded mean of this worker's chunk, from the rows that all workers sent."""
        whole, tail = self._mean(received, self._tail_width)
        before = None if self._residue is None else self._residue.mean
        codes, self.left.mean = self._coded(whole, before)
        return torch.cat([codes.reshape(-1), to_bytes(tail)])

    def accept(self, means: Tensor) -> None:
        """Replace the values by the mean, whose rows are in the order of the workers that made
        them."""
        parts = [self._decoded(row, self._tail_width) for row in means]
        self._put(torch.cat([part for part, _ in parts]), torch.cat([tail for _, tail in parts]))


class GatheredMean(Coded):
    """The mean of one worker's `values` with those of the others, from the codes of all workers."""

    def exchange(self, transport: Exchanger) -> None:
        self.accept(transport.gather(self.row()))

    @staticmethod
    def in_memory(everyone: "Sequence[GatheredMean]") -> None:
        everyone[0].accept(torch.stack([each.row() for each in everyone]))

    def row(self) -> Tensor:
        """The bytes to send to every worker."""
        own = None if self._residue is None else self._residue.own
        codes, self.left.own = self._coded(self._padded(_blocks(len(self._payload), 1)), own)
        return torch.cat([codes.reshape(-1), to_bytes(self._tail)])

    def accept(self, rows: Tensor) -> None:
        """Replace the values by the mean of the workers' rows."""
        self._put(*self._mean(rows, self._tail.nbytes))

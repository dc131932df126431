"""The mean of coded messages, in one of two forms that the codec chooses.

In two steps, as in a ring all-reduce (`CodedMean`): every worker sends each other worker that
one's chunk, coded; each takes the mean of the chunks it got, in full precision, and sends that,
coded again, to all. What a code loses is kept (`Residue`) and added to the next message: error
feedback, on both steps.

Gathered (`GatheredMean`): every worker codes its message once and sends it to all, and each takes
the mean of the decoded messages. There is one loss, and error feedback on it alone.

In both forms nothing but codes travels, apart from the last `exact` values of a message, and all
workers compute the mean from the same bytes in the order of the workers, so all get the same bits.
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
    """What earlier messages left unsent: of this worker's own, and of the means it made."""

    own: Tensor
    mean: Tensor  # empty where messages are gathered, since nobody codes a mean then


class Exchanger(Protocol):
    """What a coded mean needs of a transport."""

    def scatter(self, rows: Tensor) -> Tensor: ...

    def gather(self, row: Tensor) -> Tensor: ...


def message_bytes(
    *, elements: int, exact: int, itemsize: int, codec: Codec | None, workers: int
) -> int:
    """What one worker hands over for a message of `elements` values of `itemsize` bytes, the last
    `exact` of which are not coded.

    A mean's bytes are counted once, although they travel in two steps. A gathered message's are
    those of this worker's own, which every other worker receives.
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
    """Blocks in each of so many equal chunks; never none, as a codec need not know what that is."""
    return max(1, math.ceil(elements / (chunks * BLOCK)))


def coded_mean(
    values: Tensor, exact: int, codec: Codec, residue: Residue | None, workers: int
) -> "Coded":
    kind: type[Coded] = GatheredMean if codec.gathered else CodedMean
    return kind(values, exact, codec, residue, workers)


class Coded(ABC):
    """What both forms share: a message in its two parts, and how they become bytes and back."""

    def __init__(
        self, values: Tensor, exact: int, codec: Codec, residue: Residue | None, workers: int
    ):
        self._codec, self._workers, self._residue = codec, workers, residue
        self._payload, self._tail = values[: len(values) - exact], values[len(values) - exact :]
        self.left = Residue(values[:0], values[:0])  # what this exchange leaves, when it is through

    @abstractmethod
    def exchange(self, transport: Exchanger) -> None:
        """Put the mean into place, by a transport."""

    @staticmethod
    @abstractmethod
    def in_memory(everyone: Sequence[Any]) -> None:
        """Put the mean into the first one's place, from all workers' in their order."""

    def _coded(self, whole: Tensor, residue: Tensor | None) -> tuple[Tensor, Tensor]:
        """The codes of `whole` with what was left before; and what they leave, in its place."""
        if residue is not None:
            decay = self._codec.decay
            whole += residue if decay == 1 else residue * decay
        codes = self._codec.encode(whole.view(-1, BLOCK))
        return codes, whole.sub_(self._codec.decode(codes).reshape(-1))

    def _padded(self, blocks: int) -> Tensor:
        """The payload as 32-bit floats, with zeros up to whole blocks."""
        whole = self._payload.new_zeros(blocks * BLOCK, dtype=torch.float32)
        whole[: len(self._payload)] = self._payload
        return whole

    def _decoded(self, row: Tensor, tail_bytes: int) -> tuple[Tensor, Tensor]:
        codes, tail = row.split([len(row) - tail_bytes, tail_bytes])
        decoded = self._codec.decode(codes.view(-1, self._codec.width)).reshape(-1)
        return decoded, to_numbers(tail, self._tail.dtype)

    def _mean(self, rows: Tensor, tail_bytes: int) -> tuple[Tensor, Tensor]:
        """Of decoded rows, in the order of the workers, so that any engine gets these bits."""
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
        """What to send: one row of bytes for each worker."""
        own = None if self._residue is None else self._residue.own
        codes, self.left.own = self._coded(self._padded(self._workers * self._rows), own)
        tail = self._tail.new_zeros(self._workers * self._tail_width // self._tail.itemsize)
        tail[: len(self._tail)] = self._tail
        return torch.cat(
            [codes.reshape(self._workers, -1), to_bytes(tail.view(self._workers, -1))], 1
        )

    def mean(self, received: Tensor) -> Tensor:
        """The mean of one chunk, coded, from the rows that the workers sent of it."""
        whole, tail = self._mean(received, self._tail_width)
        before = None if self._residue is None else self._residue.mean
        codes, self.left.mean = self._coded(whole, before)
        return torch.cat([codes.reshape(-1), to_bytes(tail)])

    def accept(self, means: Tensor) -> None:
        """Put the mean, from its rows in the order of the workers that made them, into place."""
        parts = [self._decoded(row, self._tail_width) for row in means]
        self._put(torch.cat([part for part, _ in parts]), torch.cat([tail for _, tail in parts]))


class GatheredMean(Coded):
    """The mean of one worker's `values` with those of the others, from everybody's codes."""

    def exchange(self, transport: Exchanger) -> None:
        self.accept(transport.gather(self.row()))

    @staticmethod
    def in_memory(everyone: "Sequence[GatheredMean]") -> None:
        everyone[0].accept(torch.stack([each.row() for each in everyone]))

    def row(self) -> Tensor:
        """What to send to every worker."""
        own = None if self._residue is None else self._residue.own
        codes, self.left.own = self._coded(self._padded(_blocks(len(self._payload), 1)), own)
        return torch.cat([codes.reshape(-1), to_bytes(self._tail)])

    def accept(self, rows: Tensor) -> None:
        """Put the mean of the workers' rows into place."""
        self._put(*self._mean(rows, self._tail.nbytes))

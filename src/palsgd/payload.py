"""The size of what workers exchange. No other module computes the bytes of a message."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from palsgd.codecs.codec import Codec
from palsgd.codecs.coded_mean import message_bytes

REPORT = 4  # numbers of each worker in the header of a sync (see palsgd.guard)
REPORT_WITH_COSTS = 6  # while sync_every="auto" measures


def wire_bytes(sent: int, workers: int, *, gathered: bool = False) -> int:
    """What a worker puts on the wire for the bytes it hands over.

    A ring all-reduce sends every byte 2 (K - 1) / K times, and so do the two steps of a coded
    mean. A ring that gathers passes on the message of every worker but its right neighbour's.
    """
    if gathered:
        return sent * (workers - 1)
    return round(sent * 2 * (workers - 1) / workers)


@dataclass(frozen=True)
class PartSize:
    """A part of a payload beside the displacement of the model."""

    coded: bool = True
    gathered: bool = False
    every: int = 1


@dataclass(frozen=True, kw_only=True)
class PayloadSize:
    """The bytes that one worker hands over, message by message."""

    fragments: Sequence[int]  # elements of each
    workers: int
    itemsize: int = 4
    bucket: int = 2**25  # elements that fit into one message
    whole: bool = False  # a fragment travels in one message of any size
    buffers: int = 0  # numbers that buffers become; they travel with the last fragment
    tensors: int = 0  # of the model; each has a flag in the warm-up
    scalars: int = 0  # of the method, in every sync
    report: int = REPORT
    codec: Codec | None = None
    displacement: bool = True  # does the displacement of the model travel?
    gathered: bool = False  # are all values gathered instead of averaged?
    parts: Sequence[PartSize] = field(default_factory=tuple)  # what else travels

    @property
    def header(self) -> int:
        """Numbers of the header."""
        return self.report * self.workers

    def start(self) -> list[int]:
        """The message in which workers compare their models when the local phase begins."""
        return [self._bytes(self.header, exact=self.header, codec=None)]

    def warmup(self) -> list[int]:
        """The messages of one step of the warm-up, where `step()` averages the gradients."""
        sizes = self._buckets(sum(self.fragments), whole=False)
        sizes[0] += self.header + self.buffers + self.tensors
        return [self._bytes(size, exact=size, codec=None) for size in sizes]

    def sync(self, fragment: int = 0, round: int = 0) -> list[int]:
        """The messages of one sync."""
        elements = self.fragments[fragment]
        last = fragment == len(self.fragments) - 1
        tail = self.header + self.scalars + (self.buffers if last else 0)
        sizes = self._buckets(elements, whole=self.whole) if self.displacement else []
        found = [(size, self.codec, self.gathered) for size in sizes]
        for part in self.parts:
            if (round + 1) % part.every == 0:
                gathered = part.gathered or self.gathered
                found.append((elements, self.codec if part.coded else None, gathered))
        messages = []
        for number, (size, codec, gathered) in enumerate(found):
            exact = tail if number == 0 else 0
            messages.append(
                self._bytes(size + exact, exact=exact, codec=None if gathered else codec)
            )
        return messages

    def gathers(self, round: int = 0) -> list[bool]:
        """For each message of a sync, whether it is gathered instead of averaged."""
        codec = self.codec is not None and self.codec.gathered
        return [codec or self.gathered] * len(self.sync(0, round))

    def _buckets(self, elements: int, *, whole: bool) -> list[int]:
        width = max(1, elements if whole else min(self.bucket, elements))
        return [min(width, elements - low) for low in range(0, max(1, elements), width)]

    def _bytes(self, elements: int, *, exact: int, codec: Codec | None) -> int:
        return message_bytes(
            elements=elements, exact=exact, itemsize=self.itemsize, codec=codec,
            workers=self.workers,
        )  # fmt: skip

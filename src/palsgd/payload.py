"""The size of what workers exchange. No other module computes the bytes of a message."""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import nn

from palsgd.buffers import Buffers
from palsgd.codecs.codec import Codec
from palsgd.codecs.coded_mean import message_bytes
from palsgd.flat import split_evenly
from palsgd.method import Method, Payload, state_names, state_scalars
from palsgd.tensors import WorkerTensors

if TYPE_CHECKING:
    from palsgd.worker import Worker

REPORT = 9  # numbers of each worker in the header of a sync (see palsgd.guard)
REPORT_WITH_COSTS = 11  # the same with sync_every="auto" or draws="paced", which measure
UNTRAINED = 6  # numbers of each worker before the first round (see palsgd.untrained)


def wire_bytes(sent: int, workers: int, *, gathered: bool = False) -> int:
    """The bytes that a worker's link carries when the worker hands `sent` bytes to the transport.

    A ring all-reduce sends every byte 2 (K - 1) / K times, and so do the two steps of a coded mean.
    In a ring that gathers, a worker sends the message of every worker except its right neighbour's.
    """
    if gathered:
        return sent * (workers - 1)
    return round(sent * 2 * (workers - 1) / workers)


@dataclass(frozen=True)
class PartSize:
    """A part of a payload."""

    coded: bool = True
    gathered: bool = False
    every: int = 1
    displacement: bool = False  # is it the displacement of the model, which is sent in buckets?


class MessageSize(NamedTuple):
    """One message of a sync."""

    elements: int
    codec: Codec | None
    gathered: bool  # are all workers' values gathered instead of averaged?


class Sent(NamedTuple):
    """One message: the bytes that a worker hands over, and how they are reduced."""

    bytes: int
    gathered: bool  # is the message sent to every other worker, instead of averaged?
    coded: bool


@dataclass(frozen=True, kw_only=True)
class MethodSize:
    """What the payload of a method consists of."""

    parts: tuple[PartSize, ...] = (PartSize(displacement=True),)
    gathered: bool = False  # are all values gathered instead of averaged?
    scalars: int = 0
    whole: bool = False  # must a fragment be sent in one message?

    @classmethod
    def of(cls, method: Method) -> "MethodSize":
        """The sizes of the payload that the method makes for a model of one number."""
        slots = ("payload", "apply", "restart", "weights")
        payload = method.payload(_one_number(method))
        return cls(
            parts=part_sizes(payload),
            gathered=method.overrides("weights"),
            scalars=scalar_count(payload),
            whole=any(method.overrides(slot) for slot in slots),
        )


def part_sizes(payload: Payload) -> tuple[PartSize, ...]:
    return tuple(
        PartSize(part.coded, part.reduction == "gather", part.every, part.tensors is None)
        for part in payload.parts
    )


def scalar_count(payload: Payload) -> int:
    """The number of scalars, which includes the worker's weight if some part is weighted."""
    weighted = any(part.reduction == "weighted" for part in payload.parts)
    return len(payload.scalars) + weighted


def _one_number(method: Method) -> WorkerTensors:
    """A worker whose model is one number."""
    entries = (*method.local_state, *method.global_state)
    tensors = {name: [torch.zeros(1)] for name in ("local", "anchor", *state_names(entries))}
    return WorkerTensors(
        {},
        **tensors,
        **state_scalars(entries),
        groups=[[0]],
        inner=defaultdict(list),
        gradient_steps=1,
        rates=[1.0],
        rate_sums=[1.0],
        initial_rates=[1.0],
        worker=0,
        workers=1,
        round=0,
        _norm=lambda tensors: 0.0,
    )


@dataclass(frozen=True, kw_only=True)
class ModelSize:
    """The numbers of a model that are sent."""

    parameters: int  # elements of the tensors that are trained
    tensors: int = 0  # the number of these tensors
    buffers: int = 0  # numbers that its buffers are encoded in

    @classmethod
    def of(cls, model: nn.Module, buffers: str = "average") -> "ModelSize":
        """The sizes of any model, also of one on the meta device."""
        trained = [p for p in model.parameters() if p.requires_grad]
        kept = Buffers(model, buffers)
        return cls(
            parameters=sum(p.numel() for p in trained),
            tensors=len(trained),
            buffers=kept.encoded_size if kept.averaged else 0,
        )


@dataclass(frozen=True, kw_only=True)
class PayloadSize:
    """The bytes that one worker hands over, message by message."""

    fragments: Sequence[int]  # elements of each
    workers: int
    itemsize: int = 4
    bucket: int = 2**25  # elements that fit into one message
    whole: bool = False  # is a fragment sent in one message of any size?
    buffers: int = 0  # numbers that buffers are encoded in; they are sent with the last fragment
    tensors: int = 0  # tensors of the model; each has a flag in the warm-up
    scalars: int = 0  # scalars of the method, sent in every sync
    report: int = REPORT
    codec: Codec | None = None
    displacement: bool = True  # is the displacement of the model sent?
    gathered: bool = False  # are all values gathered instead of averaged?
    parts: Sequence[PartSize] = field(default_factory=tuple)  # the other parts that are sent

    @classmethod
    def of(
        cls,
        model: ModelSize,
        method: MethodSize,
        *,
        workers: int,
        fragments: int = 1,
        delay: int = 0,
        codec: Codec | None = None,
        whole: bool = False,
        draws: str = "balanced",
    ) -> "PayloadSize":
        """The sizes for a model in single precision, under an optimizer's default settings."""
        return cls(
            fragments=[len(part) for part in split_evenly(model.parameters, fragments)],
            workers=workers,
            whole=whole or method.whole or delay > 0,
            buffers=model.buffers,
            tensors=model.tensors,
            scalars=method.scalars,
            report=REPORT_WITH_COSTS if draws == "paced" else REPORT,
            codec=codec,
            displacement=False,  # if it is sent, it is among the parts
            gathered=method.gathered,
            parts=method.parts,
        )

    @property
    def header(self) -> int:
        """The count of numbers in the header."""
        return self.report * self.workers

    @property
    def untrained(self) -> int:
        """The count of numbers by which workers compare the tensors that are not trained."""
        return UNTRAINED * self.workers

    def start(self, *, with_buffers: bool = False) -> list[int]:
        """The message in which workers compare their models when the local phase begins. Buffers
        are averaged in it if DistributedDataParallel has averaged the gradients before."""
        size = self.header + self.untrained + (self.buffers if with_buffers else 0)
        return [self._bytes(size, exact=size, codec=None)]

    def warmup(self) -> list[int]:
        """The messages of one step of the warm-up, where `step()` averages the gradients."""
        sizes = self._buckets(sum(self.fragments), whole=False)
        sizes[0] += self.header + self.untrained + self.buffers + self.tensors
        return [self._bytes(size, exact=size, codec=None) for size in sizes]

    def ddp(self) -> int:
        """The bytes that a step of the warm-up hands over if DistributedDataParallel averages."""
        return 0 if self.workers == 1 else sum(self.fragments) * self.itemsize

    def sync(self, fragment: int = 0, round: int = 0) -> list[int]:
        """The bytes of each message of one sync."""
        last = fragment == len(self.fragments) - 1
        tail = self.header + self.scalars + (self.buffers if last else 0)
        found = []
        for number, (elements, codec, _) in enumerate(self._messages(fragment, round)):
            exact = tail if number == 0 else 0
            found.append(self._bytes(elements + exact, exact=exact, codec=codec))
        return found

    def gathers(self, round: int = 0, fragment: int = 0) -> list[bool]:
        """For each message of a sync, whether it is gathered instead of averaged."""
        return [message.gathered for message in self.messages(fragment, round)]

    def on_the_wire(self, fragment: int = 0, round: int = 0) -> int:
        """The bytes that one worker's link carries for one sync."""
        return sum(
            wire_bytes(sent, self.workers, gathered=gathered)
            for sent, gathered, _ in self.messages(fragment, round)
        )

    def messages(self, fragment: int = 0, round: int = 0) -> list[Sent]:
        """The messages of one sync, and how they are reduced."""
        sizes = zip(self.sync(fragment, round), self._messages(fragment, round), strict=True)
        return [
            Sent(sent, gathered or (codec is not None and codec.gathered), codec is not None)
            for sent, (_, codec, gathered) in sizes
        ]

    def _messages(self, fragment: int, round: int) -> list[MessageSize]:
        elements, found = self.fragments[fragment], []
        for part in self._parts():
            if (round + 1) % part.every == 0:
                gathered = part.gathered or self.gathered
                codec = self.codec if part.coded and not gathered else None
                whole = self.whole or not part.displacement
                sizes = self._buckets(elements, whole=whole)
                found += [MessageSize(size, codec, gathered) for size in sizes]
        return found

    def _parts(self) -> list[PartSize]:
        """The parts in the order in which they are sent: the displacement is the first one, unless
        `parts` has it in another place."""
        placed = any(part.displacement for part in self.parts)
        first = [PartSize(displacement=True)] if self.displacement and not placed else []
        return [*first, *self.parts]

    def _buckets(self, elements: int, *, whole: bool) -> list[int]:
        width = max(1, elements if whole else min(self.bucket, elements))
        return [min(width, elements - low) for low in range(0, max(1, elements), width)]

    def _bytes(self, elements: int, *, exact: int, codec: Codec | None) -> int:
        return message_bytes(
            elements=elements, exact=exact, itemsize=self.itemsize, codec=codec,
            workers=self.workers,
        )  # fmt: skip


def payload_size(worker: "Worker", payload: Payload | None = None) -> PayloadSize:
    """The sizes of a worker's messages. `payload` is its method's payload; None: the default
    payload."""
    syncer, replica, buffers = worker._syncer, worker.inner.replica, worker.warmup.buffers
    memory, guard = worker.warmup.memory, worker.warmup.guard
    payload = payload or Payload()
    state = None if syncer is None else syncer.changes.averaged
    averaged = 0 if state is None else len(state.names)
    ranges = [memory.model] if syncer is None else syncer.anchor.ranges
    return PayloadSize(
        fragments=[len(part) for part in ranges],
        workers=guard.workers,
        itemsize=replica.dtype.itemsize,
        bucket=memory.bucket_size,
        whole=syncer is not None and syncer.outgoing.whole,
        buffers=buffers.encoded_size if buffers.averaged else 0,
        tensors=len(replica.params),
        scalars=scalar_count(payload),
        report=guard.header.size // guard.workers,
        codec=None if syncer is None else syncer.outgoing.codec,
        displacement=False,  # if it is sent, it is among the parts
        gathered=worker.method.overrides("weights"),
        parts=part_sizes(payload) + (PartSize(coded=False),) * averaged,
    )

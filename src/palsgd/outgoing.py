"""What a sync sends: the method's payload, in one message after another."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from palsgd.averaged_state import AveragedState
from palsgd.buffers import Buffers
from palsgd.codecs.codec import Codec
from palsgd.codecs.coded_mean import Residue
from palsgd.codecs.residues import KeptResidues, Residues
from palsgd.flat import Bucket
from palsgd.guard import Guard
from palsgd.memory import MessageMemory
from palsgd.meter import Meter
from palsgd.method import Method, Part
from palsgd.method_view import MethodView
from palsgd.offload import fill, windows
from palsgd.parts import due_parts, flattened
from palsgd.passes import Displaced, displaced, displaced_in_windows
from palsgd.pending_sync import Kept, Moment, PendingSync, SentPart
from palsgd.sync_tail import SyncTail
from palsgd.transports.transport import Message


class Outgoing:
    """Makes the messages of a sync."""

    def __init__(
        self,
        *,
        method: Method,
        view: MethodView,
        buffers: Buffers,
        guard: Guard,
        memory: MessageMemory,
        meter: Meter,
        codec: Codec | None,
        averaged: AveragedState | None,
        delayed: bool,
        blends: bool,
    ):
        self.method, self.view, self.guard, self.memory = method, view, guard, memory
        self._replica, self._anchor = view.replica, view.anchor
        self.codec, self.residues = codec, Residues(memory.template)
        self._averaged = averaged
        # The means are kept until the last message has arrived. With one bucket they are kept in
        # the bucket. With several they are kept in the local parameters, which the sync overwrites
        # afterwards. A fragment has one bucket of any size if the local model has low precision, is
        # trained before the means are applied, is read by the method's own rules, or is sent again
        # when a worker is lost.
        low = any(t.dtype != view.replica.dtype for t in view.replica.local())
        rules = any(method.overrides(slot) for slot in ("payload", "apply", "restart", "weights"))
        self.has_rules = rules or averaged is not None or blends
        self.whole = delayed or low or self.has_rules or view.anchor.home.offloaded or guard.elastic
        self.tail = SyncTail(
            view, buffers, guard, meter, like=memory.template, low=low, delayed=delayed
        )

    # -- messages ------------------------------------------------------------------------------

    def pack(
        self, pending: PendingSync, *, takes_sum: bool = False
    ) -> Iterator[tuple[Message, Bucket | None]]:
        """The messages of a sync, each filled when the iterator reaches it. The first has the
        tail."""
        self._replica.check_unchanged()
        self._replica.check_held()
        at, alone = pending.at, not self.parks(pending.at.fragment)
        w = self.view.fragment(at.fragment, lambda: self.view.local_pieces(at.fragment), **at.known)
        payload = self.method.payload(w)
        parts = due_parts(self.method, payload, at.round, w)
        if self._averaged is not None:
            parts += self._averaged.parts(w)
        squares: Any = self.memory.template.new_zeros(())
        for part, values, bucket in self._values(at, parts):
            first, found = not pending.messages, None
            if bucket is not None:
                compared = first and self.guard.compares_models
                found = self._displaced(bucket, with_digest=first and alone, with_moved=compared)
                squares = squares + found.squares
            if first:
                whole = alone and len(self._anchor.ranges) == 1
                report = self.tail.report(pending, payload, parts, found, alone=whole)
            if not pending.finite:  # some rank of this worker has found inf or nan
                values.zero_()
            elif part.reduction == "weighted":
                values.mul_(payload.weight)
            message = self._message(pending, part, values, bucket)
            message.takes_sum = takes_sum
            if first:
                tail = self.tail.numbers(pending, payload, report)
                message.values = self.memory.with_tail(values, tail)
                message.exact = pending.tail = len(tail)
            pending.messages.append(message)
            pending.parts.append(SentPart(part.name, part.reduction, bucket is not None))
            yield message, bucket
        displaces = any(part.tensors is None for part in parts)
        gap = squares.sqrt() if displaces else w.norm(torch._foreach_sub(w.anchor, w.local))
        pending.distance = float(gap)

    def _displaced(self, bucket: Bucket, **wanted: bool) -> Displaced:
        """Fill a bucket with the anchor minus the local model."""
        local = self._replica.local()
        if not self._anchor.home.offloaded:
            return displaced(bucket, self._anchor, local, **wanted)
        place = range(bucket.low, bucket.low + bucket.flat.numel())
        cut = windows(self._replica.layout, place, self._anchor.home.device)
        return displaced_in_windows(bucket, self._anchor, local, cut, **wanted)

    def _values(
        self, at: Moment, parts: list[Part]
    ) -> Iterator[tuple[Part, Tensor, Bucket | None]]:
        """The values of each message and, for the displacement, the bucket to be filled with
        them."""
        for part in parts:
            if part.tensors is not None:
                yield part, flattened(part.tensors, self.memory.template), None
                continue
            for bucket in self._buckets(at.fragment):
                yield part, bucket.flat, bucket

    def _buckets(self, fragment: int) -> list[Bucket]:
        return self.memory.buckets(self._anchor.ranges[fragment], whole=self.whole).ranges

    def parks(self, fragment: int) -> bool:
        """Is a fragment sent in several buckets, whose means are kept in the local model?"""
        return not self.whole and len(self._anchor.ranges[fragment]) > self.memory.bucket_size

    def local_now(self, fragment: int) -> Tensor:
        """A flat copy of a fragment of the local model."""
        place, local = self._anchor.ranges[fragment], self._replica.local()
        kept = self.memory.local_when_sent(place)
        if self._anchor.home.offloaded:
            fill(kept.flat, self._replica.layout, place, local, self._anchor.home)
        else:
            kept.read(local)
        return kept.flat

    def _message(
        self, pending: PendingSync, part: Part, values: Tensor, bucket: Bucket | None
    ) -> Message:
        """A message that says how it travels."""
        message = self._reduced_as(pending.at.fragment, part, values, bucket)
        if self._anchor.home.offloaded:
            message.device, message.piece = self._replica.device, self.memory.bucket_size
        return message

    def _reduced_as(
        self, fragment: int, part: Part, values: Tensor, bucket: Bucket | None
    ) -> Message:
        if part.reduction == "gather" or self.method.overrides("weights"):
            return Message(values, gather=True)
        if self.codec is None or not part.coded or self.guard.workers == 1:
            return Message(values, codec=self.codec if part.coded else None)
        place = range(len(values)) if bucket is None else self._place(fragment, bucket)
        return Message(values, 0, self.codec, self._residue(fragment, part.name, place, bucket))

    def _residue(self, fragment: int, name: str, place: range, bucket: Bucket | None) -> Residue:
        """What earlier messages of this part and place have left unsent."""
        assert self.codec is not None
        messages = [place] if bucket is None else self.messages(fragment)
        known = {"worker": self.guard.place, "workers": self.guard.workers}
        found = self.residues.of(fragment, name, messages, self.codec, **known)
        return found[messages.index(place)]

    def messages(self, fragment: int) -> list[range]:
        """The elements of a fragment that are sent in each message of its displacement."""
        return [self._place(fragment, bucket) for bucket in self._buckets(fragment)]

    def _place(self, fragment: int, bucket: Bucket) -> range:
        low = bucket.low - self._anchor.ranges[fragment].start
        return range(low, low + bucket.flat.numel())

    # -- messages that are sent again ----------------------------------------------------------

    def kept_residues(self, fragment: int) -> KeptResidues:
        """A copy of the residues of a fragment, as an exchange that is repeated must begin with
        those that it began with. Without elastic workers nothing is repeated."""
        return self.residues.copied(fragment) if self.guard.elastic else {}

    def pack_again(self, pending: PendingSync, kept: Kept) -> None:
        """Make the messages of a sync anew, for the workers that are left. The exchange that was
        lost may still write into the memory of the old ones."""
        fragment = pending.at.fragment
        self.memory.renew()
        self.residues.put_back(fragment, kept.residues)
        tail = self.tail.again(kept)
        old, pending.messages, pending.tail = pending.messages, [], len(tail)
        for message, part, values in zip(old, pending.parts, kept.values, strict=True):
            behind = tail[: 0 if pending.messages else len(tail)]
            residue = None
            if message.codec is not None and self.guard.workers > 1:
                residue = self._residue(fragment, part.name, range(len(values)), None)
            again = replace(
                message,
                values=torch.cat([values, behind]),
                exact=len(behind),
                residue=residue,
                divisor=1,
            )
            pending.messages.append(again)

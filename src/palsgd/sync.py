"""One synchronization: D = mean_k(x - x_k), x <- OuterOPT(x, D), x_k <- x.

A sync is of the whole model or of one fragment. Its two halves are `send` and `apply`; `sync` does
both at one clock. With `delay`, steps lie between the halves, and the local model keeps its change
since it was sent: x_k <- x + (x_k - x_k when it was sent). With `blend` b, x_k <- b x_k + (1 - b) x
in either case.

All messages are exchanged before the anchor is changed, so that the loss of a peer cannot leave a
part of a sync applied. If a worker applied its messages one by one and lost a peer after the second
of five, its anchor would be two fifths the new global model and three fifths the old one.
"""

import math
import time
from collections.abc import Generator, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim import Optimizer

from palsgd.averaged_state import AveragedState
from palsgd.buffers import Buffers
from palsgd.checks import check_choice, check_int
from palsgd.codecs.codec import Codec
from palsgd.codecs.coded_mean import Residue
from palsgd.codecs.residues import PartResidue
from palsgd.digest import chained
from palsgd.finite import all_finite
from palsgd.flat import Bucket
from palsgd.guard import Guard, Verdict, WorkerReport, waiting
from palsgd.inner import forget_nonfinite
from palsgd.memory import MessageMemory
from palsgd.meter import Meter
from palsgd.method import REDUCTIONS, Method, Part, Payload
from palsgd.method_view import MethodView
from palsgd.offload import OuterPieces, Window, fill, windows
from palsgd.passes import (
    Displaced,
    can_divide,
    displaced,
    displaced_in_windows,
    divided_step,
)
from palsgd.payload import wire_bytes
from palsgd.tensors import Reduced, WorkerTensors, mix_
from palsgd.transports.requests import Finish, RepeatError, Request, Settle, Start
from palsgd.transports.transport import Message

_WEIGHT = "weight of this worker"  # the scalar by whose mean weighted parts are divided


class Moment(NamedTuple):
    """When a sync is sent, and the worker's steps since the last sync of this fragment."""

    fragment: int
    clock: int
    round: int
    due: int  # the clock at which it is applied
    gradient_steps: int
    rate_sums: tuple[float, ...]  # of each parameter group
    step_s: float  # seconds of a gradient step while H is being measured, else 0
    rates: tuple[float, ...] = ()  # of each parameter group, in the last step before sending
    idle: bool = False  # has the worker taken no step since the last sync of this fragment?
    taken: int = 0  # gradient steps of this worker since the start of training


class Kept(NamedTuple):
    """What a sync was sent from, so that it can be sent again if a worker is lost."""

    members: tuple[int, ...]  # the workers that it was sent to
    report: WorkerReport
    values: list[Tensor]  # of each message, without the tail
    numbers: tuple[Tensor, Tensor]  # behind the header: of the first member, of another one
    residues: "KeptResidues"


KeptResidues = dict[tuple[int, str], dict[str, Any]]


class SentPart(NamedTuple):
    """What one message holds."""

    name: str
    reduction: str
    displacement: bool  # is it the anchor minus the local model, in the order of its bucket?


@dataclass
class PendingSync:
    """A fragment that has been sent and not yet applied."""

    at: Moment
    finite: bool = True  # is this worker's model finite?
    parts: list[SentPart] = field(default_factory=list)  # one for each message
    messages: list[Message] = field(default_factory=list)
    scalars: list[str] = field(default_factory=list)
    tail: int = 0  # numbers behind the values of the first message: header, buffers, scalars
    distance: float = 0.0
    sent: int = 0  # bytes
    arrived: bool = False
    parked: bool = False  # are the means kept in the local model until the last one arrives?
    local_when_sent: Tensor | None = None  # None: the local model has not moved since
    kept: Kept | None = None  # of a delayed sync between workers that may leave

    @property
    def where(self) -> str:
        return f"the sync of round {self.at.round} (clock {self.at.clock})"


@dataclass(frozen=True)
class Arrival:
    """The contents of the first message's tail, after the checks of its header have passed."""

    verdict: Verdict
    numbers: Tensor  # the mean of buffers and scalars


@dataclass(frozen=True)
class Outcome:
    """The result of a completed sync."""

    at: Moment
    distance: float
    sent: int
    contributors: int
    reports: list[WorkerReport]
    scalars: dict[str, float]


class Syncer:
    """Sends fragments of the local model and applies the means that come back."""

    def __init__(
        self,
        *,
        method: Method,
        view: MethodView,
        inner: Optimizer,
        outer: Optimizer,
        outer_scheduler: Any,
        buffers: Buffers,
        guard: Guard,
        memory: MessageMemory,
        meter: Meter,
        codec: Codec | None,
        delayed: bool,
        blend: float | None,
        averaged: AveragedState | None,
    ):
        self.method, self.view, self.inner, self.outer = method, view, inner, outer
        self.replica, self.anchor, self.states = view.replica, view.anchor, view.states
        self.buffers, self.guard, self.memory, self.meter = buffers, guard, memory, meter
        self.codec, self.blend, self.averaged, self._delayed = codec, blend, averaged, delayed
        self.outer_scheduler = outer_scheduler  # stepped once per round
        self._first_outer = {
            param: {name: _copy(value) for name, value in entry.items()}
            for param, entry in outer.state.items()
        }
        self.residues: dict[tuple[int, str], PartResidue] = {}  # by fragment and part
        self._moved: dict[int, int] = {}  # 32 bits of each fragment's displacement in this round
        self.pending: PendingSync | None = None  # the sync that is sent and not yet applied
        # Without a common anchor equal displacements are no equal models.
        self.compares_models = guard.compares and guard.compares_work
        # The means are kept until the last message has arrived. With one bucket they are kept in
        # the bucket. With several they are kept in the local parameters, which the sync overwrites
        # afterwards. A fragment has one bucket of any size if the local model has low precision, is
        # trained before the means are applied, is read by the method's own rules, or is sent again
        # when a worker is lost.
        self._low = any(t.dtype != self.replica.dtype for t in self.replica.local())
        rules = any(method.overrides(slot) for slot in ("payload", "apply", "restart", "weights"))
        rules = rules or averaged is not None or blend is not None
        self.rules = rules
        self.whole = delayed or self._low or rules or self.anchor.home.offloaded or guard.elastic
        self.outer_pieces = OuterPieces(outer, self.replica.layout)

    # -- the two halves ------------------------------------------------------------------------

    def sync(self, at: Moment) -> Generator[Request, int, Outcome | None]:
        """Send a fragment and apply its mean at the same clock. None if there was nothing to
        apply, as no worker has taken a step."""
        start, pending, arrival = self.meter.watch.now(), PendingSync(at), None
        residues = self._kept_residues(at.fragment)
        try:
            for message, bucket in self._pack(pending, takes_sum=self._takes_sum(at.fragment)):
                began = time.perf_counter()
                sent = yield message
                if arrival is None:
                    self.meter.exchange_s = time.perf_counter() - began
                self._count(pending, message, sent)
                if arrival is None:
                    arrival = self._check(pending)
                self._rescale(message, arrival)
                if self._parks(at.fragment):
                    assert bucket is not None
                    pending.parked = True
                    bucket.write(self.replica.local())
            yield from self._settle()
        except RepeatError:
            self._put_back(at.fragment, residues)
            raise
        except BaseException:
            if pending.parked:  # the local progress of the round is lost, the global model is not
                self.anchor.copy_to_local(at.fragment)
            raise
        assert arrival is not None
        self._book_waiting(arrival.verdict.reports)
        if arrival.verdict.changes_nothing:
            self._drop(pending)
            return None
        return self._conclude(pending, arrival, start)

    def _settle(self) -> Generator[Request, int, None]:
        """Agree that all workers have all messages, where one of them may have been lost."""
        if self.guard.elastic:
            yield Settle()

    def send(self, at: Moment, *, trains: bool = True) -> Generator[Request, int, None]:
        """Send a fragment; `apply` waits for its mean. The message has its own memory, as the local
        model is trained until then, unless `trains` is False."""
        start, pending = self.meter.watch.now(), PendingSync(at)
        residues = self._kept_residues(at.fragment)
        for message, _ in self._pack(pending):
            if pending.kept is not None:
                body = len(message.values) - message.exact
                pending.kept.values.append(message.values[:body].clone())
            yield Start(message)
        if pending.kept is not None:
            pending.kept.residues.update(residues)
        if trains:
            pending.local_when_sent = self._local_now(at.fragment)
        self.pending = pending
        self.meter.watch.add("sync_s", start, self.meter.watch.now())

    def _local_now(self, fragment: int) -> Tensor:
        """A flat copy of a fragment of the local model."""
        place, local = self.anchor.ranges[fragment], self.replica.local()
        kept = self.memory.local_when_sent(place)
        if self.anchor.home.offloaded:
            fill(kept.flat, self.replica.layout, place, local, self.anchor.home)
        else:
            kept.read(local)
        return kept.flat

    def apply(self) -> Generator[Request, int, Outcome | None]:
        """Wait for the means of the pending sync and apply them. None if there was nothing to
        apply."""
        pending = self.pending
        assert pending is not None
        start, began = self.meter.watch.now(), time.perf_counter()
        try:
            yield from self._arrive(pending)
            self.meter.exchange_s = time.perf_counter() - began  # in which no step ran
            arrival = self._check(pending)
            yield from self._settle()
        except RepeatError:
            assert pending.kept is not None
            pending.kept = pending.kept._replace(members=())
            raise
        self._book_waiting(arrival.verdict.reports)
        for message in pending.messages:
            self._count(pending, message, message.sent)
        for message in pending.messages:
            self._rescale(message, arrival)
        outcome = None
        if arrival.verdict.changes_nothing:
            self._drop(pending)
        else:
            outcome = self._conclude(pending, arrival, start)
        self.pending = None
        return outcome

    def _arrive(self, pending: PendingSync) -> Generator[Request, int, None]:
        """Wait for the messages of a sync that was sent, or send them again if it was sent to
        other workers than those that are left."""
        if pending.kept is not None and pending.kept.members != self.guard.members:
            self._pack_again(pending, pending.kept)
            for message in pending.messages:
                message.sent = yield message
        elif not pending.arrived:
            for message in pending.messages:
                message.sent = yield Finish(message)
        pending.arrived = True

    def _pack_again(self, pending: PendingSync, kept: Kept) -> None:
        """Make the messages of a sync anew, for the workers that are left. The exchange that was
        lost may still write into the memory of the old ones."""
        fragment = pending.at.fragment
        self.memory.renew()
        self._put_back(fragment, kept.residues)
        header = self.guard.encode(kept.report, self.memory.template)
        tail = torch.cat([header, kept.numbers[min(self.guard.place, 1)]])
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

    def _kept_residues(self, fragment: int) -> KeptResidues:
        """A copy of the residues of a fragment, as an exchange that is repeated must begin with
        those that it began with. Without elastic workers nothing is repeated."""
        if not self.guard.elastic:
            return {}
        return {
            key: kept.saved()
            for key, kept in self.residues.items()
            if key[0] == fragment and not kept.fresh
        }

    def _put_back(self, fragment: int, kept: KeptResidues) -> None:
        """Set the residues of a fragment, in new memory, to what they were."""
        self.residues = {key: each for key, each in self.residues.items() if key[0] != fragment}
        like = self.memory.template
        self.residues |= {key: PartResidue.loaded(each, like) for key, each in kept.items()}

    def _drop(self, pending: PendingSync) -> None:
        """Leave all as it is, as no worker has taken a step. The local model is equal to the
        anchor, unless it holds parked means, or was rounded when a delayed sync was applied."""
        if not self.method.overrides("restart"):
            self.anchor.copy_to_local(pending.at.fragment)

    def start_over(self) -> None:
        """Forget what earlier syncs have left, as before the local phase."""
        self.pending, self.residues = None, {}
        self.reset_outer()
        self.states.reset()

    def reset_outer(self) -> None:
        """Give the outer optimizer the state with which it was built, which most do without."""
        self.outer.state.clear()
        for param, entry in self._first_outer.items():
            self.outer.state[param] = {name: _copy(value) for name, value in entry.items()}

    # -- sending -------------------------------------------------------------------------------

    def _pack(
        self, pending: PendingSync, *, takes_sum: bool = False
    ) -> Iterator[tuple[Message, Bucket | None]]:
        """The messages of a sync, each filled when the iterator reaches it. The first has the
        tail."""
        self.replica.check_unchanged()
        self.replica.check_held()
        at = pending.at
        w = self._tensors(at, lambda: self.view.local_pieces(at.fragment))
        payload = self.method.payload(w)
        parts = due_parts(self.method, payload, at.round, w)
        if self.averaged is not None:
            parts += self.averaged.parts(w)
        squares: Any = self.memory.template.new_zeros(())
        for part, values, bucket in self._values(at, parts):
            digest, moved, first = None, None, not pending.messages
            if bucket is not None:
                alone = first and not self._parks(at.fragment)
                found = self._displaced(
                    bucket, with_digest=alone, with_moved=first and self.compares_models
                )
                squares, digest, moved = squares + found.squares, found.digest, found.moved
            if first:
                # A learning rate of 0 leaves what a delayed sync has rounded, alike on all workers.
                moved = moved if any(at.rate_sums) else 0
                model = self._model_digest(at.fragment, moved or 0)
                report = self._report(pending, payload, parts, squares, digest, model)
            if not pending.finite:  # some rank of this worker has found inf or nan
                values.zero_()
            elif part.reduction == "weighted":
                values.mul_(payload.weight)
            message = self._message(pending, part, values, bucket)
            message.takes_sum = takes_sum
            if self.anchor.home.offloaded:
                message.device, message.piece = self.replica.device, self.memory.bucket_size
            if not pending.messages:
                tail = self._tail(pending, payload, report)
                message.values = self.memory.with_tail(values, tail)
                message.exact = pending.tail = len(tail)
            pending.messages.append(message)
            pending.parts.append(SentPart(part.name, part.reduction, bucket is not None))
            yield message, bucket
        if any(part.tensors is None for part in parts):
            pending.distance = float(squares.sqrt())
        else:
            pending.distance = w.norm(torch._foreach_sub(w.anchor, w.local))

    def _displaced(self, bucket: Bucket, **wanted: bool) -> Displaced:
        """Fill a bucket with the anchor minus the local model."""
        local = self.replica.local()
        if not self.anchor.home.offloaded:
            return displaced(bucket, self.anchor, local, **wanted)
        place = range(bucket.low, bucket.low + bucket.flat.numel())
        cut = windows(self.replica.layout, place, self.anchor.home.device)
        return displaced_in_windows(bucket, self.anchor, local, cut, **wanted)

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
        return self.memory.buckets(self.anchor.ranges[fragment], whole=self.whole).ranges

    def _parks(self, fragment: int) -> bool:
        """Is a fragment sent in several buckets, whose means are kept in the local model?"""
        return not self.whole and len(self.anchor.ranges[fragment]) > self.memory.bucket_size

    def _takes_sum(self, fragment: int) -> bool:
        """Does the outer step divide the sum of the displacements, which saves a pass over the
        sum?"""
        if self.anchor.home.offloaded:
            return False
        alone = not self.rules and self.codec is None and not self._parks(fragment)
        return alone and self.replica.device.type == "cpu" and can_divide(self.outer)

    def _message(
        self, pending: PendingSync, part: Part, values: Tensor, bucket: Bucket | None
    ) -> Message:
        if part.reduction == "gather" or self.method.overrides("weights"):
            return Message(values, gather=True)
        if self.codec is None or not part.coded or self.guard.workers == 1:
            return Message(values, codec=self.codec if part.coded else None)
        fragment = pending.at.fragment
        place = range(len(values)) if bucket is None else self._place(fragment, bucket)
        return Message(values, 0, self.codec, self._residue(fragment, part.name, place, bucket))

    def _residue(self, fragment: int, name: str, place: range, bucket: Bucket | None) -> Residue:
        """What earlier messages of this part and place have left unsent."""
        assert self.codec is not None
        messages = [place] if bucket is None else self.messages(fragment)
        known = {"worker": self.guard.place, "workers": self.guard.workers}
        kept = self.residues.get((fragment, name))
        if kept is None:
            kept = PartResidue.of(messages, self.codec, like=self.memory.template, **known)
            self.residues[fragment, name] = kept
        return kept.cut(messages, self.codec, **known)[messages.index(place)]

    def messages(self, fragment: int) -> list[range]:
        """The elements of a fragment that are sent in each message of its displacement."""
        return [self._place(fragment, bucket) for bucket in self._buckets(fragment)]

    def _place(self, fragment: int, bucket: Bucket) -> range:
        low = bucket.low - self.anchor.ranges[fragment].start
        return range(low, low + bucket.flat.numel())

    def _model_digest(self, fragment: int, moved: int) -> int:
        """A digest that is equal on two workers whose local models are equal, from the 32 bits of
        the displacement, as all anchors are equal. With fragments it is that of a whole round, sent
        with the last fragment: two workers may well have the same fragment, if no gradient of
        theirs reaches it. 0 if there is nothing to compare."""
        if moved and self._low and self._equals_anchor(fragment):
            moved = 0
        if fragment == 0:
            self._moved = {}
        self._moved[fragment] = moved
        if len(self._moved) < len(self.anchor.ranges):
            return 0
        return self._moved[0] if fragment == 0 else chained(self._moved.values())

    def _equals_anchor(self, fragment: int) -> bool:
        """Is the local model equal to the anchor in the model's own, low precision?"""
        if not self.anchor.home.offloaded:
            return _equal(self.view.local_pieces(fragment), self.anchor.pieces(fragment))
        for window in self.view.windows(fragment):
            with self.view.in_window(window, window.copy(self.anchor.flat)) as w:
                if not _equal(w.local, w.anchor):
                    return False
        return True

    def _report(
        self,
        pending: PendingSync,
        payload: Payload,
        parts: list[Part],
        squares: Tensor,
        digest: int | None,
        model: int,
    ) -> WorkerReport:
        """This worker's part of the header. If the model is sent in one message, the norm of the
        displacement shows whether it is finite; otherwise every tensor is read."""
        fragment = pending.at.fragment
        alone = len(self.anchor.ranges) == 1 and not self._parks(fragment)
        seen = alone and parts[0].tensors is None and bool(squares.isfinite())
        own = [t for part in parts if part.tensors is not None for t in part.tensors]
        finite = (seen or all_finite(self.replica.local())) and all_finite(own)
        numbers = [payload.weight, *payload.scalars.values()]
        finite = finite and all(math.isfinite(float(each)) for each in numbers)
        if digest is None:
            digest = self.anchor.digest(fragment)
        report = self.guard.report(
            chained([digest, self.states.digest(fragment)]),
            finite=finite,
            meter=self.meter,
            # A worker without steps has nothing of its own to compare. Its model may differ from
            # the anchor by the rounding of a delayed sync, as another worker's may.
            model=0 if pending.at.idle else model,
            steps=pending.at.taken,
            idle=pending.at.idle,
            device=self.replica.device,
            step_s=pending.at.step_s,
            buffer=self.buffers.nonfinite(),
        )
        pending.finite = report.finite
        return report

    def _tail(self, pending: PendingSync, payload: Payload, report: WorkerReport) -> Tensor:
        """The numbers that all workers need before anything is applied: the header, and the numbers
        behind it."""
        header = self.guard.encode(report, self.memory.template)
        first, other = (self._numbers(pending, payload, report, place) for place in (0, 1))
        if self.guard.elastic and self._delayed:
            pending.kept = Kept(self.guard.members, report, [], (first, other), {})
        return torch.cat([header, other if self.guard.place else first])

    def _numbers(
        self, pending: PendingSync, payload: Payload, report: WorkerReport, place: int
    ) -> Tensor:
        """The buffers (with the last fragment only), and the method's scalars."""
        like = self.memory.template
        sections = [like]
        if self.buffers.averaged and self._ends_round(pending.at):
            sections.append(self.buffers.encode(place, like, finite=report.finite))
        scalars = dict(payload.scalars)
        if any(part.reduction == "weighted" for part in payload.parts):
            scalars[_WEIGHT] = payload.weight
        if scalars:
            pending.scalars = list(scalars)
            kept = [float(v) if report.finite else 0.0 for v in scalars.values()]  # nan * 0 is nan
            sections.append(like.new_tensor(kept))
        return torch.cat(sections)

    def _ends_round(self, at: Moment) -> bool:
        return at.fragment == len(self.anchor.ranges) - 1

    def _count(self, pending: PendingSync, message: Message, sent: int) -> None:
        pending.sent += sent
        self.count_message(sent, gathered=message.gathered)

    def count_message(self, sent: int, *, gathered: bool = False) -> None:
        ledger = self.meter.ledger
        ledger.messages += 1
        ledger.bytes_sent += sent
        ledger.bytes_on_the_wire += wire_bytes(sent, self.guard.workers, gathered=gathered)

    # -- what came back ------------------------------------------------------------------------

    def _check(self, pending: PendingSync) -> Arrival:
        """Read the reports of all workers, and raise if they forbid the sync."""
        first, header = pending.messages[0], self.guard.header.size
        if first.gather:
            assert first.rows is not None
            tail = first.rows[:, -pending.tail :].mean(0)
        else:
            tail = first.values[-pending.tail :] / first.divisor
        verdict = self.guard.check(tail[:header], pending.where)
        return Arrival(verdict, tail[header:])

    def _book_waiting(self, reports: list[WorkerReport]) -> None:
        """Add the seconds that this worker waited in the last sync, which the reports of this one
        have."""
        ledger = self.meter.ledger
        if ledger.history:
            waited = waiting(reports, self.guard.place)
            ledger.history[-1]["waiting_s"] = waited
            ledger.waiting_s += waited
            ledger.sync_s -= waited

    def _rescale(self, message: Message, arrival: Arrival) -> None:
        """Turn the mean over all workers into the mean over those that took part, as the others
        sent zeros."""
        contributors = arrival.verdict.contributors
        if contributors < self.guard.workers and not message.gather:
            message.divide()
            message.values.mul_(self.guard.workers / contributors)

    def _scalars(self, pending: PendingSync, arrival: Arrival) -> dict[str, float]:
        """The means of the method's scalars over the workers that took part."""
        if not pending.scalars:
            return {}
        scale = self.guard.workers / arrival.verdict.contributors
        means = arrival.numbers[-len(pending.scalars) :].double() * scale
        return dict(zip(pending.scalars, means.tolist(), strict=True))

    # -- the changes ---------------------------------------------------------------------------

    def _conclude(self, pending: PendingSync, arrival: Arrival, start: Any) -> Outcome:
        """Change the anchor, the local model and the buffers, in a plain sync as in a delayed
        one."""
        at, verdict = pending.at, arrival.verdict
        scalars = self._scalars(pending, arrival)
        self._global_step(pending, scalars, verdict.contributors)
        if pending.finite:
            self._restart(pending)
        else:
            self.start_again(at.round)
        if self._ends_round(at):
            self.buffers.after_sync(arrival.numbers, self.guard.workers, verdict.contributors)
        self.meter.watch.add("sync_s", start, self.meter.watch.now())
        scalars.pop(_WEIGHT, None)
        return Outcome(
            at, pending.distance, pending.sent, verdict.contributors, verdict.reports, scalars
        )

    def _global_step(
        self, pending: PendingSync, scalars: dict[str, float], contributors: int
    ) -> None:
        """Change the anchor. Only this fragment's pieces have a gradient, so the outer step changes
        only them."""
        if self.anchor.home.offloaded:
            self._step_in_windows(pending, scalars, contributors)
            return
        at, parts = pending.at, self._reduced(pending, scalars.get(_WEIGHT, 1.0), contributors)
        params = self.anchor.outer_params[at.fragment]
        if any(p.name == "model" and p.reduction != "gather" for p in pending.parts):
            for param, mean in zip(params, parts["model"], strict=True):
                param.grad = mean
        w = self._tensors(at, lambda: self._pieces_as_sent(pending))
        means = {} if self.averaged is None else self.averaged.take(parts)
        try:
            with divided_step(self.outer, pending.messages[0].divisor):
                self.method.apply(w, Reduced(parts, scalars, contributors), self.outer)
        finally:
            for param in params:
                param.grad = None
        if "inner" in vars(w):  # the method has used it
            w.inner.put_back()
        if self.averaged is not None:
            self.averaged.apply(at.fragment, means, w, self.blend)
        self.states.keep_scalars(w)

    def _step_in_windows(
        self, pending: PendingSync, scalars: dict[str, float], contributors: int
    ) -> None:
        """Change an anchor that is kept in host memory, window by window."""
        at, anchor = pending.at, self.anchor
        start, params = anchor.ranges[at.fragment].start, anchor.outer_params[at.fragment]
        places, sent = anchor.places(at.fragment), pending.local_when_sent
        self.outer_pieces.begin()
        for window in self.view.windows(at.fragment):
            here = window.copy(anchor.flat, writes=True)
            mean = window.copy(pending.messages[0].values, start=start)
            local = None
            if sent is not None:
                local = partial(_parts_of, window, sent, start)
            with (
                self.view.in_window(window, here, local=local, **_known(at)) as w,
                self.outer_pieces.on_device(params, places, here, mean),
            ):
                reduced = Reduced({"model": mean.parts()}, scalars, contributors)
                self.method.apply(w, reduced, self.outer)

    def _pieces_as_sent(self, pending: PendingSync) -> list[Tensor]:
        fragment = pending.at.fragment
        if pending.local_when_sent is None:
            return self.view.local_pieces(fragment)
        return self.view.pieces_in(fragment, pending.local_when_sent)

    def _reduced(
        self, pending: PendingSync, weight: float, contributors: int
    ) -> dict[str, list[Tensor]]:
        """The reduced parts by name, as tensors of the fragment's shapes."""
        if pending.parked:
            return {pending.parts[0].name: self.view.local_pieces(pending.at.fragment)}
        found: dict[str, list[Tensor]] = {}
        for number, (part, message) in enumerate(zip(pending.parts, pending.messages, strict=True)):
            tail = pending.tail if number == 0 else 0
            values = message.values[: len(message.values) - tail]
            if message.gather:
                assert message.rows is not None
                rows = message.rows[:, : message.rows.shape[1] - tail]
                values = self._from_rows(rows, part, pending.at, contributors)
            if part.reduction == "weighted":
                values = values.div_(weight)
            found[part.name] = self._shaped(pending.at.fragment, part, values)
        return found

    def _from_rows(self, rows: Tensor, part: SentPart, at: Moment, contributors: int) -> Tensor:
        """All workers' values, or this worker's own mean over some of them."""
        if part.reduction == "gather":
            return rows
        weights = self.method.weights(self.guard.worker, at.round)
        if weights is None:
            return rows.mean(0) * (self.guard.workers / contributors)
        where = f"for worker {self.guard.worker} in round {at.round}"
        return weighted_sum(rows, check_weights(self.method, weights, len(rows), where))

    def _shaped(self, fragment: int, part: SentPart, values: Tensor) -> list[Tensor]:
        """Flat values, or a row of them for each worker, as tensors of the fragment's shapes."""
        if part.displacement and values.dim() > 1:
            rows = [self.view.pieces_in(fragment, row) for row in values]
            return [torch.stack(each) for each in zip(*rows, strict=True)]
        if part.displacement:
            return self.view.pieces_in(fragment, values)
        return unflattened(values, self.anchor.pieces(fragment))

    def _restart(self, pending: PendingSync) -> None:
        """Set the local model after the anchor has changed."""
        fragment = pending.at.fragment
        if self.method.overrides("restart"):
            w = self._tensors(pending.at, lambda: self.view.local_pieces(fragment))
            self.method.restart(w)
            self.anchor.put_back(fragment, w.local, [t.detach() for t in self.replica.local()])
            self.states.keep_scalars(w)
        elif self.blend is not None:
            self._blend(fragment, self.blend)
        elif pending.local_when_sent is None:
            self.anchor.copy_to_local(fragment)
        else:
            self._keep_local_progress(fragment, pending.local_when_sent)

    def _blend(self, fragment: int, share: float) -> None:
        """x_k <- share x_k + (1 - share) x."""
        if self.anchor.home.offloaded:
            for window in self.view.windows(fragment):
                with self.view.in_window(window, window.copy(self.anchor.flat)) as w:
                    mix_(w.local, w.anchor, 1.0 - share)
            return
        local = self.view.local_pieces(fragment)
        mix_(local, self.anchor.pieces(fragment), 1.0 - share)
        self.anchor.put_back(fragment, local, [t.detach() for t in self.replica.local()])

    def _keep_local_progress(self, fragment: int, when_sent: Tensor) -> None:
        """x_k <- x + (x_k - x_k when it was sent)."""
        if self.anchor.home.offloaded:
            start = self.anchor.ranges[fragment].start
            for window in self.view.windows(fragment):
                here = window.copy(self.anchor.flat)
                here.flat.sub_(window.copy(when_sent, start=start).flat)
                here.add(self.replica.local())
            return
        shift = torch.sub(self.anchor.part(fragment), when_sent, out=when_sent)
        low = self.anchor.ranges[fragment].start
        Bucket(self.replica.layout, low, shift).add(self.replica.local())

    def join(self, round: int) -> None:
        """Set all fragments of the local model to the global model, and the method's local states
        to those of a newcomer."""
        self.anchor.copy_to_local()
        self.states.reset_local()
        w = self.view.whole(round=round)
        self.method.join(w)
        self.states.keep_scalars(w)

    def start_again(self, round: int) -> None:
        """Set all fragments of the local model of a worker that was left out, or has come, to the
        global model."""
        self.join(round)
        forget_nonfinite(self.inner)
        if self.averaged is not None:
            self.averaged.copy_to_local()

    def round_ended(self) -> None:
        """All fragments of a round have been applied."""
        if self.outer_scheduler is not None:
            self.outer_scheduler.step()
        if self.averaged is not None:
            self.averaged.round_ended()

    def _tensors(self, at: Moment, local: Any) -> WorkerTensors:
        return self.view.fragment(at.fragment, local, **_known(at))


def _known(at: Moment) -> dict[str, Any]:
    """What a method is told about the steps before a sync."""
    return {
        "rates": at.rates,
        "rate_sums": at.rate_sums,
        "round": at.round,
        "gradient_steps": at.gradient_steps,
    }


def _parts_of(window: Window, kept: Tensor, start: int) -> list[Tensor]:
    return window.copy(kept, start=start).parts()


def _equal(local: list[Tensor], anchor: list[Tensor]) -> bool:
    return all(torch.equal(x, a.to(x.dtype)) for x, a in zip(local, anchor, strict=True))


def _copy(value: Any) -> Any:
    return value.clone() if isinstance(value, Tensor) else value


def due_parts(method: Method, payload: Payload, round: int, w: WorkerTensors) -> list[Part]:
    """The parts that are sent in this round, checked."""
    for part in payload.parts:
        _check_part(part, w)
    _check_once("parts called", [repr(part.name) for part in payload.parts])
    _check_once("parts that are", ["the displacement" for p in payload.parts if p.tensors is None])
    found = [part for part in payload.parts if (round + 1) % part.every == 0]
    if not found:
        raise ValueError(
            f"no part of the payload travels with round {round}; give one of "
            f"{', '.join(part.name for part in payload.parts)} every=1"
        )
    moves = any(part.name == "model" and part.reduction != "gather" for part in found)
    if not moves and not method.overrides("apply"):
        raise ValueError(
            f"{method}.payload has no mean called 'model' in round {round}, and the apply() that "
            "every method has moves the anchor by it; add Part('model'), or write an apply()"
        )
    return found


def _check_part(part: Part, w: WorkerTensors) -> None:
    check_choice(f"the reduction of {part.name!r}", part.reduction, REDUCTIONS)
    check_int(f"every of the part {part.name!r}", part.every, least=1)
    if part.tensors is not None and len(part.tensors) != len(w.anchor):
        raise ValueError(
            f"the part {part.name!r} has {len(part.tensors)} tensors, where the model has "
            f"{len(w.anchor)} at this sync; give one for each, in the order of w.local"
        )


def _check_once(what: str, found: list[str]) -> None:
    twice = next((each for each in found if found.count(each) > 1), None)
    if twice is not None:
        raise ValueError(f"a payload has two {what} {twice}; leave one of them out")


def check_weights(method: Method, weights: Any, workers: int, where: str) -> Mapping[int, float]:
    """What a method's `weights` gave, or a ValueError that says what it must be."""
    sound = isinstance(weights, Mapping) and len(weights) > 0
    if sound and all(peer in range(workers) and math.isfinite(w) for peer, w in weights.items()):
        return weights
    raise ValueError(
        f"{type(method).__name__}.weights gives {weights!r} {where}; it must give a finite weight "
        f"for at least one of the workers 0 to {workers - 1}, as {{worker: weight}}, or None for "
        "the mean over all"
    )


def weighted_sum(rows: Tensor, weights: Mapping[int, float]) -> Tensor:
    """The rows of some workers, each times its weight, in the order of the workers."""
    total = torch.zeros_like(rows[0])
    for peer, weight in sorted(weights.items()):
        total.add_(rows[peer], alpha=weight)
    return total


def flattened(tensors: Any, like: Tensor) -> Tensor:
    """Tensors end to end in a new flat buffer."""
    return torch.cat([like, *(t.detach().reshape(-1).to(like.dtype) for t in tensors)])


def unflattened(values: Tensor, like: list[Tensor]) -> list[Tensor]:
    """The inverse of `flattened`; axes before the last one are kept."""
    chunks = values.split([t.numel() for t in like], dim=-1)
    return [c.reshape((*values.shape[:-1], *t.shape)) for c, t in zip(chunks, like, strict=True)]

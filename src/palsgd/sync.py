"""One synchronization: D = mean_k(x - x_k), x <- OuterOPT(x, D), x_k <- x.

A sync is of the whole model or of one fragment. Its two halves are `send` and `apply`; `sync` does
both at one clock. With `delay`, steps lie between the halves, and the local model keeps its change
since it was sent: x_k <- x + (x_k - x_k when it was sent). With `blend` b, x_k <- b x_k + (1 - b) x
in either case.

All messages are exchanged before the anchor is changed, so that the loss of a peer cannot leave a
part of a sync applied. If a worker applied its messages one by one and lost a peer after the second
of five, its anchor would be two fifths the new global model and three fifths the old one.
"""

import time
from collections.abc import Generator
from typing import Any

from palsgd.anchor import Anchor
from palsgd.buffers import Buffers
from palsgd.codecs.residues import Residues
from palsgd.guard import WorkerReport, waiting
from palsgd.meter import Meter
from palsgd.method_state import MethodState
from palsgd.outgoing import Outgoing
from palsgd.passes import can_divide
from palsgd.payload import wire_bytes
from palsgd.pending_sync import Arrival, Moment, Outcome, PendingSync
from palsgd.replica import Replica
from palsgd.sync_changes import SyncChanges
from palsgd.sync_tail import WEIGHT
from palsgd.transports.requests import Finish, RepeatError, Request, Settle, Start
from palsgd.transports.transport import Message


class Syncer:
    """Sends fragments of the local model and applies the means that come back."""

    def __init__(self, outgoing: Outgoing, changes: SyncChanges, buffers: Buffers, meter: Meter):
        self.outgoing, self.changes, self.buffers, self.meter = outgoing, changes, buffers, meter
        self.view, self.guard, self.memory = outgoing.view, outgoing.guard, outgoing.memory
        self.pending: PendingSync | None = None  # the sync that is sent and not yet applied

    @property
    def replica(self) -> Replica:
        return self.view.replica

    @property
    def anchor(self) -> Anchor:
        return self.view.anchor

    @property
    def states(self) -> MethodState:
        """The method's."""
        return self.view.states

    @property
    def residues(self) -> Residues:
        return self.outgoing.residues

    # -- the two halves ------------------------------------------------------------------------

    def sync(self, at: Moment) -> Generator[Request, int, Outcome | None]:
        """Send a fragment and apply its mean at the same clock. None if there was nothing to
        apply, as no worker has taken a step."""
        start, pending, arrival = self.meter.watch.now(), PendingSync(at), None
        residues = self.outgoing.kept_residues(at.fragment)
        try:
            takes_sum = self._takes_sum(at.fragment)
            for message, bucket in self.outgoing.pack(pending, takes_sum=takes_sum):
                began = time.perf_counter()
                sent = yield message
                if arrival is None:
                    self.meter.exchange_s = time.perf_counter() - began
                self._count(pending, message, sent)
                if arrival is None:
                    arrival = self._check(pending)
                self._rescale(message, arrival)
                if self.outgoing.parks(at.fragment):
                    assert bucket is not None
                    pending.parked = True
                    bucket.write(self.replica.local())
            yield from self._settle()
        except RepeatError:
            self.residues.put_back(at.fragment, residues)
            raise
        except BaseException:
            if pending.parked:  # the local progress of the round is lost, the global model is not
                self.anchor.copy_to_local(at.fragment)
            raise
        assert arrival is not None
        self._book_waiting(arrival.verdict.reports)
        if arrival.verdict.changes_nothing:
            self.changes.drop(pending)
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
        residues = self.outgoing.kept_residues(at.fragment)
        for message, _ in self.outgoing.pack(pending):
            if pending.kept is not None:
                body = len(message.values) - message.exact
                pending.kept.values.append(message.values[:body].clone())
            yield Start(message)
        if pending.kept is not None:
            pending.kept.residues.update(residues)
        if trains:
            pending.local_when_sent = self.outgoing.local_now(at.fragment)
        self.pending = pending
        self.meter.watch.add("sync_s", start, self.meter.watch.now())

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
            self.changes.drop(pending)
        else:
            outcome = self._conclude(pending, arrival, start)
        self.pending = None
        return outcome

    def _arrive(self, pending: PendingSync) -> Generator[Request, int, None]:
        """Wait for the messages of a sync that was sent, or send them again if it was sent to
        other workers than those that are left."""
        if pending.kept is not None and pending.kept.members != self.guard.members:
            self.outgoing.pack_again(pending, pending.kept)
            for message in pending.messages:
                message.sent = yield message
        elif not pending.arrived:
            for message in pending.messages:
                message.sent = yield Finish(message)
        pending.arrived = True

    def start_over(self) -> None:
        """Forget what earlier syncs have left, as before the local phase."""
        self.pending, self.residues.kept = None, {}
        self.changes.reset_outer()
        self.states.reset()

    def _takes_sum(self, fragment: int) -> bool:
        """Does the outer step divide the sum of the displacements, which saves a pass over the
        sum?"""
        out = self.outgoing
        if self.anchor.home.offloaded:
            return False
        alone = not out.has_rules and out.codec is None and not out.parks(fragment)
        return alone and self.replica.device.type == "cpu" and can_divide(self.changes.outer)

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

    def _conclude(self, pending: PendingSync, arrival: Arrival, start: Any) -> Outcome:
        """Change the anchor, the local model and the buffers, in a plain sync as in a delayed
        one."""
        at, verdict = pending.at, arrival.verdict
        scalars = self._scalars(pending, arrival)
        self.changes.make(pending, scalars, verdict.contributors)
        if self.outgoing.tail.ends_round(at):
            self.buffers.after_sync(arrival.numbers, self.guard.workers, verdict.contributors)
        self.meter.watch.add("sync_s", start, self.meter.watch.now())
        scalars.pop(WEIGHT, None)
        return Outcome(
            at, pending.distance, pending.sent, verdict.contributors, verdict.reports, scalars
        )

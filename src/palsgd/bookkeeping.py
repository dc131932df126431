"""What a worker writes into its ledger and tells its listeners."""

import math
from typing import Any

from palsgd.auto_interval import Costs
from palsgd.course import Course
from palsgd.events import IntervalChosen, Joined, Left, Listeners, Synced
from palsgd.ledger import Ledger
from palsgd.meter import Meter
from palsgd.pacing import Settled, as_records
from palsgd.payload import wire_bytes
from palsgd.pending_sync import Outcome


class Bookkeeping:
    def __init__(self, course: Course, meter: Meter, listeners: Listeners):
        self._course, self.meter, self.listeners = course, meter, listeners
        self.begin()

    @property
    def ledger(self) -> Ledger:
        return self.meter.ledger

    def begin(self) -> None:
        """Write down what a run has before its first step."""
        self.ledger.speeds = as_records(self._course.at.speeds)

    def count_message(self, sent: int) -> None:
        self.ledger.messages += 1
        self.ledger.bytes_sent += sent
        self.ledger.bytes_on_the_wire += wire_bytes(sent, self._course.facts.workers)

    def count_from_here(self) -> None:
        """The next entry of the history has the steps after this one."""
        at, ledger = self._course.at, self.ledger
        at.last_record = (at.clock, at.gradient_steps, ledger.mixing_steps)
        at.gradient_s = ledger.gradient_s

    def record(self, outcome: Outcome) -> None:
        """Add a sync to the history."""
        at, ledger = self._course.at, self.ledger
        clock, gradients, mixing = at.last_record
        self.count_from_here()
        ledger.syncs += 1
        ledger.distance = outcome.distance
        ledger.record(
            {
                "round": self._course.schedule.round_of(at.clock - 1),
                "clock": at.clock,
                "steps": at.clock - clock,
                "gradient_steps": at.gradient_steps - gradients,
                "mixing_steps": ledger.mixing_steps - mixing,
                "fragment": outcome.at.fragment,
                "distance": outcome.distance,
                "bytes_sent": outcome.sent,
                "exchange_s": self.meter.exchange_s,
                "waiting_s": math.nan,  # known at the next sync
                "workers": len(outcome.reports),
            }
        )

    def settled(self, speeds: Settled) -> None:
        """Add the speeds that the next round has."""
        self.ledger.speeds = [*self.ledger.speeds, *as_records(speeds)]

    def interval_chosen(self, length: int, found: Costs) -> None:
        costs = {"sync_s": found.sync_s, "step_s": found.step_s}
        begins = {"sync_every": length, "from_clock": self._course.at.clock}
        self.ledger.interval = begins | costs
        self.tell(IntervalChosen, sync_every=length, **costs)

    def members_changed(self, left: list[int], joined: list[int]) -> None:
        clock, workers = self._course.at.clock, self._course.facts.workers
        change = {"clock": clock, "left": left, "joined": joined, "workers": workers}
        self.ledger.changes.append(change)
        if left:
            self.tell(Left, numbers=tuple(left), workers=workers)
        if joined:
            self.tell(Joined, numbers=tuple(joined), workers=workers)

    def synced(self, outcome: Outcome, *, completes: bool) -> None:
        self.tell(
            Synced,
            round=outcome.at.round,
            fragment=outcome.at.fragment,
            bytes_sent=outcome.sent,
            distance=outcome.distance,
            contributors=outcome.contributors,
            completes=completes,
        )

    def tell(self, kind: type, **what: Any) -> None:
        if self.listeners.wanted(kind):
            at = self._course.at
            self.listeners.tell(kind(worker=self._course.number, clock=at.clock, **what))

"""One worker's steps, as a generator that yields whenever something must be exchanged.

`Worker` sends nothing. Its caller does what a yielded request asks for, and resumes the generator
with the number of bytes handed over: `opt.step()` uses a transport, the simulator exchanges with
its other workers. The schedule decides when something happens, the method what a step does, and the
syncer what a sync does.
"""

import math
from collections.abc import Generator
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from palsgd.auto_interval import AutoInterval
from palsgd.events import Averaged, IntervalChosen, Listeners, Mixed, Sent, Synced
from palsgd.guard import costs
from palsgd.inner import InnerStep
from palsgd.ledger import Ledger
from palsgd.meter import Meter
from palsgd.method import Facts, Method
from palsgd.payload import wire_bytes
from palsgd.schedule import Due, Schedule
from palsgd.sync import Moment, Outcome, Syncer, flattened, unflattened
from palsgd.transports.requests import Request
from palsgd.transports.transport import Message
from palsgd.warmup import Warmup

Exchange = Generator[Request, int, None]


@dataclass
class Progress:
    """The progress of a worker. All fields are saved."""

    fragments: int = 1
    clock: int = 0  # steps so far, steps without data included
    gradient_steps: int = 0
    rounds: int = 0  # completed, each with its sync
    epoch: int = 0  # passes over the data that until() has begun, less one
    synced: bool = False  # was the last action a sync?
    has_anchor: bool = False  # has the local phase begun?
    sent_at: list[int] = field(default_factory=list)  # the clock of each fragment's last sync
    # clock, gradient steps and mixing steps at the last entry of the ledger's history
    last_record: tuple[int, int, int] = (0, 0, 0)
    rates: list[float] = field(default_factory=list)  # of each parameter group, in the last step
    rate_sums: list[float] = field(default_factory=list)  # of each parameter group, so far
    # gradient_steps and rate_sums at the last sync of each fragment
    marks: list[tuple[int, tuple[float, ...]]] = field(default_factory=list)
    scalars: dict[str, float] = field(default_factory=dict)  # the method's, from the last sync

    def __post_init__(self) -> None:
        self.sent_at = self.sent_at or [-1] * self.fragments


class Worker:
    def __init__(
        self,
        *,
        method: Method,
        facts: Facts,
        schedule: Schedule,
        number: int,
        inner: InnerStep,
        warmup: Warmup,
        syncer: Syncer | None,
        meter: Meter,
        listeners: Listeners,
        interval: AutoInterval | None,
    ):
        self.method, self.facts, self.schedule, self.number = method, facts, schedule, number
        self.inner, self.warmup, self._syncer = inner, warmup, syncer
        self.meter, self.listeners = meter, listeners
        self.interval = interval  # None once H is settled
        self.at = Progress(fragments=schedule.fragments)
        self.at.rate_sums = [0.0] * len(inner.optimizer.param_groups)
        self._plan: tuple[int, list[bool]] = (-1, [])
        self._answer: tuple[Schedule | None, int, list[Due], int] = (None, -1, [], 0)  # of `_asked`
        self._plain_until = -1  # nothing is due around gradient steps that begin before this clock

    @property
    def syncer(self) -> Syncer:
        assert self._syncer is not None
        return self._syncer

    @property
    def ledger(self) -> Ledger:
        return self.meter.ledger

    @property
    def warming_up(self) -> bool:
        return self.schedule.warms_up(self.at.clock)

    @property
    def leads(self) -> bool:
        """May the local model differ from the anchor right after a sync?"""
        delayed = any(span.delay for span in self.schedule.spans)
        will_be = self.interval is not None and self.interval.delay > 0
        own = self.method.overrides("restart")
        return self.schedule.fragments > 1 or delayed or will_be or own

    # -- steps ---------------------------------------------------------------------------------

    def step(self) -> Exchange:
        """Take a step with the present gradient, then every step up to the next one that needs a
        gradient."""
        if self._at_end():  # training goes on after its end, so the end is removed
            self.end_at(None)
        if self.warming_up:
            yield from self._warmup_step()
        else:
            yield from self.prepare()
            self.at.synced = False
            self._tick_head()
            rate = self._gradient_step(self.method.gradient_share)
            yield from self._to_next_gradient(rate)
        if not self.at.has_anchor or self.at.synced:
            yield from self.prepare()
            self.meter.leave_step()
        self._look_ahead()

    def plain_step(self) -> bool:
        """Take a step with the present gradient if nothing else is due before or after it."""
        if self.at.clock >= self._plain_until:
            return False
        self.at.synced = False
        rate = self._gradient_step(self.method.gradient_share)
        self._after_gradient(rate, [])
        return True

    def prepare(self) -> Exchange:
        """Do everything that must precede the computation of the next gradient: repeat a failed
        sync, set the anchor after the warm-up, and run rounds without gradients, as their syncs
        change the model."""
        if self.at.has_anchor:
            yield from self._run_due()
        if self.warming_up or self._at_end():
            return
        if not self.at.has_anchor:
            yield from self._start_local_phase()
        if self.leads:  # steps without data change the model, as the anchor differs from it
            yield from self._to_next_gradient(None)
            return
        while not self._at_end() and self._mixing_run() == self._to_next_due():
            self._tick_head()
            yield from self._run_due()

    def _to_next_gradient(self, rate: list[float] | None) -> Exchange:
        """Take steps without data, and the syncs between them. `rate` has the learning rates of the
        gradient step that was just taken, if any. Stop after a sync that sets the local model to
        the anchor, so that the clock is a multiple of H whenever `synced` is true."""
        while True:
            run = 0 if self._at_end() or self._due() else self._mixing_run()
            if run or rate is not None:
                self._after_gradient(rate, self._tick_without_data(run))
            rate = None
            if self._due():
                yield from self._run_due()
                if not self.leads:
                    return
            elif not run:
                return
            if self._at_end():
                return

    def _warmup_step(self) -> Exchange:
        before = self.ledger.bytes_sent
        if self.warmup.in_step:
            self.meter.gradient_done()
            with self.meter.watch.timing("sync_s"):
                yield from self.warmup.average(self.at.clock, self._count_message)
            self.meter.leave_step()
        elif self.facts.workers > 1:
            sent = sum(g.nbytes for g in self.inner.replica.grads() if g is not None)
            self.ledger.bytes_sent += sent
            self.ledger.bytes_on_the_wire += wire_bytes(sent, self.facts.workers)
        self._gradient_step(1.0)
        self.ledger.warmup_steps += 1
        self.ledger.syncs += 1
        if not self.warming_up:
            self.warmup.switch(on=False)
        sent = self.ledger.bytes_sent - before
        self._tell(Averaged, bytes_sent=sent)

    def _start_local_phase(self) -> Exchange:
        """Set the anchor to the model, after the workers have compared their models."""
        syncer, at = self.syncer, self.at
        syncer.anchor.set_from_local()
        syncer.buffers.set_from_local()
        guard, like = syncer.guard, self.warmup.template
        report = guard.report(
            syncer.anchor.digest() + syncer.states.digest(None),
            finite=True,
            meter=self.meter,
            step_s=0.0,
            device=self.inner.replica.device,
        )
        header = guard.encode(report, like)
        syncer.count_message((yield Message(header)))
        guard.check_alike(header, f"the start of the local phase (clock {at.clock})")
        at.has_anchor = True
        at.sent_at = [at.clock] * at.fragments
        at.marks = [self._mark()] * at.fragments
        at.last_record = (at.clock, at.gradient_steps, self.ledger.mixing_steps)
        self._extend_schedule()

    def _gradient_step(self, share: float) -> list[float]:
        """Take the inner step with the present gradient. Returns the learning rates, undivided."""
        self.inner.clip()
        if self.at.has_anchor and self.method.overrides("before_gradient"):
            self._before_gradient()
        rates = self.inner.step(share)
        self.meter.gradient_done()
        at = self.at
        at.gradient_steps += 1
        at.rates = rates
        at.rate_sums = [total + rate / share for total, rate in zip(at.rate_sums, rates)]  # noqa: B905
        self.ledger.gradient_steps += 1
        self._tick()
        return rates

    @torch.no_grad()
    def _before_gradient(self) -> None:
        view, round = self.syncer.view, self.schedule.round_of(self.at.clock)
        for w in view.gradients_everywhere(round=round):
            if w.grad:  # torch's functions on lists refuse empty ones
                self.method.before_gradient(w)
            self.syncer.states.keep_scalars(w)

    def _after_gradient(self, rate: list[float] | None, mixing: list[list[float]]) -> None:
        if not self.method.acts_after_gradient(mixing):
            return
        weights = self._rule_after_gradient(rate, mixing)
        if weights is not None:
            low, high = map(float, weights)
            self.ledger.saw_betas(low, high)
            self.meter.mixing_done()
            self._tell(Mixed, steps=len(mixing), weight_min=low, weight_max=high)

    @torch.no_grad()
    def _rule_after_gradient(
        self, rate: list[float] | None, mixing: list[list[float]]
    ) -> tuple[Any, Any] | None:
        view, round = self.syncer.view, self.schedule.round_of(self.at.clock - 1)
        for w in view.everywhere(round=round):
            weights = self.method.after_gradient(w, rate, mixing)  # equal in all windows
            self.syncer.states.keep_scalars(w)
        return weights

    def _tick_without_data(self, steps: int) -> list[list[float]]:
        """Count steps without data. Returns the learning rates at each of them."""
        rates = []
        for _ in range(steps):
            self.at.rates = self.inner.rates()
            rates.append(self.at.rates)
            self.ledger.mixing_steps += 1
            self._tick()
        return rates

    def _tick_head(self) -> None:
        """Count the steps without data at the head of a round if the local model is equal to the
        anchor, where they change nothing. Otherwise `prepare` has run them."""
        if not self.leads:
            self._tick_without_data(self._mixing_run())

    def _tick(self) -> None:
        self.at.clock += 1
        self.inner.tick()

    # -- the plan of a round -------------------------------------------------------------------

    def _look_ahead(self) -> None:
        """Find the next gradient steps before and after which there is neither a step without data
        nor anything due."""
        self._plain_until = -1
        clock = self.at.clock
        if not self.at.has_anchor or self.warming_up or self._at_end() or self._due():
            return
        stop = clock + self._to_next_due()
        round, offset = self.schedule.place(clock)
        plan = self._round_plan(round)[offset : offset + stop - clock]
        self._plain_until = clock + (plan.index(True) if True in plan else len(plan)) - 1

    def _mixing_run(self) -> int:
        """The number of steps without data up to the next gradient step or the next clock at which
        something is due."""
        round, start = self.schedule.place(self.at.clock)
        plan = self._round_plan(round)
        if not plan[start]:
            return 0
        run, longest = 1, self._to_next_due()
        while run < longest and plan[start + run]:
            run += 1
        return run

    def _to_next_due(self) -> int:
        """Steps until something is due."""
        clock, pending = self.at.clock, self._syncer and self._syncer.pending
        _, found = self._asked()
        if pending and pending.at.due > clock:  # sent under another schedule
            found = min(found, pending.at.due)
        return found - clock

    def _round_plan(self, round: int) -> list[bool]:
        if self._plan[0] != round:
            self._plan = (round, self.plan_of(self.number, round))
        return self._plan[1]

    def plan_of(self, worker: int, round: int) -> list[bool]:
        """The steps of the present round of any worker."""
        clock = self.at.clock
        length, facts = self.schedule.length(clock), self.round_facts(clock)
        plan = self.method.plan(worker, round, length, facts)
        if len(plan) != length:
            raise ValueError(
                f"{type(self.method).__name__}.plan gives {len(plan)} steps for a round of "
                f"{length}; it must give one for each"
            )
        return plan

    def round_facts(self, clock: int) -> Facts:
        """The facts of this clock's round that are equal on all workers."""
        return replace(
            self.facts,
            stops=self.schedule.stops(clock),
            rates=tuple(self.inner.rates()),
            scalars=dict(self.at.scalars),
        )

    def _extend_schedule(self) -> None:
        """Ask a method whose rounds vary in length for the length of the next round."""
        if self.method.varies_length:
            clock = self.at.clock
            number = self.at.rounds
            length = self.method.length(number, self.round_facts(clock))
            if not (isinstance(length, int) and length >= 1):
                raise ValueError(
                    f"{type(self.method).__name__}.length gives {length!r} for round {number}; it "
                    "must give a whole number >= 1"
                )
            self.schedule = self.schedule.lengthened(clock, number, length)
            self._plan = (-1, [])

    # -- what is due ---------------------------------------------------------------------------

    def _at_end(self) -> bool:
        return self.at.clock == self.schedule.end

    def _asked(self) -> tuple[list[Due], int]:
        """What is due at this clock, and the next clock at which something is due. The schedule is
        asked once for each clock, as one step needs the answer several times."""
        key = (self.schedule, self.at.clock)
        if self._answer[0] is not key[0] or self._answer[1] != key[1]:
            self._answer = (*key, self.schedule.due(key[1]), self.schedule.next_due(key[1]))
        return self._answer[2:]

    def _due(self) -> list[Due]:
        """What is due at this clock and has not been done yet."""
        if not self.at.has_anchor:
            return []
        clock, pending = self.at.clock, self.syncer.pending
        found = []
        if pending is not None and (clock >= pending.at.due or self._at_end()):
            found.append(Due("apply", pending.at.fragment))
        return found + [
            due
            for due in self._asked()[0]
            if due.kind in ("send", "sync") and self.at.sent_at[due.fragment] < clock
        ]

    def _run_due(self) -> Exchange:
        """Do everything that is due at this clock."""
        due = self._due()
        if not due:
            return
        through: list[Outcome] = []
        for kind, fragment in due:
            if kind == "apply":
                through.append((yield from self.syncer.apply()))
            elif kind == "send":
                yield from self.syncer.send(self._moment(fragment))
            else:
                with self.meter.whole_sync(exactly=self.interval is not None):
                    outcome = yield from self.syncer.sync(self._moment(fragment))
                through.append(outcome)
            if kind != "apply":
                self.at.sent_at[fragment] = self.at.clock
                self.at.marks[fragment] = self._mark()
            if kind == "send":
                round = self.schedule.round_of(self.at.clock - 1)
                self._tell(Sent, round=round, fragment=fragment)
            else:
                self._synced(through[-1])
        self.meter.skip()
        for number, outcome in enumerate(through):
            self._tell_synced(outcome, completes=number == len(through) - 1)

    def _mark(self) -> tuple[int, tuple[float, ...]]:
        return self.at.gradient_steps, tuple(self.at.rate_sums)

    def _moment(self, fragment: int) -> Moment:
        clock, (steps, sums) = self.at.clock, self.at.marks[fragment]
        delay = self.schedule.span(clock - 1).delay
        measured = self.interval is not None
        since = self.at.gradient_steps - self.at.last_record[1]
        return Moment(
            fragment=fragment,
            clock=clock,
            round=self.schedule.round_of(clock - 1),
            due=clock + delay,
            gradient_steps=self.at.gradient_steps - steps,
            rate_sums=tuple(a - b for a, b in zip(self.at.rate_sums, sums, strict=True)),
            step_s=self.meter.step_seconds(since) if measured else 0.0,
            rates=tuple(self.at.rates or self.inner.rates()),
        )

    def _synced(self, outcome: Outcome) -> None:
        at = self.at
        at.synced = True
        at.scalars = outcome.scalars
        self._record(outcome)
        if outcome.at.fragment == at.fragments - 1:
            at.rounds += 1
            self._choose_interval(outcome)
            self._extend_schedule()

    def _choose_interval(self, outcome: Outcome) -> None:
        """While H is being measured, keep the costs of this sync; after the last measured round,
        choose H."""
        interval = self.interval
        if interval is None:
            return
        chosen = interval.after_round(self.at.rounds, share=self.method.gradient_share)
        if chosen is None:
            return
        length, found = chosen
        self.interval = None
        clock = self.at.clock
        self.schedule = self.schedule.restarted(clock, length=length, delay=interval.delay)
        self.facts = replace(self.facts, sync_every=length)
        self._plan = (-1, [])
        self.ledger.interval = {
            "sync_every": length,
            "from_clock": clock,
            "sync_s": found.sync_s,
            "step_s": found.step_s,
        }
        self._tell(IntervalChosen, sync_every=length, sync_s=found.sync_s, step_s=found.step_s)

    def _record(self, outcome: Outcome) -> None:
        if self.interval is not None:
            self.interval.note(costs(outcome.reports))
        self.meter.sync_done()
        at, ledger = self.at, self.ledger
        clock, gradients, mixing = at.last_record
        at.last_record = (at.clock, at.gradient_steps, ledger.mixing_steps)
        ledger.syncs += 1
        ledger.distance = outcome.distance
        ledger.history.append(
            {
                "round": self.schedule.round_of(at.clock - 1),
                "clock": at.clock,
                "steps": at.clock - clock,
                "gradient_steps": at.gradient_steps - gradients,
                "mixing_steps": ledger.mixing_steps - mixing,
                "fragment": outcome.at.fragment,
                "distance": outcome.distance,
                "bytes_sent": outcome.sent,
                "exchange_s": self.meter.exchange_s,
                "waiting_s": math.nan,  # known at the next sync
            }
        )

    def _count_message(self, sent: int) -> None:
        self.ledger.messages += 1
        self.ledger.bytes_sent += sent
        self.ledger.bytes_on_the_wire += wire_bytes(sent, self.facts.workers)

    def _tell_synced(self, outcome: Outcome, *, completes: bool) -> None:
        self._tell(
            Synced,
            round=outcome.at.round,
            fragment=outcome.at.fragment,
            bytes_sent=outcome.sent,
            distance=outcome.distance,
            contributors=outcome.contributors,
            completes=completes,
        )

    def _tell(self, kind: type, **what: Any) -> None:
        if self.listeners.wanted(kind):
            self.listeners.tell(kind(worker=self.number, clock=self.at.clock, **what))

    # -- the global model ----------------------------------------------------------------------

    def show_global_model(self) -> Exchange:
        """Put the global model and its buffers into the local ones."""
        syncer = self.syncer
        own = None
        if self.method.overrides("global_model"):
            own = self.method.global_model(syncer.view.whole())
        if own is None:
            syncer.anchor.copy_to_local()
        else:
            values = flattened(own, syncer.memory.template)
            syncer.count_message((yield Message(values)))
            local = [t.detach() for t in self.inner.replica.local()]
            torch._foreach_copy_(local, unflattened(values, local))
        syncer.buffers.copy_to_local()

    def aside(self, tensor: Tensor) -> Tensor:
        """A copy of a tensor of the local model, while the model shows another one."""
        return tensor.clone() if self._syncer is None else self.syncer.anchor.home.aside(tensor)

    def average_buffers(self) -> Exchange:
        """Average the recomputed buffers over the workers into the global model's buffers."""
        buffers, workers = self.warmup.buffers, self.facts.workers
        values = buffers.encode(self.number, self.warmup.template)
        self._count_message((yield Message(values)))
        buffers.decode(values, workers, workers)

    # -- for an engine that takes the gradient steps of many workers itself --------------------

    def open_local_phase(self) -> Exchange:
        """The model becomes the anchor."""
        yield from self._start_local_phase()

    def extend_schedule(self) -> None:
        """Ask the method for the length of the round that begins."""
        self._extend_schedule()

    def before_gradient_at(self, clock: int) -> None:
        """The rule before the inner step that begins at this clock."""
        self.at.clock = clock
        self._before_gradient()

    def after_gradient_at(
        self, clock: int, rate: list[float] | None, mixing: list[list[float]]
    ) -> None:
        """The rule after an inner step and the steps without data that end at this clock."""
        self.at.clock = clock
        self._after_gradient(rate, mixing)

    def passed(
        self, clock: int, *, rates: list[list[float]], last: list[float], mixing_steps: int
    ) -> None:
        """Count the steps up to this clock. `rates` has the divided learning rates of each gradient
        step. `last` has the undivided rates of the last step, with a gradient or without."""
        at = self.at
        at.clock, at.synced, at.rates = clock, False, list(last)
        at.gradient_steps += len(rates)
        at.rate_sums = [sum(group) for group in zip(at.rate_sums, *rates, strict=True)]
        self.ledger.gradient_steps += len(rates)
        self.ledger.mixing_steps += mixing_steps

    def run_due(self) -> Exchange:
        """Do everything that is due at this clock."""
        yield from self._run_due()

    # -- from outside --------------------------------------------------------------------------

    def end_at(self, clock: int | None) -> None:
        self.schedule = self.schedule.with_end(clock)
        self._plain_until = -1

    def resumed(self) -> None:
        """Drop what was computed before progress and schedule were set from a saved state."""
        self._plan, self._plain_until = (-1, []), -1
        self.warmup.compared = False
        self.warmup.switch(on=self.warming_up)

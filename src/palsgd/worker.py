"""One worker's steps, as a generator that yields whenever something must be exchanged.

`Worker` sends nothing. Its caller does what a yielded request asks for, and resumes the generator
with the number of bytes handed over: `opt.step()` uses a transport, the simulator exchanges with
its other workers. The schedule decides when something happens, the method what a step does, and the
syncer what a sync does.
"""

import math
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor

from palsgd.auto_interval import AutoInterval
from palsgd.checks import warn
from palsgd.digest import chained
from palsgd.errors import SyncError
from palsgd.events import (
    Averaged,
    IntervalChosen,
    Joined,
    Left,
    Listeners,
    Mixed,
    Sent,
    Synced,
)
from palsgd.feed import Feed
from palsgd.guard import WorkerReport, costs, someone_leaves
from palsgd.inner import InnerStep
from palsgd.ledger import Ledger
from palsgd.meter import Meter
from palsgd.method import Facts, Method
from palsgd.pacing import Pacing, Settled, Speeds, as_records, speeds_in
from palsgd.payload import wire_bytes
from palsgd.position import FINISH, OPENING, SYNC, WARMUP, Position, check, encode
from palsgd.schedule import Due, Schedule, StepPace
from palsgd.sync import Moment, Outcome, Syncer, flattened, unflattened
from palsgd.transports.requests import Admit, Join, LeftOutError, Meet, RepeatError, Request, Settle
from palsgd.transports.transport import Message
from palsgd.warmup import Exchange, GradientSync, Warmup

# How often workers whose gradients backward() averages ask each other who was asked to leave.
LEAVERS_EVERY = 16
_WELCOME = "the welcome of newcomers"  # where workers meet after they have let others in
_Outcome = TypeVar("_Outcome")


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
    gradient_s: float = 0.0  # the ledger's, at that entry
    rates: list[float] = field(default_factory=list)  # of each parameter group, in the last step
    rate_sums: list[float] = field(default_factory=list)  # of each parameter group, so far
    # gradient_steps and rate_sums at the last sync of each fragment
    marks: list[tuple[int, tuple[float, ...]]] = field(default_factory=list)
    scalars: dict[str, float] = field(default_factory=dict)  # the method's, from the last sync
    # the gradient steps of all workers when the last sync that was applied was sent, and its clock
    steps_of_all: list[int] = field(default_factory=list)
    counted_at: int = 0
    # with paced draws: the speeds, and the seconds of a gradient step of all workers at the last
    # syncs
    speeds: Settled = field(default_factory=list)
    step_seconds: list[list[float]] = field(default_factory=list)
    counted: list[int] = field(default_factory=list)  # the numbers of these workers

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
        pacing: Pacing | None = None,
    ):
        self.method, self.facts, self.schedule, self.number = method, facts, schedule, number
        self.inner, self.warmup, self._syncer = inner, warmup, syncer
        self.meter, self.listeners = meter, listeners
        self.interval = interval  # None once H is settled
        self.pacing = pacing  # None unless draws are paced
        self._first = (schedule, facts, interval)  # as it was built
        self.at, self.feed = self._no_progress(), Feed()
        self.ledger.speeds = as_records(self.at.speeds)
        self._forget_plans()
        self._answer: tuple[Schedule | None, int, list[Due], int] = (None, -1, [], 0)  # of `_asked`
        self.compares_position = False  # before its next exchange?
        self._members = warmup.guard.members  # the workers that took part in the last exchange
        self.optimizer = 0  # which of the optimizers of this process
        self.crowded = False  # do other optimizers use the same process group?
        self._plain_until = -1  # nothing is due around gradient steps that begin before this clock
        self.leaving = False  # did the last exchange say that some worker was asked to leave?
        self.hears_leavers = False  # do workers ask for that where no header says it?

    def _no_progress(self) -> Progress:
        rate_sums = [0.0] * len(self.inner.optimizer.param_groups)
        speeds = [] if self.pacing is None else self.pacing.first
        return Progress(fragments=self.schedule.fragments, rate_sums=rate_sums, speeds=speeds)

    def _forget_plans(self) -> None:
        self._plan: tuple[int, list[bool]] = (-1, [])  # of a round
        self._pace: tuple[int, Sequence[StepPace] | None] = (-1, None)

    @property
    def syncer(self) -> Syncer:
        assert self._syncer is not None
        return self._syncer

    @property
    def ledger(self) -> Ledger:
        return self.meter.ledger

    @property
    def elastic(self) -> bool:
        """May workers leave and come while training goes on?"""
        return self.warmup.guard.elastic

    @property
    def warming_up(self) -> bool:
        return self.schedule.warms_up(self.at.clock)

    @property
    def stays_apart(self) -> bool:
        """May the local model differ from the anchor although the whole model was just synced?"""
        blends = self._syncer is not None and bool(self._syncer.blend)
        return blends or self.method.overrides("restart")

    @property
    def draws_alone(self) -> bool:
        """May this worker take another number of gradients between two syncs than the others?"""
        if self.facts.workers == 1:
            return False
        mixes = self.method.gradient_share < 1
        return self.pacing is not None or (mixes and self.facts.draws == "independent")

    @property
    def leads(self) -> bool:
        """May the local model differ from the anchor right after a sync?"""
        delayed = any(span.delay for span in self.schedule.spans)
        will_be = self.interval is not None and self.interval.delay > 0
        return self.schedule.fragments > 1 or delayed or will_be or self.stays_apart

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
            self._stay_local()
            self.at.synced = False
            self._tick_head()
            rate = self._gradient_step(self._share())
            yield from self._to_next_gradient(rate)
        if not self.leaving and (not self.at.has_anchor or self.at.synced):
            yield from self.prepare()
            self.meter.leave_step()
        self._look_ahead()

    def plain_step(self) -> bool:
        """Take a step with the present gradient if nothing else is due before or after it."""
        if self.at.clock >= self._plain_until or self.warmup.gradient_sync.on:
            return False
        self.at.synced = False
        rate = self._gradient_step(self._share())
        self._after_gradient(rate, [])
        return True

    def prepare(self) -> Exchange:
        """Do everything that must precede the computation of the next gradient: repeat a failed
        sync, set the anchor after the warm-up, and run rounds without gradients, as their syncs
        change the model."""
        if self.at.has_anchor:
            yield from self._run_due()
        if self.warming_up or self._at_end() or self.leaving:
            return
        if not self.at.has_anchor:
            yield from self._or_join("the start", self._start_local_phase())
        if self.leads or self._moved:  # then steps without data change the model
            yield from self._to_next_gradient(None)
        if self.leads:
            return
        while not self._stops() and self._mixing_run() == self._to_next_due():
            self._tick_head()
            yield from self._run_due()

    def _to_next_gradient(self, rate: list[float] | None) -> Exchange:
        """Take steps without data, and the syncs between them. `rate` has the learning rates of the
        gradient step that was just taken, if any. Stop after a sync that sets the local model to
        the anchor, so that the clock is a multiple of H whenever `synced` is true."""
        while True:
            run = 0 if self._at_end() or self._due() else self._mixing_run()
            if run or rate is not None:
                self._mix(rate, run)
            rate = None
            if self._due():
                yield from self._run_due()
                if not self.leads:
                    return
            elif not run:
                return
            if self._stops():
                return

    def _stops(self) -> bool:
        """Does training end here, for all workers alike? One that went on to the next sync would
        meet nobody there."""
        return self._at_end() or self.leaving

    def _warmup_step(self) -> Exchange:
        before = self.ledger.bytes_sent
        self.inner.replica.check_unchanged()
        if self.warmup.in_step:
            yield from self._compare_positions(WARMUP)
            self.meter.gradient_done()
            with self.meter.watch.timing("sync_s"):
                sound = yield from self.warmup.average(self.at.clock, self._count_message)
            self.meter.leave_step()
        else:
            sound = self.warmup.may_step(self.at.clock)
            self._count_averaged()
        if sound:
            self._gradient_step(1.0)
        else:
            self._skip_step()
        self.ledger.warmup_steps += 1
        self.ledger.syncs += 1
        if not self.warming_up:
            self.warmup.switch(on=False)
        if self.hears_leavers and not self.warmup.in_step and self.at.clock % LEAVERS_EVERY == 0:
            yield from self.warmup.hear_leavers()
        self.leaving = self.warmup.leaving
        sent = self.ledger.bytes_sent - before
        self._tell(Averaged, bytes_sent=sent, skipped=not sound)

    def _skip_step(self) -> None:
        """Count a step whose gradient is not finite, without taking it."""
        self.meter.gradient_done()
        self.at.gradient_steps += 1
        self.ledger.gradient_steps += 1
        self.ledger.skipped_steps += 1
        self._tick()

    def _count_averaged(self) -> None:
        """Count what the wrapper of the model has sent in forward and backward."""
        workers, wrapper = self.facts.workers, self.warmup.gradient_sync
        averaged = wrapper.averaged_bytes(self.inner.replica.grads())
        broadcast = wrapper.broadcast_bytes() if self.number == 0 else 0
        if workers > 1:
            self.ledger.bytes_sent += averaged + broadcast
            self.ledger.bytes_on_the_wire += wire_bytes(averaged, workers)
            self.ledger.bytes_on_the_wire += broadcast * (workers - 1)

    def _stay_local(self) -> None:
        """Look whether the wrapper of the model has averaged this gradient, and keep a digest of
        the first gradient of the local phase, which shows what averaged it behind our back."""
        wrapper, guard = self.warmup.gradient_sync, self.syncer.guard
        if wrapper.on:
            self._count_averaged()
            wrapper.keep_local()
        if guard.awaits_gradient:
            guard.saw_gradient(self.inner.replica.flat_grads())

    def _start_local_phase(self) -> Exchange:
        """Set the anchor to the model, after the workers have compared their models."""
        syncer, at, warmup = self.syncer, self.at, self.warmup
        yield from self._compare_positions(OPENING)
        self.inner.replica.check_unchanged()
        self.inner.replica.check_held()
        syncer.anchor.set_from_local()
        if syncer.averaged is not None:
            syncer.averaged.open()
        report = syncer.guard.report(
            chained([syncer.anchor.digest(), syncer.states.digest(None)]),
            finite=True,
            meter=self.meter,
            steps=at.gradient_steps,
            device=self.inner.replica.device,
            buffer=0 if warmup.in_step else warmup.buffers.nonfinite(),
        )
        opening = partial(self._opening, report)
        reports = yield from self._together("the start", opening, patient=True)
        at.has_anchor = True
        self._count_all(reports, at.clock)
        at.sent_at = [at.clock] * at.fragments
        at.marks = [self._mark()] * at.fragments
        at.last_record = (at.clock, at.gradient_steps, self.ledger.mixing_steps)
        at.gradient_s = self.ledger.gradient_s
        self._extend_schedule()

    def _opening(self, report: WorkerReport) -> Generator[Request, int, list[WorkerReport]]:
        warmup, clock = self.warmup, self.at.clock
        reports = yield from warmup.open_local_phase(report, clock, self._count_message)
        if self.elastic:
            yield Settle()
        return reports

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
        for w in self.syncer.view.gradients_everywhere(**self._when(self.at.clock)):
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
        first = self.at.clock - len(mixing)
        powers = [self._power(step) for step in range(first, self.at.clock)]
        when = self._when(self.at.clock - 1)
        for w in self.syncer.view.everywhere(**when, pull_powers=powers):
            weights = self.method.after_gradient(w, rate, mixing)  # equal in all windows
            self.syncer.states.keep_scalars(w)
        return weights

    def _when(self, step: int) -> dict[str, int]:
        """What a rule is told of the time, for a step that begins or began at this clock."""
        round, length = self.schedule.round_of(step), self.schedule.length(step)
        return {"round": round, "length": length, "clock": self.at.clock}

    def _mix(self, rate: list[float] | None, steps: int) -> None:
        """Count steps without data and run the rule for them. If the method refuses one of them,
        the steps before it are done and counted, and it is not."""
        mixing, refusal = self._tick_without_data(steps)
        self._after_gradient(rate, mixing)
        if refusal is not None:
            raise refusal

    def _tick_without_data(self, steps: int) -> tuple[list[list[float]], ValueError | None]:
        """Count steps without data, up to one that the method refuses. Returns the learning rates
        at each of them, and the refusal."""
        rates: list[list[float]] = []
        for _ in range(steps):
            now, clock = self.inner.rates(), self.at.clock
            try:
                self.method.check_step(now, clock, self.schedule.length(clock))
            except ValueError as refusal:
                return rates, refusal
            self.at.rates = now
            rates.append(now)
            self.ledger.mixing_steps += 1
            self._tick()
        return rates, None

    @property
    def _moved(self) -> bool:
        """Has a gradient step changed the local model since the last sync?"""
        return self.at.gradient_steps > self.at.marks[0][0]

    def _tick_head(self) -> None:
        """Count the steps without data at the head of a round if the local model is equal to the
        anchor, where they change nothing. Otherwise `prepare` has run them."""
        if not self.leads and not self._moved:
            _, refusal = self._tick_without_data(self._mixing_run())
            if refusal is not None:
                raise refusal

    def _tick(self) -> None:
        self.at.clock += 1
        self.inner.tick()

    # -- the plan of a round -------------------------------------------------------------------

    def _look_ahead(self) -> None:
        """Find the next gradient steps before and after which there is neither a step without data
        nor anything due."""
        self._plain_until = -1
        clock = self.at.clock
        if not self.at.has_anchor or self.warming_up or self._stops() or self._due():
            return
        if self.syncer.guard.awaits_gradient:
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

    def _pace_at(self, clock: int) -> StepPace | None:
        """What the step that begins at this clock counts for, if it is paced."""
        if self.pacing is None:
            return None
        round, offset = self.schedule.place(clock)
        if self._pace[0] != round:
            self._pace = (round, self.pace_of(self.number, round, clock))
        found = self._pace[1]
        return None if found is None else found[offset]

    def _share(self) -> float:
        """What the learning rate of the gradient step that begins now is divided by."""
        pace = self._pace_at(self.at.clock)
        return self.method.gradient_share if pace is None else pace.share

    def _power(self, clock: int) -> float:
        """The power of what the pull of the mixing step that began at this clock leaves."""
        pace = self._pace_at(clock)
        return 1.0 if pace is None else pace.power

    def pace_of(
        self, worker: int, round: int, clock: int | None = None
    ) -> Sequence[StepPace] | None:
        """What each step of the round of any worker that contains this clock counts for; None if
        all count alike."""
        if self.pacing is None:
            return None
        clock = self.at.clock if clock is None else clock
        return self.method.pace(worker, round, self.schedule.length(clock), self.round_facts(clock))

    def plan_of(self, worker: int, round: int, clock: int | None = None) -> list[bool]:
        """The steps of the round of any worker that contains this clock, by default the
        present."""
        clock = self.at.clock if clock is None else clock
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
            speeds=self.speeds_in(self.schedule.round_of(clock)),
            rates=tuple(self.inner.rates()),
            scalars=dict(self.at.scalars),
        )

    def speeds_in(self, round: int) -> Speeds:
        """The speeds of all workers in a round; none unless draws are paced."""
        return () if self.pacing is None else speeds_in(self.at.speeds, round)

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
            self._forget_plans()

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
        if due:
            yield from self._exchange(due, self.schedule.round_of(self.at.clock - 1))

    def finish(self) -> Exchange:
        """Apply what is pending, and sync every fragment in a sync that says that this worker has
        finished. In the warm-up all local models are equal and nothing is to be done.

        The fragment that the schedule sends next comes first, in the way in which the schedule
        sends it. A worker that has not finished meets it there with a message of the same size, so
        that all workers can read in its header who has finished."""
        if not self.at.has_anchor:
            return
        guard, pending, clock = self.syncer.guard, self.syncer.pending, self.at.clock
        # A worker that has not stepped since a sync is in the round that comes next, where it may
        # meet others that have.
        round = self.schedule.round_of(clock - 1 if clock > max(self.at.sent_at) else clock)
        due = [] if pending is None else [Due("apply", pending.at.fragment)]
        guard.finished = True
        try:
            yield from self._exchange(due + self._last_syncs(), round)
        finally:
            guard.finished = False

    def _last_syncs(self) -> list[Due]:
        first, count = self._next_fragment(), self.at.fragments
        order = [(first + i) % count for i in range(count)]
        kinds = ("send", "apply") if self.schedule.span(self.at.clock).delay else ("sync",)
        return [Due(kind, fragment) for fragment in order for kind in kinds]

    def _next_fragment(self) -> int:
        """The fragment that is sent next if training goes on."""
        schedule, clock = self.schedule.with_end(None), self.at.clock
        late = [f for f in schedule.sends(clock) if self.at.sent_at[f] < clock]
        while not late:
            clock = schedule.next_due(clock)
            late = schedule.sends(clock)
        return late[0]

    def _exchange(self, due: list[Due], round: int) -> Exchange:
        yield from self._or_join(self._where(due[0].fragment), self._exchange_all(due, round))

    def _exchange_all(self, due: list[Due], round: int) -> Exchange:
        through: list[Outcome] = []
        for kind, fragment in due:
            if kind == "sync" or (kind == "send" and self.compares_position):
                finished = self.syncer.guard.finished
                yield from self._compare_positions(FINISH if finished else SYNC)
            outcome, where = None, self._where(fragment)
            if kind == "apply":
                outcome = yield from self._together(where, self.syncer.apply)
            elif kind == "send":
                trains = not self.syncer.guard.finished
                yield from self.syncer.send(self._moment(fragment, round), trains=trains)
            else:
                moment = self._moment(fragment, round)
                with self.meter.whole_sync(exactly=self.interval is not None):
                    outcome = yield from self._together(where, partial(self.syncer.sync, moment))
            if kind != "apply":
                self.at.sent_at[fragment] = self.at.clock
                self.at.marks[fragment] = self._mark()
            if kind == "send":
                self._tell(Sent, round=round, fragment=fragment)
            elif outcome is not None:
                through.append(outcome)
                self._synced(outcome)
                yield from self._let_in()
        self.meter.skip()
        for number, outcome in enumerate(through):
            self._tell_synced(outcome, completes=number == len(through) - 1)

    # -- workers that leave and come -----------------------------------------------------------

    def _where(self, fragment: int) -> str:
        return f"the sync of round {self.at.rounds}, fragment {fragment}"

    def _together(
        self,
        where: str,
        exchange: Callable[[], Generator[Request, int, _Outcome]],
        *,
        patient: bool = False,
    ) -> Generator[Request, int, _Outcome]:
        """Run an exchange. If workers may leave, those who are there run it, and run it again if
        one of them is lost meanwhile. `patient`: there is no deadline."""
        if not self.elastic:
            return (yield from exchange())
        while True:
            yield from self._meet(where, patient=patient)
            try:
                return (yield from exchange())
            except RepeatError:
                continue

    def _meet(self, where: str, *, patient: bool = False) -> Exchange:
        met = False
        while not met:
            try:
                yield Meet(where, patient)
                met = True
            except RepeatError:  # a worker was lost while the others connected
                continue
        self._note_members()

    def _or_join(self, where: str, exchange: Exchange) -> Exchange:
        """Run an exchange; if the others have gone on without this worker, join them again."""
        try:
            yield from exchange
        except LeftOutError:
            steps = self.at.clock - min(self.at.sent_at) if self.at.has_anchor else self.at.clock
            warn(
                f"worker {self.number} came too late to {where}: the others have gone on without "
                f"it, so it drops its {steps} steps since its last sync and goes on from their "
                "global model; raise the deadline if that happens often"
            )
            yield from self.join(fresh=False)

    def _let_in(self) -> Exchange:
        """Give the state after this sync to newcomers, who train from here on. At the end of
        training nobody is let in."""
        over = self._at_end() or self.syncer.guard.finished
        if self.warmup.guard.awaits_newcomers and not over:
            yield Admit()
            yield from self._meet(_WELCOME, patient=True)

    def join(self, *, fresh: bool) -> Exchange:
        """Wait until the others let this worker in, and go on from their state. A fresh worker has
        no inner state of its own."""
        while True:
            yield Join(fresh)
            self._members = self.warmup.guard.members
            try:
                yield from self._meet(_WELCOME, patient=True)
                return
            except LeftOutError:
                continue

    def _note_members(self) -> None:
        """Take notice of the workers that have left and come."""
        before, now = self._members, self.warmup.guard.members
        self._members = now
        if now == before and self.facts.workers == len(now):
            return
        self.number = self.warmup.guard.worker
        self.facts = replace(self.facts, workers=len(now))
        self._plan, self._plain_until = (-1, []), -1
        self.method.check_run(self.inner.optimizer, len(now))
        left, joined = ([n for n in a if n not in b] for a, b in ((before, now), (now, before)))
        self.ledger.changes.append(
            {"clock": self.at.clock, "left": left, "joined": joined, "workers": len(now)}
        )
        if left:
            self._tell(Left, numbers=tuple(left), workers=len(now))
        if joined:
            self._tell(Joined, numbers=tuple(joined), workers=len(now))

    # -- all workers ---------------------------------------------------------------------------

    def _compare_positions(self, phase: str) -> Exchange:
        """Raise unless all workers are about to exchange the same. This is done for the first
        exchange after a load and, if several optimizers share a process group, before each."""
        if not (self.compares_position or self.crowded) or self.facts.workers == 1:
            return
        if self.elastic:  # workers that meet compare where they are
            return
        clock = 0 if phase == FINISH else self.at.clock  # workers finish at any clock of a round
        mine = Position(phase, clock, self.ledger.recorded, self.optimizer)
        values = encode(self.number, self.facts.workers, mine, self.warmup.template)
        # The message is not in the ledger, so that the ledger of a resumed run is that of a run
        # that was never interrupted.
        yield Message(values)
        check(values, self.facts.workers)
        self.compares_position = False

    def _count_all(self, reports: list[WorkerReport], clock: int) -> None:
        """Keep the gradient steps of all workers at this clock. The reports have them modulo
        2^16, which tells how far workers are apart unless they are paced."""
        if self.pacing is not None:
            return
        own = next(report.steps for report in reports if report.worker == self.number)
        mine = self.at.gradient_steps - self._gradients(self.number, clock, self.at.clock)
        apart = [(report.steps - own + 2**15) % 2**16 - 2**15 for report in reports]
        self.at.steps_of_all, self.at.counted_at = [mine + more for more in apart], clock
        self.at.counted = [report.worker for report in reports]

    def _gradients(self, worker: int, start: int, stop: int) -> int:
        """The gradient steps of a worker between two clocks, by its plans."""
        found, clock = 0, start
        while clock < stop:
            round, offset = self.schedule.place(clock)
            plan = self.plan_of(worker, round, clock)[offset : offset + stop - clock]
            found += plan.count(False)
            clock += len(plan)
        return found

    @property
    def may_save(self) -> bool:
        """Does every worker that has taken as many gradient steps as this one have the same syncs
        behind it? A worker has run a sync when it has taken the gradient steps before it. With
        paced draws equal numbers of gradient steps say nothing, but all workers stop at a sync."""
        at, schedule = self.at, self.schedule
        if self.facts.workers == 1 or not at.has_anchor or self.warming_up:
            return True
        if self.pacing is not None:
            return at.synced
        last = at.counted_at
        while (following := schedule.next_due(last)) <= at.clock:
            last = following
        return all(
            steps + self._gradients(worker, at.counted_at, last) <= at.gradient_steps
            and steps + self._gradients(worker, at.counted_at, following) > at.gradient_steps
            for worker, steps in zip(
                at.counted or range(len(at.steps_of_all)), at.steps_of_all, strict=True
            )
        )

    @property
    def at_stop(self) -> bool:
        """Is this the clock of an exchange, so that every worker is at it? A worker that joins with
        this progress then takes as many gradient steps up to the next one as all others."""
        if not self.at.has_anchor or self.warming_up:
            return True
        return max(self.at.sent_at) == self.at.clock or (self.at.synced and bool(self._asked()[0]))

    def _mark(self) -> tuple[int, tuple[float, ...]]:
        return self.at.gradient_steps, tuple(self.at.rate_sums)

    def _moment(self, fragment: int, round: int) -> Moment:
        clock, (steps, sums) = self.at.clock, self.at.marks[fragment]
        delay = self.schedule.span(clock - 1).delay
        measured = self.interval is not None or self.pacing is not None
        since = self.at.gradient_steps - self.at.last_record[1]
        return Moment(
            fragment=fragment,
            clock=clock,
            round=round,
            due=clock + delay,
            gradient_steps=self.at.gradient_steps - steps,
            rate_sums=tuple(a - b for a, b in zip(self.at.rate_sums, sums, strict=True)),
            step_s=self.meter.step_seconds(since, since=self.at.gradient_s) if measured else 0.0,
            rates=tuple(self.at.rates or self.inner.rates()),
            taken=self.at.gradient_steps,
            idle=clock == self.at.sent_at[fragment],
        )

    def _synced(self, outcome: Outcome) -> None:
        at = self.at
        at.synced = True
        self.leaving = self.leaving or someone_leaves(outcome.reports)
        self._count_all(outcome.reports, outcome.at.clock)
        at.scalars = outcome.scalars
        self._record(outcome)
        self._measure_speeds(outcome)
        if outcome.at.fragment == at.fragments - 1:
            self._settle_speeds()
            at.rounds += 1
            self.syncer.round_ended()
            self._choose_interval(outcome)
            self._extend_schedule()

    def _measure_speeds(self, outcome: Outcome) -> None:
        """Keep the seconds of a gradient step of all workers, which this sync's header has."""
        if self.pacing is not None and self.pacing.measures:
            seconds = [report.step_s for report in outcome.reports]
            self.at.step_seconds = self.pacing.kept(self.at.step_seconds, seconds)

    def _settle_speeds(self) -> None:
        """Choose the speeds of the next round that begins. At the end of a round it begins now;
        where a delayed sync is applied, the plan of the round that has begun stays as it is."""
        if self.pacing is None or not self.pacing.measures:
            return
        at = self.at
        found = self.pacing.settled(at.step_seconds, at.speeds[-1][1])
        if found is not None:
            round, offset = self.schedule.place(at.clock)
            at.speeds = [*at.speeds[-8:], (round + (offset > 0), found)]
            self.ledger.speeds = [*self.ledger.speeds, *as_records(at.speeds[-1:])]

    def _choose_interval(self, outcome: Outcome) -> None:
        """While H is being measured, keep the costs of this sync; after the last measured round,
        choose H."""
        interval = self.interval
        if interval is None:
            return
        chosen = interval.after_round(share=self.method.gradient_share)
        if chosen is None:
            return
        length, found = chosen
        self.interval = None
        clock = self.at.clock
        self.schedule = self.schedule.restarted(clock, length=length, delay=interval.delay)
        self.facts = replace(self.facts, sync_every=length)
        self._forget_plans()
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
        at, ledger = self.at, self.ledger
        clock, gradients, mixing = at.last_record
        at.gradient_s = ledger.gradient_s
        at.last_record = (at.clock, at.gradient_steps, ledger.mixing_steps)
        ledger.syncs += 1
        ledger.distance = outcome.distance
        ledger.record(
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
                "workers": self.syncer.guard.workers,
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
        where = "recompute_buffers()"
        try:
            yield from self._together(where, self._average_buffers, patient=True)
        except LeftOutError:
            raise SyncError(
                f"the others have gone on without worker {self.number} while it was in {where}; "
                "start this worker again"
            ) from None

    def _average_buffers(self) -> Exchange:
        buffers, workers = self.warmup.buffers, self.facts.workers
        values = buffers.encode(self.warmup.guard.place, self.warmup.template)
        self._count_message((yield Message(values)))
        if self.elastic:
            yield Settle()
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

    def start_over(self) -> None:
        """Forget all progress, as a load is going to set it."""
        end = self.schedule.end
        self.schedule, self.facts, self.interval = self._first
        self.schedule = self.schedule.with_end(end)
        if self.interval is not None:
            self.interval.costs = []
        self.at = self._no_progress()
        self.ledger.speeds = as_records(self.at.speeds)
        if self._syncer is not None:
            self._syncer.start_over()

    def resumed(self) -> None:
        """Drop what was computed before progress and schedule were set from a saved state."""
        self._forget_plans()
        self._plain_until = -1
        self.compares_position = True
        self.warmup.compared = False
        self.warmup.guard.await_gradient()
        self.warmup.switch(on=self.warming_up)

    def welcomed(self) -> None:
        """This worker has taken the progress of another one, whose steps it has not done itself."""
        at = self.at
        at.synced, at.marks = True, [self._mark()] * at.fragments
        at.last_record = (at.clock, at.gradient_steps, self.ledger.mixing_steps)
        at.gradient_s = self.ledger.gradient_s
        self._plan, self._plain_until = (-1, []), -1
        self.warmup.compared = True

    def attach(self, wrapper: GradientSync) -> None:
        """From now on `wrapper` averages the gradients in the warm-up."""
        self.warmup.gradient_sync = wrapper
        self.warmup.switch(on=self.warming_up)
        self.warmup.guard.await_gradient()
        self._plain_until = -1

"""One worker's steps, as a generator that yields whenever something must be exchanged.

`Worker` sends nothing. Its caller does what a yielded request asks for, and resumes the generator
with the number of bytes handed over: `opt.step()` uses a transport, the simulator exchanges with
its other workers. `Worker` is the order of things alone. Its course says when something happens,
the method what a step does, the syncer what a sync does, and its meetings who takes part.
"""

from collections.abc import Generator
from functools import partial

from palsgd.bookkeeping import Bookkeeping
from palsgd.course import Course, Progress
from palsgd.digest import chained
from palsgd.events import Averaged, Listeners, Sent
from palsgd.feed import Feed
from palsgd.guard import WorkerReport, costs, someone_leaves
from palsgd.inner import InnerStep
from palsgd.ledger import Ledger
from palsgd.meetings import Meetings
from palsgd.meter import Meter
from palsgd.method import Facts, Method
from palsgd.payload import payload_size
from palsgd.pending_sync import Moment, Outcome
from palsgd.position import FINISH, OPENING, SYNC, WARMUP, PositionCheck
from palsgd.schedule import Due, Schedule
from palsgd.steps import Steps
from palsgd.sync import Syncer
from palsgd.sync_changes import SyncChanges
from palsgd.transports.requests import Exchange, Request, Settle
from palsgd.warmup import GradientSync, Warmup

# How often workers whose gradients backward() averages ask each other who was asked to leave.
LEAVERS_EVERY = 16


class Worker:
    def __init__(
        self,
        *,
        course: Course,
        inner: InnerStep,
        warmup: Warmup,
        syncer: Syncer | None,
        meter: Meter,
        listeners: Listeners,
    ):
        self.course, self.inner, self.warmup, self._syncer = course, inner, warmup, syncer
        self.books = Bookkeeping(course, meter, listeners)
        self.steps = Steps(course, inner, None if syncer is None else syncer.view, self.books)
        self.meetings = Meetings(course, warmup.guard, self.books)
        self.position, self.feed = PositionCheck(), Feed()
        self.leaving = False  # did the last exchange say that some worker was asked to leave?
        self.hears_leavers = False  # do workers ask for that where no header says it?

    @property
    def syncer(self) -> Syncer:
        assert self._syncer is not None
        return self._syncer

    @property
    def changes(self) -> SyncChanges | None:
        """What a sync changes; None for DDP, which has none."""
        return None if self._syncer is None else self._syncer.changes

    @property
    def at(self) -> Progress:
        return self.course.at

    @property
    def method(self) -> Method:
        return self.course.method

    @property
    def facts(self) -> Facts:
        return self.course.facts

    @property
    def schedule(self) -> Schedule:
        return self.course.schedule

    @property
    def ledger(self) -> Ledger:
        return self.books.ledger

    @property
    def stays_apart(self) -> bool:
        """May the local model differ from the anchor although the whole model was just synced?"""
        blends = self.changes is not None and bool(self.changes.blend)
        return blends or self.method.overrides("restart")

    @property
    def leads(self) -> bool:
        """May the local model differ from the anchor right after a sync?"""
        delayed = any(span.delay for span in self.schedule.spans)
        interval = self.course.interval
        will_be = interval is not None and interval.delay > 0
        return self.schedule.fragments > 1 or delayed or will_be or self.stays_apart

    # -- steps ---------------------------------------------------------------------------------

    def step(self) -> Exchange:
        """Take a step with the present gradient, then every step up to the next one that needs a
        gradient."""
        if self.course.at_end:  # training goes on after its end, so the end is removed
            self.course.end_at(None)
        if self.course.warming_up:
            yield from self._warmup_step()
        else:
            yield from self.prepare()
            self._stay_local()
            self.at.synced = False
            self._tick_head()
            rate = self.steps.gradient(self.course.share)
            yield from self._to_next_gradient(rate)
        if not self.leaving and (not self.at.has_anchor or self.at.synced):
            yield from self.prepare()
            self.books.meter.leave_step()
        self._look_ahead()

    def plain_step(self) -> bool:
        """Take a step with the present gradient if nothing else is due before or after it."""
        course = self.course
        if course.at.clock >= course.plain_until or self.warmup.gradient_sync.on:
            return False
        course.at.synced = False
        rate = self.steps.gradient(course.share)
        self.steps.after_gradient(rate, [])
        return True

    def prepare(self) -> Exchange:
        """Do everything that must precede the computation of the next gradient: repeat a failed
        sync, set the anchor after the warm-up, and run rounds without gradients, as their syncs
        change the model."""
        if self.at.has_anchor:
            yield from self.run_due()
        if self.course.warming_up or self.course.at_end or self.leaving:
            return
        if not self.at.has_anchor:
            yield from self.meetings.or_join("the start", self.open_local_phase())
        if self.leads or self.at.moved:  # then steps without data change the model
            yield from self._to_next_gradient(None)
        if self.leads:
            return
        while not self._stops() and self._mixing_run() == self._to_next_due():
            self._tick_head()
            yield from self.run_due()

    def _to_next_gradient(self, rate: list[float] | None) -> Exchange:
        """Take steps without data, and the syncs between them. `rate` has the learning rates of the
        gradient step that was just taken, if any. Stop after a sync that sets the local model to
        the anchor, so that the clock is a multiple of H whenever `synced` is true."""
        while True:
            run = 0 if self.course.at_end or self._due() else self._mixing_run()
            if run or rate is not None:
                self.steps.mix(rate, run)
            rate = None
            if self._due():
                yield from self.run_due()
                if not self.leads:
                    return
            elif not run:
                return
            if self._stops():
                return

    def _stops(self) -> bool:
        """Does training end here, for all workers alike? One that went on to the next sync would
        meet nobody there."""
        return self.course.at_end or self.leaving

    def _tick_head(self) -> None:
        """Count the steps without data at the head of a round if the local model is equal to the
        anchor, where they change nothing. Otherwise `prepare` has run them."""
        if not self.leads and not self.at.moved:
            self.steps.count_without_data(self._mixing_run())

    def _look_ahead(self) -> None:
        """Find the next gradient steps before and after which there is neither a step without data
        nor anything due."""
        course = self.course
        course.plain_until = -1
        if not self.at.has_anchor or course.warming_up or self._stops() or self._due():
            return
        if not self.syncer.guard.awaits_gradient:
            course.look_ahead(self._to_next_due())

    def _warmup_step(self) -> Exchange:
        before, warmup = self.ledger.bytes_sent, self.warmup
        self.inner.replica.check_unchanged()
        if warmup.in_step:
            yield from self._compare_positions(WARMUP)
            self.books.meter.gradient_done()
            with self.books.meter.watch.timing("sync_s"):
                sound = yield from warmup.average(self.at.clock, self.books.count_message)
            self.books.meter.leave_step()
        else:
            sound = warmup.may_step(self.at.clock)
            warmup.count_averaged()
        if sound:
            self.steps.gradient(1.0)
        else:
            self.steps.skip()
        self._count_warmup_step()
        if self.hears_leavers and not warmup.in_step and self.at.clock % LEAVERS_EVERY == 0:
            yield from warmup.hear_leavers()
        self.leaving = warmup.leaving
        sent = self.ledger.bytes_sent - before
        self.books.tell(Averaged, bytes_sent=sent, skipped=not sound)

    def _count_warmup_step(self) -> None:
        self.ledger.warmup_steps += 1
        self.ledger.syncs += 1
        if not self.course.warming_up:
            self.warmup.switch(on=False)

    def pass_warmup_step(self) -> None:
        """Count a step of the warm-up that an engine has taken elsewhere, where `step` would have
        averaged its gradients."""
        sizes = payload_size(self).warmup()
        for sent in sizes:
            self.books.count_message(sent)
        self.steps.pass_gradient()
        self.warmup.compared = True
        self._count_warmup_step()
        self.books.tell(Averaged, bytes_sent=sum(sizes), skipped=False)

    def _stay_local(self) -> None:
        """Look whether the wrapper of the model has averaged this gradient, and keep a digest of
        the first gradient of the local phase, which shows what averaged it behind our back."""
        wrapper, guard = self.warmup.gradient_sync, self.syncer.guard
        if wrapper.on:
            self.warmup.count_averaged()
            wrapper.keep_local()
        if guard.awaits_gradient:
            guard.saw_gradient(self.inner.replica.flat_grads())

    # -- the start of the local phase ----------------------------------------------------------

    def open_local_phase(self) -> Exchange:
        """Set the anchor to the model, after the workers have compared their models."""
        syncer, at = self.syncer, self.at
        yield from self._compare_positions(OPENING)
        self.inner.replica.check_unchanged()
        self.inner.replica.check_held()
        syncer.anchor.set_from_local()
        if syncer.changes.averaged is not None:
            syncer.changes.averaged.open()
        opening = partial(self._opening, self._opening_report())
        reports = yield from self.meetings.together("the start", opening, patient=True)
        at.has_anchor = True
        self.course.count_all(reports, at.clock)
        at.sent_at = [at.clock] * at.fragments
        at.marks = [at.mark] * at.fragments
        self.books.count_from_here()
        self.course.extend()

    def _opening_report(self) -> WorkerReport:
        syncer, warmup = self.syncer, self.warmup
        return syncer.guard.report(
            chained([syncer.anchor.digest(), syncer.states.digest(None)]),
            finite=True,
            meter=self.books.meter,
            steps=self.at.gradient_steps,
            device=self.inner.replica.device,
            buffer=0 if warmup.in_step else warmup.buffers.nonfinite(),
        )

    def _opening(self, report: WorkerReport) -> Generator[Request, int, list[WorkerReport]]:
        warmup, clock = self.warmup, self.at.clock
        reports = yield from warmup.open_local_phase(report, clock, self.books.count_message)
        if warmup.guard.elastic:
            yield Settle()
        return reports

    # -- what is due ---------------------------------------------------------------------------

    @property
    def pending(self) -> Moment | None:
        """The sync that was sent and not yet applied."""
        pending = self._syncer and self._syncer.pending
        return pending.at if pending else None

    def _due(self) -> list[Due]:
        return self.course.due(self.pending)

    def _to_next_due(self) -> int:
        return self.course.to_next_due(self.pending)

    def _mixing_run(self) -> int:
        """The number of steps without data up to the next gradient step or the next clock at which
        something is due."""
        return self.course.mixing_run(self._to_next_due())

    def run_due(self) -> Exchange:
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
        guard, pending, clock = self.syncer.guard, self.pending, self.at.clock
        # A worker that has not stepped since a sync is in the round that comes next, where it may
        # meet others that have.
        round = self.schedule.round_of(clock - 1 if clock > max(self.at.sent_at) else clock)
        due = [] if pending is None else [Due("apply", pending.fragment)]
        guard.finished = True
        try:
            yield from self._exchange(due + self.course.last_syncs(), round)
        finally:
            guard.finished = False

    def _exchange(self, due: list[Due], round: int) -> Exchange:
        where = self._where(due[0].fragment)
        yield from self.meetings.or_join(where, self._exchange_all(due, round))

    def _where(self, fragment: int) -> str:
        return f"the sync of round {self.at.rounds}, fragment {fragment}"

    def _exchange_all(self, due: list[Due], round: int) -> Exchange:
        through: list[Outcome] = []
        for kind, fragment in due:
            if kind == "sync" or (kind == "send" and self.position.due):
                finished = self.syncer.guard.finished
                yield from self._compare_positions(FINISH if finished else SYNC)
            if kind == "send":
                yield from self._send(fragment, round)
                continue
            outcome = yield from self._apply(fragment, None if kind == "apply" else round)
            if outcome is not None:
                through.append(outcome)
                self._synced(outcome)
                yield from self.meetings.let_in()
        self.books.meter.skip()
        for number, outcome in enumerate(through):
            self.books.synced(outcome, completes=number == len(through) - 1)

    def _send(self, fragment: int, round: int) -> Exchange:
        """The first half of a sync."""
        trains = not self.syncer.guard.finished
        yield from self.syncer.send(self._moment(fragment, round), trains=trains)
        self._mark_sent(fragment)
        self.books.tell(Sent, round=round, fragment=fragment)

    def _apply(self, fragment: int, round: int | None) -> Generator[Request, int, Outcome | None]:
        """A whole sync of this round or, without a round, the second half of the pending one."""
        where = self._where(fragment)
        if round is None:
            return (yield from self.meetings.together(where, self.syncer.apply))
        sync = partial(self.syncer.sync, self._moment(fragment, round))
        with self.books.meter.whole_sync(exactly=self.course.interval is not None):
            outcome = yield from self.meetings.together(where, sync)
        self._mark_sent(fragment)
        return outcome

    def _mark_sent(self, fragment: int) -> None:
        self.at.sent_at[fragment] = self.at.clock
        self.at.marks[fragment] = self.at.mark

    def _moment(self, fragment: int, round: int) -> Moment:
        """When a sync is sent, and what the worker did since the last one."""
        at, course = self.at, self.course
        steps, sums = at.marks[fragment]
        measured = course.interval is not None or course.pacing is not None
        since = at.gradient_steps - at.last_record[1]
        step_s = self.books.meter.step_seconds(since, since=at.gradient_s) if measured else 0.0
        return Moment(
            fragment=fragment,
            clock=at.clock,
            round=round,
            due=at.clock + self.schedule.span(at.clock - 1).delay,
            gradient_steps=at.gradient_steps - steps,
            rate_sums=tuple(a - b for a, b in zip(at.rate_sums, sums, strict=True)),
            step_s=step_s,
            rates=tuple(at.rates or self.inner.rates()),
            taken=at.gradient_steps,
            idle=at.clock == at.sent_at[fragment],
        )

    def _synced(self, outcome: Outcome) -> None:
        """Count a sync and, after that of a round's last fragment, the round. The next round may
        have another length, or other speeds, by what all workers have reported."""
        at, course, reports = self.at, self.course, outcome.reports
        at.synced = True
        self.leaving = self.leaving or someone_leaves(reports)
        course.count_all(reports, outcome.at.clock)
        at.scalars = outcome.scalars
        if course.interval is not None:
            course.interval.note(costs(reports))
        self.books.record(outcome)
        course.measure_speeds(reports)
        if outcome.at.fragment < at.fragments - 1:
            return
        self.books.settled(course.settle_speeds())
        at.rounds += 1
        self.syncer.changes.round_ended()
        chosen = course.choose_interval()
        if chosen is not None:
            self.books.interval_chosen(*chosen)
        course.extend()

    def _compare_positions(self, phase: str) -> Exchange:
        """Raise unless all workers are about to exchange the same, if that is in doubt."""
        if self.warmup.guard.elastic:  # workers that meet compare where they are
            return
        course, like = self.course, self.warmup.template
        row = (course.number, course.facts.workers)
        yield from self.position.compare(phase, self.at.clock, self.ledger.recorded, row, like)

    # -- from outside --------------------------------------------------------------------------

    def start_over(self) -> None:
        """Forget all progress, as a load is going to set it."""
        self.course.start_over()
        self.books.begin()
        if self._syncer is not None:
            self._syncer.start_over()

    def resumed(self) -> None:
        """Drop what was computed before progress and schedule were set from a saved state."""
        self.course.forget_plans()
        self.position.due = True
        self.warmup.compared = False
        self.warmup.guard.await_gradient()
        self.warmup.switch(on=self.course.warming_up)

    def welcomed(self) -> None:
        """This worker has taken the progress of another one, whose steps it has not done itself."""
        at = self.at
        at.synced, at.marks = True, [at.mark] * at.fragments
        self.books.count_from_here()
        self.course.forget_plans()
        self.warmup.compared = True

    def attach(self, wrapper: GradientSync) -> None:
        """From now on `wrapper` averages the gradients in the warm-up."""
        self.warmup.gradient_sync = wrapper
        self.warmup.switch(on=self.course.warming_up)
        self.warmup.guard.await_gradient()
        self.course.plain_until = -1

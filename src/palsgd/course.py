"""Where a worker is on its way through the rounds, what the steps of a round are, and what is due.

The schedule, the facts and the plans change together: when H is chosen, when a method gives the
length of a round, when speeds are measured, and when workers leave or come. So one object has them.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from palsgd.auto_interval import AutoInterval, Costs
from palsgd.guard import WorkerReport
from palsgd.inner import InnerStep
from palsgd.method import Facts, Method
from palsgd.pacing import Pacing, Settled, Speeds, speeds_in
from palsgd.pending_sync import Moment
from palsgd.schedule import Due, Schedule, StepPace


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
    counted: list[int] = field(default_factory=list)  # the numbers of these workers
    # with paced draws: the speeds, and the seconds of a gradient step of all workers at the last
    # syncs
    speeds: Settled = field(default_factory=list)
    step_seconds: list[list[float]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.sent_at = self.sent_at or [-1] * self.fragments

    @property
    def mark(self) -> tuple[int, tuple[float, ...]]:
        """What the steps since a sync that is sent now are counted from."""
        return self.gradient_steps, tuple(self.rate_sums)

    @property
    def moved(self) -> bool:
        """Has a gradient step changed the local model since the last sync?"""
        return self.gradient_steps > self.marks[0][0]


class Course:
    def __init__(
        self,
        *,
        method: Method,
        facts: Facts,
        schedule: Schedule,
        number: int,
        inner: InnerStep,
        interval: AutoInterval | None,
        pacing: Pacing | None,
    ):
        self.method, self.facts, self.schedule, self.number = method, facts, schedule, number
        self._inner = inner
        self.interval = interval  # None once H is settled
        self.pacing = pacing  # None unless draws are paced
        self._first = (schedule, facts, interval)  # as it was built
        self.at = self._no_progress()
        self._answer: tuple[Schedule | None, int, list[Due], int] = (None, -1, [], 0)  # of `_asked`
        self.forget_plans()

    def _no_progress(self) -> Progress:
        rate_sums = [0.0] * len(self._inner.optimizer.param_groups)
        speeds = [] if self.pacing is None else self.pacing.first
        return Progress(fragments=self.schedule.fragments, rate_sums=rate_sums, speeds=speeds)

    def forget_plans(self) -> None:
        self._plan: tuple[int, list[bool]] = (-1, [])  # of a round
        self._pace: tuple[int, Sequence[StepPace] | None] = (-1, None)
        # Nothing is due around gradient steps that begin before this clock.
        self.plain_until = -1

    def start_over(self) -> None:
        """Forget all progress, as a load is going to set it."""
        end = self.schedule.end
        self.schedule, self.facts, self.interval = self._first
        self.schedule = self.schedule.with_end(end)
        if self.interval is not None:
            self.interval.costs = []
        self.at = self._no_progress()

    @property
    def first_schedule(self) -> Schedule:
        """As it was built."""
        return self._first[0]

    def end_at(self, clock: int | None) -> None:
        self.schedule = self.schedule.with_end(clock)
        self.plain_until = -1

    def regroup(self, number: int, workers: int) -> None:
        """Go on as this one of so many workers, or raise if the method cannot."""
        self.number, self.facts = number, replace(self.facts, workers=workers)
        self.forget_plans()
        self.method.check_run(self._inner.optimizer, workers)

    @property
    def warming_up(self) -> bool:
        return self.schedule.warms_up(self.at.clock)

    @property
    def at_end(self) -> bool:
        return self.at.clock == self.schedule.end

    @property
    def draws_alone(self) -> bool:
        """May this worker take another number of gradients between two syncs than the others?"""
        if self.facts.workers == 1:
            return False
        mixes = self.method.gradient_share < 1
        return self.pacing is not None or (mixes and self.facts.draws == "independent")

    # -- the plan of a round -------------------------------------------------------------------

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

    def pace_of(
        self, worker: int, round: int, clock: int | None = None
    ) -> Sequence[StepPace] | None:
        """What each step of the round of any worker that contains this clock counts for; None if
        all count alike."""
        if self.pacing is None:
            return None
        clock = self.at.clock if clock is None else clock
        return self.method.pace(worker, round, self.schedule.length(clock), self.round_facts(clock))

    def round_facts(self, clock: int) -> Facts:
        """The facts of this clock's round that are equal on all workers."""
        return replace(
            self.facts,
            stops=self.schedule.stops(clock),
            speeds=self.speeds_in(self.schedule.round_of(clock)),
            rates=tuple(self._inner.rates()),
            scalars=dict(self.at.scalars),
        )

    def speeds_in(self, round: int) -> Speeds:
        """The speeds of all workers in a round; none unless draws are paced."""
        return () if self.pacing is None else speeds_in(self.at.speeds, round)

    def _round_plan(self, round: int) -> list[bool]:
        if self._plan[0] != round:
            self._plan = (round, self.plan_of(self.number, round))
        return self._plan[1]

    def look_ahead(self, steps: int) -> None:
        """Find the gradient steps, of so many that follow, before and after which there is no step
        without data. Nothing is due between these steps."""
        round, offset = self.schedule.place(self.at.clock)
        plan = self._round_plan(round)[offset : offset + steps]
        self.plain_until = self.at.clock + (plan.index(True) if True in plan else len(plan)) - 1

    def mixing_run(self, longest: int) -> int:
        """The number of steps without data up to the next gradient step, of so many at most."""
        round, start = self.schedule.place(self.at.clock)
        plan = self._round_plan(round)
        if not plan[start]:
            return 0
        run = 1
        while run < longest and plan[start + run]:
            run += 1
        return run

    def gradients(self, worker: int, start: int, stop: int) -> int:
        """The gradient steps of a worker between two clocks, by its plans."""
        found, clock = 0, start
        while clock < stop:
            round, offset = self.schedule.place(clock)
            plan = self.plan_of(worker, round, clock)[offset : offset + stop - clock]
            found += plan.count(False)
            clock += len(plan)
        return found

    # -- what a step counts for ----------------------------------------------------------------

    @property
    def share(self) -> float:
        """What the learning rate of the gradient step that begins now is divided by."""
        pace = self._pace_at(self.at.clock)
        return self.method.gradient_share if pace is None else pace.share

    def pull_powers(self, steps: int) -> list[float]:
        """For each of the last steps, without data, the power of what its pull leaves."""
        paces = map(self._pace_at, range(self.at.clock - steps, self.at.clock))
        return [1.0 if pace is None else pace.power for pace in paces]

    def _pace_at(self, clock: int) -> StepPace | None:
        """What the step that begins at this clock counts for, if it is paced."""
        if self.pacing is None:
            return None
        round, offset = self.schedule.place(clock)
        if self._pace[0] != round:
            self._pace = (round, self.pace_of(self.number, round, clock))
        found = self._pace[1]
        return None if found is None else found[offset]

    # -- what is due ---------------------------------------------------------------------------

    def _asked(self) -> tuple[list[Due], int]:
        """What is due at this clock, and the next clock at which something is due. The schedule is
        asked once for each clock, as one step needs the answer several times."""
        key = (self.schedule, self.at.clock)
        if self._answer[0] is not key[0] or self._answer[1] != key[1]:
            self._answer = (*key, self.schedule.due(key[1]), self.schedule.next_due(key[1]))
        return self._answer[2:]

    def due(self, pending: Moment | None) -> list[Due]:
        """What is due at this clock and has not been done yet. `pending` is the sync that was sent
        and not yet applied."""
        if not self.at.has_anchor:
            return []
        clock, found = self.at.clock, []
        if pending is not None and (clock >= pending.due or self.at_end):
            found.append(Due("apply", pending.fragment))
        return found + [
            due
            for due in self._asked()[0]
            if due.kind in ("send", "sync") and self.at.sent_at[due.fragment] < clock
        ]

    def to_next_due(self, pending: Moment | None) -> int:
        """Steps until something is due."""
        clock, (_, found) = self.at.clock, self._asked()
        if pending is not None and pending.due > clock:  # sent under another schedule
            found = min(found, pending.due)
        return found - clock

    def last_syncs(self) -> list[Due]:
        """The syncs of all fragments with which training ends here. The fragment that the schedule
        sends next comes first."""
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

    # -- where all workers are -----------------------------------------------------------------

    def count_all(self, reports: list[WorkerReport], clock: int) -> None:
        """Keep the gradient steps of all workers at this clock. The reports have them modulo
        2^16, which tells how far workers are apart unless they are paced."""
        if self.pacing is not None:
            return
        own = next(report.steps for report in reports if report.worker == self.number)
        mine = self.at.gradient_steps - self.gradients(self.number, clock, self.at.clock)
        apart = [(report.steps - own + 2**15) % 2**16 - 2**15 for report in reports]
        self.at.steps_of_all, self.at.counted_at = [mine + more for more in apart], clock
        self.at.counted = [report.worker for report in reports]

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
            steps + self.gradients(worker, at.counted_at, last) <= at.gradient_steps
            and steps + self.gradients(worker, at.counted_at, following) > at.gradient_steps
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

    # -- what syncs change of it ---------------------------------------------------------------

    def extend(self) -> None:
        """Ask a method whose rounds vary in length for the length of the next round."""
        if not self.method.varies_length:
            return
        clock, number = self.at.clock, self.at.rounds
        length = self.method.length(number, self.round_facts(clock))
        if not (isinstance(length, int) and length >= 1):
            raise ValueError(
                f"{type(self.method).__name__}.length gives {length!r} for round {number}; it must "
                "give a whole number >= 1"
            )
        self.schedule = self.schedule.lengthened(clock, number, length)
        self.forget_plans()

    def choose_interval(self) -> tuple[int, Costs] | None:
        """After the last round in which H is measured, the chosen H and the costs that it was
        chosen from."""
        if self.interval is None:
            return None
        chosen = self.interval.after_round(share=self.method.gradient_share)
        if chosen is not None:
            length, delay = chosen[0], self.interval.delay
            self.interval = None
            self.schedule = self.schedule.restarted(self.at.clock, length=length, delay=delay)
            self.facts = replace(self.facts, sync_every=length)
            self.forget_plans()
        return chosen

    def measure_speeds(self, reports: list[WorkerReport]) -> None:
        """Keep the seconds of a gradient step of all workers, which a sync's header has."""
        if self.pacing is not None and self.pacing.measures:
            seconds = [report.step_s for report in reports]
            self.at.step_seconds = self.pacing.kept(self.at.step_seconds, seconds)

    def settle_speeds(self) -> Settled:
        """Choose the speeds of the next round that begins. At the end of a round it begins now;
        where a delayed sync is applied, the plan of the round that has begun stays as it is.
        Returns what was chosen, if anything was."""
        if self.pacing is None or not self.pacing.measures:
            return []
        at = self.at
        found = self.pacing.settled(at.step_seconds, at.speeds[-1][1])
        if found is None:
            return []
        round, offset = self.schedule.place(at.clock)
        at.speeds = [*at.speeds[-8:], (round + (offset > 0), found)]
        return at.speeds[-1:]

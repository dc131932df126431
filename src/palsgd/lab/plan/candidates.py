"""Candidates of a plan: a method with its H, delay and code, and the time of a run with it.

The time to a quality is steps times seconds per step. DDP needs the steps of the task, and a
candidate needs (1 + price) times as many (palsgd.lab.plan.prices). Where a price is not measured,
the time is that of as many gradients as DDP takes, and whoever shows it says so.
"""

import math
from dataclasses import dataclass, field, replace

from palsgd import registry
from palsgd.cluster import Cluster, Projection, Work
from palsgd.cluster.gradient_counts import Expected
from palsgd.lab import methods
from palsgd.lab.plan.prices import Price, PriceTable, committed, unknown
from palsgd.method import Method
from palsgd.payload import MethodSize
from palsgd.registry import Row

CODES: tuple[str | None, ...] = (None, "bf16", "int8", "int4")
# Nanoseconds of one CPU core to code, add up and decode an element of a sync: `coding_s` of
# measure.py in seconds of a core, median of five on an Intel Xeon. A GPU takes far less.
CODING_NS = {"bf16": 6.0, "int8": 8.9, "int4": 12.4}
COMMON = 128  # the longest H that is in common use
UNUSABLE = 0.5  # the share of its time above which a candidate communicates too much
LARGE_BUCKETS = 1024.0  # MiB
ACCUMULATED = (4, 16, 64)
POWERSGD_RANK = 16
ROUNDS = 6  # rounds that are simulated where all of them take the same time
DRAWN_ROUNDS, DRAWN_STEPS = 20, 2000  # at most, where they do not
DDP_STEPS = 200
DRAWS = 1_000_000  # seconds of steps that are drawn for one candidate, at most


@dataclass(frozen=True)
class Task:
    """What is to be trained."""

    parameters: int
    steps: int  # that DDP needs
    warmup_steps: int = 0
    mix_prob: float = 0.1
    inner: str = "adamw"
    extra_steps: float | None = None  # the price of every local method; None: the table's
    coding: dict[str, float] = field(  # seconds per element, by code
        default_factory=lambda: {code: 1e-9 * ns for code, ns in CODING_NS.items()}
    )
    prices: PriceTable = field(default_factory=committed, repr=False, compare=False)


@dataclass(frozen=True)
class Candidate:
    method: str
    variant: str  # of DDP: how it sends; empty for methods with rounds
    work: Work
    price: Price
    steps: int  # that it needs
    step_s: float  # of a step in the middle of the run
    run_s: float  # of the whole run: warm-up, extra steps and the last sync included
    computing: float  # shares of the run's time, means over the workers
    waiting: float
    exchanging: float
    bytes_on_the_wire: float  # in the run, of each worker

    @property
    def is_ddp(self) -> bool:
        return self.work.is_ddp

    @property
    def usable(self) -> bool:
        return self.exchanging <= UNUSABLE

    @property
    def changes_little(self) -> bool:
        """Does it keep what is known to cost steps near what is common: H, and DDP's batch and
        gradients? A delay is not."""
        work = self.work
        plain = not work.delay and work.accumulate == 1 and work.sent_share == 1
        return plain and work.sync_every <= COMMON

    @property
    def title(self) -> str:
        return f"{registry.row(self.method).title} {self.variant}".rstrip()


@dataclass
class Times:
    """Sums over a run."""

    total: float = 0.0
    compute: float = 0.0
    wait: float = 0.0
    exchange: float = 0.0
    bytes: float = 0.0

    @classmethod
    def of(cls, run: Projection) -> "Times":
        return cls(run.time_s, run.compute_s, run.wait_s, run.exchange_s, run.bytes_on_the_wire)

    def plus(self, other: "Times", times: float) -> "Times":
        pairs = zip(vars(self).values(), vars(other).values(), strict=True)
        return Times(*(a + times * b for a, b in pairs))


class Planner:
    """The candidates of one cluster and task. Runs that take the same time are simulated once."""

    def __init__(self, cluster: Cluster, task: Task):
        self.cluster, self.task = cluster, task
        self._steady = cluster.spread == "constant"
        self._known: dict[tuple[Work, int], Times] = {}
        self.warmup = self._ddp_times(Work.ddp(task.parameters), min(task.warmup_steps, task.steps))

    # -- DDP -----------------------------------------------------------------------------------

    def opponents(self) -> list[Candidate]:
        """DDP as torch has it by default, and in the ways in which it sends less."""
        size, steps, table = self.task.parameters, self.task.steps, self.task.prices
        found = [self.ddp("fp32", Work.ddp(size), table.ddp(steps=steps))]
        bf16 = {"gradient_bytes": 2, "bucket_mb": LARGE_BUCKETS}
        price = table.ddp(steps=steps, gradients="bf16")
        found.append(self.ddp("bf16", Work.ddp(size, **bf16), price))
        for many in ACCUMULATED:
            if many <= steps:
                work = Work.ddp(size, accumulate=many, **bf16)
                price = table.ddp(steps=steps, accumulate=many, gradients="bf16")
                found.append(self.ddp(f"bf16, {many} accumulated", work, price))
        work = Work.ddp(size, bucket_mb=LARGE_BUCKETS, sent_share=_powersgd_share(size))
        price = unknown("PowerSGD was not run")
        found.append(self.ddp(f"PowerSGD rank {POWERSGD_RANK}", work, price))
        return found

    def ddp(self, variant: str, work: Work, price: Price) -> Candidate:
        steps = math.ceil(self.task.steps * (1 + (price.extra or 0.0)))
        times = self._ddp_times(work, steps)
        return _candidate(
            methods.baseline().name, variant, work, price, steps, times, times.total / steps
        )

    def _ddp_times(self, work: Work, steps: int) -> Times:
        """Steps of DDP are alike, so some of them are simulated."""
        times = 1 if self._steady else math.ceil(DDP_STEPS / work.accumulate)
        few = times * work.accumulate
        return Times().plus(self._simulated(work, few), steps / few)

    # -- methods with rounds -------------------------------------------------------------------

    def work(
        self, row: Row, sync_every: int, *, compress: str | None = None, overlap: bool = False
    ) -> Work | None:
        """A method with its shortest useful delay, if `overlap` asks for one. None: the method
        refuses it, or the exchange takes longer than half a round."""
        method = _default(row, self.task.mix_prob)
        refused = method.refusals()
        if (overlap and "delay" in refused) or (compress and "compress" in refused):
            return None
        work = Work(
            parameters=self.task.parameters,
            sync_every=sync_every,
            mix_prob=round(1 - method.gradient_share, 12),
            compress=compress,
            carries=MethodSize.of(method),
            coding=self.task.coding.get(compress or "", 0.0),
        )
        return self._delayed(work) if overlap else work

    def _delayed(self, work: Work) -> Work | None:
        messages = work.payload(self.cluster.workers).messages()
        exchange = sum(self.cluster.sync_s(message) for message in messages)
        exchange += work.coding * work.parameters
        steps = math.ceil(exchange / ((1 - work.mix_prob) * self.cluster.step))
        if steps > work.sync_every // 2:
            return None
        return replace(work, delay=max(1, steps))

    def local(self, row: Row, work: Work) -> Candidate:
        """The time of a whole run of a method with rounds."""
        task, price = self.task, self._price(row, work)
        warm = min(task.warmup_steps, task.steps)
        factor = 1 / (1 - work.mix_prob) if price.extra is None else 1 + price.extra
        steps = math.ceil((task.steps - warm) * factor)
        times = self.warmup.plus(self._local_times(work, steps), 1.0)
        step = self._round(work).total / work.sync_every
        return _candidate(row.name, "", work, price, warm + steps, times, step)

    def _price(self, row: Row, work: Work) -> Price:
        given = self.task.extra_steps
        if given is not None:
            return Price(given, given, given)
        return self.task.prices.local(
            row.name, sync_every=work.sync_every, steps=self.task.steps, delay=work.delay,
            compress=work.compress, mix_prob=work.mix_prob,
        )  # fmt: skip

    def _local_times(self, work: Work, steps: int) -> Times:
        """The first and the last rounds as they are, and those between them by their mean. The
        sync at the end of a run, behind which nothing hides, is among the last."""
        rounds, rest = divmod(steps, work.sync_every)
        shown = min(rounds, self._rounds(work))
        ends = self._simulated(work, shown * work.sync_every + rest)
        return ends.plus(self._round(work), rounds - shown)

    def _round(self, work: Work) -> Times:
        """The mean of a round in the middle of a run."""
        H, rounds = work.sync_every, self._rounds(work)
        long, short = (self._simulated(work, n * H) for n in (2 * rounds, rounds))
        return Times().plus(long.plus(short, -1.0), 1 / rounds)

    def _rounds(self, work: Work) -> int:
        """Rounds that are simulated: fewer where many steps of many workers are drawn."""
        if self._steady:
            return ROUNDS
        most = min(DRAWN_STEPS, DRAWS // self.cluster.workers) // work.sync_every
        return max(4, min(DRAWN_ROUNDS, most))

    def _simulated(self, work: Work, steps: int) -> Times:
        if steps == 0:
            return Times()
        # whether a message may be cut into buckets makes no difference to a model of time
        alike = replace(work, carries=replace(work.carries, whole=False)), steps
        if alike not in self._known:
            counts = Expected(workers=self.cluster.workers, mix_prob=work.mix_prob)
            run = self.cluster.project(work, steps=steps, counts=counts)
            self._known[alike] = Times.of(run)
        return self._known[alike]


def _candidate(
    method: str, variant: str, work: Work, price: Price, steps: int, times: Times, step: float
) -> Candidate:
    return Candidate(
        method=method,
        variant=variant,
        work=work,
        price=price,
        steps=steps,
        step_s=step,
        run_s=times.total,
        computing=times.compute / times.total,
        waiting=times.wait / times.total,
        exchanging=times.exchange / times.total,
        bytes_on_the_wire=times.bytes,
    )


def rows_with_rounds(mix_prob: float) -> list[Row]:
    """The methods that sync in rounds. Without steps that mix, a mixing method is another's."""
    return [row for row in registry.rows() if row.rounds and (mix_prob or not row.mixes)]


def _default(row: Row, mix_prob: float) -> Method:
    return row.method(**({"mix_prob": mix_prob} if row.mixes else {}))


def _powersgd_share(parameters: int) -> float:
    """The share of the gradients' bytes that two factors of a matrix take, for a transformer whose
    layers are d x d and whose depth is d / 64: 12 d^2 (d / 64) parameters."""
    width = (64 * parameters / 12) ** (1 / 3)
    return min(1.0, 2 * POWERSGD_RANK / width)

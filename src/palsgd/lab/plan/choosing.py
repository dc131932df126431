"""Which candidate a plan recommends, and above which rate of the link it no longer pays."""

from collections.abc import Iterator
from dataclasses import dataclass

from palsgd.cluster import Cluster, Work
from palsgd.lab.plan.candidates import (
    CODES,
    COMMON,
    LARGE_BUCKETS,
    Candidate,
    Planner,
    rows_with_rounds,
)
from palsgd.registry import Row, row

INTERVALS = tuple(2**n for n in range(2, 13))  # the H that are tried
LEAST_ROUNDS = 30  # of a run: with fewer, the syncs are too few to follow the training
WORTH = 0.05  # a gain below this is not worth a change


@dataclass(frozen=True)
class Family:
    """A method with a code, with a delay or without: candidates that differ in H."""

    row: Row
    compress: str | None
    overlap: bool


@dataclass(frozen=True)
class Plan:
    opponents: list[Candidate]
    families: dict[Family, list[Candidate]]
    best: Candidate
    opponent: Candidate  # DDP's fastest variant

    @property
    def local(self) -> list[Candidate]:
        return [candidate for some in self.families.values() for candidate in some]

    @property
    def saved(self) -> float:
        """The share of the opponent's time that the best candidate saves."""
        return 1 - self.best.run_s / self.opponent.run_s


def make_plan(planner: Planner) -> Plan:
    opponents = planner.opponents()
    families = dict(_families(planner))
    every = opponents + [candidate for some in families.values() for candidate in some]
    return Plan(opponents, families, recommended(every), strongest(opponents))


def _families(planner: Planner) -> Iterator[tuple[Family, list[Candidate]]]:
    for each in rows_with_rounds(planner.task.mix_prob):
        for code in CODES:
            plain = list(_by_interval(planner, Family(each, code, overlap=False)))
            if plain:
                yield Family(each, code, overlap=False), plain
            # a delay is of no use where the exchange takes little time as it is
            slow = [c.work.sync_every for c in plain if c.exchanging > WORTH]
            hidden = list(_by_interval(planner, Family(each, code, overlap=True), slow))
            if hidden:
                yield Family(each, code, overlap=True), hidden


def _by_interval(
    planner: Planner, family: Family, intervals: list[int] | None = None
) -> Iterator[Candidate]:
    for H in intervals_for(planner.task.steps) if intervals is None else intervals:
        work = planner.work(family.row, H, compress=family.compress, overlap=family.overlap)
        if work is not None:
            yield planner.local(family.row, work)


def intervals_for(steps: int) -> list[int]:
    """The H with enough rounds in a run of so many steps."""
    return [H for H in INTERVALS if steps >= LEAST_ROUNDS * H]


def recommended(every: list[Candidate]) -> Candidate:
    """Of the usable candidates with a measured price, the plainest one that takes little longer
    than the fastest. Candidates whose price is not measured count only if no other is usable, first
    those that change little. Unusable ones count only if all are."""
    usable = [candidate for candidate in every if candidate.usable]
    measured = [candidate for candidate in usable if candidate.price.measured]
    careful = [candidate for candidate in usable if candidate.changes_little]
    pool = measured or careful or usable or every
    enough = (1 + WORTH) * min(candidate.run_s for candidate in pool)
    return min((c for c in pool if c.run_s <= enough), key=_plainness)


def _plainness(candidate: Candidate) -> tuple[object, ...]:
    work = candidate.work
    return (
        not candidate.is_ddp,
        work.delay / work.sync_every,
        work.sync_every > COMMON,
        work.accumulate,
        not row(candidate.method).default,
        work.sync_every,
        CODES.index(work.compress),
        candidate.run_s,
    )


def strongest(opponents: list[Candidate]) -> Candidate:
    """The fastest DDP whose price is measured, or that changes no more than the precision of what
    it sends, whose price is then taken as none, in its favour."""
    fair = [c for c in opponents if c.price.measured or c.variant in ("fp32", "bf16")]
    return min(fair, key=lambda candidate: candidate.run_s)


# -- where it stops to pay -----------------------------------------------------------------------


@dataclass(frozen=True)
class BreakEven:
    """The rate in bits per second above which less than WORTH of DDP's time is saved. 0: that much
    is saved at no rate. None: at any rate, and `cause` is what costs DDP the time then."""

    rate: float | None
    cause: str


def break_even(planner: Planner, best: Candidate) -> BreakEven:
    task = planner.task

    def saved(rate: float) -> tuple[float, Candidate, Candidate]:
        there = Planner(planner.cluster.changed(rate=rate, slow_rate=None), task)
        own, other = there.local(row(best.method), best.work), strongest(there.opponents())
        return 1 - own.run_s / other.run_s, own, other

    low, high = 3.0, 15.0  # powers of ten
    gain, own, other = saved(10**high)
    if gain >= WORTH:
        return BreakEven(None, _cause(planner, own, other))
    if saved(10**low)[0] < WORTH:
        return BreakEven(0.0, "steps")
    while high - low > 0.005:
        middle = (low + high) / 2
        low, high = (middle, high) if saved(10**middle)[0] >= WORTH else (low, middle)
    return BreakEven(10**low, "rate")


def _cause(planner: Planner, own: Candidate, other: Candidate) -> str:
    """What takes DDP's time where the rate does not: its buckets, the latency, waiting for slow
    steps, or more gradients."""
    differences = {
        "latency": other.exchanging * other.run_s - own.exchanging * own.run_s,
        "waiting": other.waiting * other.run_s - own.waiting * own.run_s,
        "gradients": other.computing * other.run_s - own.computing * own.run_s,
    }
    cause = max(differences, key=lambda name: differences[name])
    return "buckets" if cause == "latency" and _fewer_buckets_would_do(planner, other) else cause


def _fewer_buckets_would_do(planner: Planner, other: Candidate) -> bool:
    """Would one bucket remove most of the time that DDP exchanges over an endless rate?"""
    there = Planner(planner.cluster.changed(rate=1e15, slow_rate=None), planner.task)
    single = Work.ddp(
        other.work.parameters,
        gradient_bytes=other.work.gradient_bytes,
        bucket_mb=max(LARGE_BUCKETS, other.work.gradient_size / 2**20 + 1),
    )
    found = there.ddp("", single, other.price)
    return found.exchanging * found.run_s < other.exchanging * other.run_s / 2


def with_workers(
    cluster: Cluster, planner: Planner, best: Candidate, numbers: list[int]
) -> Iterator[tuple[int, Candidate, Candidate]]:
    """DDP's fastest variant and the recommended candidate with other numbers of workers."""
    for number in numbers:
        there = Planner(cluster.changed(workers=number), planner.task)
        other = strongest(there.opponents())
        own = (
            there.ddp(best.variant, best.work, best.price)
            if best.is_ddp
            else there.local(row(best.method), best.work)
        )
        yield number, other, own

"""A discrete-event simulation of the wall-clock time of the workers.

The state is one number per worker: the instant at which the worker reaches the present clock. The
events are: an exchange begins, a worker waits for the mean of an exchange, training ends. Between
two events no worker waits for another, so each adds the seconds of its own steps.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

from palsgd.cluster.gradient_counts import Counts, Drawn
from palsgd.cluster.network import Network
from palsgd.cluster.work import Work
from palsgd.payload import wire_bytes
from palsgd.schedule import Due, Schedule

if TYPE_CHECKING:
    from palsgd.cluster.cluster import Cluster


@dataclass(frozen=True)
class PendingExchange:
    """An exchange that has begun. All workers have begun it at `start`, and have the mean at
    `end`."""

    start: float
    end: float


@dataclass
class Projection:
    """The time and bytes of a run on a cluster. All seconds except `time_s` are means over the
    workers."""

    # the clocks at which the mean of an exchange was applied
    clocks: list[int] = field(default_factory=list)
    # the instants at which the last worker had applied it
    times: list[float] = field(default_factory=list)
    compute_s: float = 0.0
    wait_s: float = 0.0  # waiting for slower workers
    exchange_s: float = 0.0  # exchanges while no step ran, and each worker's own work at a sync
    bytes_sent: int = 0  # bytes that each worker hands over
    bytes_on_the_wire: int = 0  # bytes that the collectives send for them, per worker
    gradient_steps: float = 0.0  # mean over the workers
    spans: list[dict[str, Any]] = field(default_factory=list)  # the timeline of the watched workers

    @property
    def time_s(self) -> float:
        return self.times[-1]


class TimeSimulation:
    def __init__(
        self,
        cluster: "Cluster",
        work: Work,
        *,
        end: int,
        counts: Counts | None = None,
        seed: int = 0,
        watched: Sequence[int] = (),
        until_s: float = math.inf,
    ):
        """`counts` has the numbers of gradients that the workers compute; None: they are drawn. The
        timeline of the workers in `watched` is kept up to `until_s`."""
        draws, steps = (np.random.Generator(np.random.SFC64(s)) for s in _seeds(seed))
        self.cluster, self.work = cluster, work
        self.schedule = work.schedule.with_end(end)
        self._payload = work.payload(cluster.workers)
        self._counts = counts or Drawn(
            workers=cluster.workers,
            mix_prob=work.mix_prob,
            draws=work.draws,
            rng=draws,
            speeds=cluster.speeds,
        )
        self._compute = cluster.compute(steps)
        self._watched, self._until = list(watched), until_s
        self._inside = cluster.inside_s(work)
        self.clock, self.at = 0, np.zeros(cluster.workers)
        self._one_each = np.ones(cluster.workers, dtype=np.int64)
        self._pending: list[PendingExchange] = []  # in the order in which they began
        self._free = 0.0  # when the last exchange was over
        self.projection = Projection()

    def run_until(self, clock: int, schedule: Schedule | None = None) -> float:
        """The instant at which all workers have finished the step that ends at `clock` and what is
        due at `clock`. A `schedule` replaces that of the work, as the lengths of rounds may have
        changed."""
        self.schedule = schedule or self.schedule
        while self.clock < clock:
            if self.schedule.warms_up(self.clock):
                end = min(clock, self.schedule.warmup)
                self._ddp_step(int(min(self.work.accumulate, end - self.clock)))
                continue
            self._advance(min(clock, self.schedule.next_due(self.clock)))
            for due in self.schedule.due(self.clock):
                self._do(due)
        return float(self.at.max())

    # -- local phase -----------------------------------------------------------------------------

    def _advance(self, clock: int) -> None:
        gradients = self._counts.gradients(self.schedule, self.clock, clock)
        took = self._compute.seconds(gradients)
        took += self.cluster.mix * (clock - self.clock - gradients)
        inside = self._inside * gradients
        self._note("gradient", self.at, self.at + took + inside)
        self.at += took + inside
        self.clock = clock
        self.projection.compute_s += float(took.mean())
        self.projection.exchange_s += float(inside.mean())
        self.projection.gradient_steps += float(gradients.mean())

    def _do(self, due: Due) -> None:
        if due.kind != "apply":
            self._pending.append(self._sent(due.fragment))
        if due.kind != "send":
            self._use(self._pending.pop(0))

    def _sent(self, fragment: int) -> PendingExchange:
        """The exchange of a fragment. Its messages are sent one after another, after those of the
        exchange before it."""
        round = self.schedule.round_of(self.clock - 1)
        start = end = max(float(self.at.max()), self._free)
        for message in self._payload.messages(fragment, round):
            end += self.cluster.sync_s(message)
            if message.coded:
                end += self.work.coding * self._payload.fragments[fragment]
            self._count_bytes(message.bytes, gathered=message.gathered)
        self._free = end
        return PendingExchange(start, end)

    def _use(self, exchange: PendingExchange) -> None:
        """Wait until the mean has arrived, and apply it."""
        begun = np.maximum(self.at, exchange.start)
        done = np.maximum(begun, exchange.end)
        after = done + self.cluster.sync
        self._note("wait", self.at, begun)
        self._note("sync", begun, after)
        self.projection.wait_s += float((begun - self.at).mean())
        self.projection.exchange_s += float((after - begun).mean())
        self.at = after
        self._record()

    # -- DDP -------------------------------------------------------------------------------------

    @cached_property
    def _buckets(self) -> "Buckets":
        return Buckets(self.cluster.network_of_ranks, self.work, self.cluster.overlap)

    def _ddp_step(self, many: int) -> None:
        """A step of DDP with `many` gradients of each worker, of which the last hides exchanges."""
        took = self._compute.seconds(many * self._one_each)
        mean, slowest = float(took.mean()), float(took.max())
        exposed = self._buckets.exposed(slowest / many)
        computed, begun = self.at + took, self.at + slowest
        self._note("gradient", self.at, computed)
        self._note("wait", computed, begun)
        self._note("sync", begun, begun + exposed)
        self.at = begun + exposed
        self.clock += many
        self.projection.compute_s += mean
        self.projection.wait_s += slowest - mean
        self.projection.exchange_s += exposed
        self.projection.gradient_steps += many
        self._count_bytes(self.work.gradient_size, gathered=False)
        self._record()

    # -- records ---------------------------------------------------------------------------------

    def _record(self) -> None:
        self.projection.clocks.append(self.clock)
        self.projection.times.append(float(self.at.max()))

    def _count_bytes(self, size: int, *, gathered: bool) -> None:
        workers = self.cluster.workers
        if workers > 1:
            self.projection.bytes_sent += size
            self.projection.bytes_on_the_wire += wire_bytes(size, workers, gathered=gathered)

    def _note(self, kind: str, starts: np.ndarray, ends: np.ndarray) -> None:
        for worker in self._watched:
            start, end = float(starts[worker]), float(ends[worker])
            if start < end and start < self._until:
                span = {"worker": worker, "kind": kind, "start_s": start, "end_s": end}
                self.projection.spans.append(span)


class Buckets:
    """The seconds of DDP's all-reduces after the end of the backward pass.

    A step of c seconds computes its gradients at a constant rate during its last `overlap` share. A
    bucket is sent when the slowest worker has computed it and the bucket before it has been sent.
    So the last bucket has been sent at max_i(ready_i + seconds of the buckets from i on).
    """

    def __init__(self, network: Network, work: Work, overlap: float):
        sizes = np.array(work.buckets(), dtype=float)
        costs = np.array([network.all_reduce(size) for size in sizes])
        ready = np.cumsum(sizes) / sizes.sum()
        self._before_end = overlap * (1 - ready)  # in units of a step's time
        self._from_here = np.cumsum(costs[::-1])[::-1]

    def exposed(self, seconds: float) -> float:
        return max(0.0, float((self._from_here - seconds * self._before_end).max()))


def _seeds(seed: int) -> "list[np.random.SeedSequence]":
    return np.random.SeedSequence(seed).spawn(2)

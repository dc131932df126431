"""A discrete-event simulation of the workers' clocks.

The state is one number per worker, the instant at which it reaches the clock's present step; it is
moved from event to event: an exchange is begun, an exchange is used, training ends. Between two
events workers do not meet, so each just adds the seconds of its own gradient steps.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from palsgd.cluster.gradient_counts import Counts, Drawn
from palsgd.cluster.work import Work
from palsgd.payload import wire_bytes
from palsgd.schedule import Due, Schedule

if TYPE_CHECKING:
    from palsgd.cluster.cluster import Cluster


@dataclass(frozen=True)
class Flight:
    """An exchange that has begun: all are there at `start`, and have the mean at `end`."""

    start: float
    end: float


@dataclass
class Projection:
    """What a run comes to on a cluster. Seconds but for `time_s` are means over the workers."""

    clocks: list[int] = field(default_factory=list)  # at which an exchange was used
    times: list[float] = field(default_factory=list)  # when the last worker went on from there
    compute_s: float = 0.0
    wait_s: float = 0.0  # for slower workers
    exchange_s: float = 0.0  # that no computation hid, with each worker's own part of a sync
    bytes_sent: int = 0  # that each worker hands over
    bytes_on_the_wire: int = 0  # what the collectives make of them, of each worker
    gradient_steps: float = 0.0  # mean over the workers
    spans: list[dict[str, Any]] = field(default_factory=list)  # the timeline of some workers

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
        """`counts` says how many gradients the workers compute; without, they are drawn. The
        timeline is kept of the workers in `watched`, up to `until_s`."""
        draws, steps = (np.random.Generator(np.random.SFC64(s)) for s in _seeds(seed))
        self.cluster, self.work = cluster, work
        self.schedule = work.schedule.with_end(end)
        self._payload = work.payload(cluster.workers)
        self._counts = counts or Drawn(
            workers=cluster.workers, mix_prob=work.mix_prob, draws=work.draws, rng=draws
        )
        self._compute = cluster.compute(steps)
        self._network, self._watched, self._until = cluster.network, list(watched), until_s
        self.clock, self.at = 0, np.zeros(cluster.workers)
        self._one_each = np.ones(cluster.workers, dtype=np.int64)
        self._flights: list[Flight] = []  # in the order in which they began
        self._free = 0.0  # when the last exchange was over
        self._buckets = _Buckets(cluster, work)
        self.projection = Projection()

    def run_until(self, clock: int, schedule: Schedule | None = None) -> float:
        """The instant at which all workers are past the step `clock` and what is due there. A
        `schedule` replaces that of the work: rounds may have got other lengths meanwhile."""
        self.schedule = schedule or self.schedule
        while self.clock < clock:
            if self.schedule.warms_up(self.clock):
                self._ddp_step()
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
        self._note("gradient", self.at, self.at + took)
        self.at += took
        self.clock = clock
        self.projection.compute_s += float(took.mean())
        self.projection.gradient_steps += float(gradients.mean())

    def _do(self, due: Due) -> None:
        if due.kind != "apply":
            self._flights.append(self._sent(due.fragment))
        if due.kind != "send":
            self._use(self._flights.pop(0))

    def _sent(self, fragment: int) -> Flight:
        """Its messages follow one another, behind those of the exchange before."""
        round = self.schedule.round_of(self.clock - 1)
        start = end = max(float(self.at.max()), self._free)
        for message in self._payload.messages(fragment, round):
            end += self._network.seconds(message)
            self._count_bytes(message.bytes, gathered=message.gathered)
        self._free = end
        return Flight(start, end)

    def _use(self, flight: Flight) -> None:
        """Wait for the mean, if it is not there yet, and go on from it."""
        met = np.maximum(self.at, flight.start)
        done = np.maximum(met, flight.end)
        after = done + self.cluster.sync
        self._note("wait", self.at, met)
        self._note("sync", met, after)
        self.projection.wait_s += float((met - self.at).mean())
        self.projection.exchange_s += float((after - met).mean())
        self.at = after
        self._record()

    # -- DDP -------------------------------------------------------------------------------------

    def _ddp_step(self) -> None:
        took = self._compute.seconds(self._one_each)
        mean, slowest = float(took.mean()), float(took.max())
        exposed = self._buckets.exposed(slowest)
        computed, met = self.at + took, self.at + slowest
        self._note("gradient", self.at, computed)
        self._note("wait", computed, met)
        self._note("sync", met, met + exposed)
        self.at = met + exposed
        self.clock += 1
        self.projection.compute_s += mean
        self.projection.wait_s += slowest - mean
        self.projection.exchange_s += exposed
        self.projection.gradient_steps += 1
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


class _Buckets:
    """How much of DDP's all-reduces the backward pass does not hide.

    A step of c seconds makes its gradients in its last `overlap` share, evenly. A bucket is sent
    when all workers have it (the slowest worker is the last with each of them) and the one before
    is through, so the last is through at max_i(ready_i + seconds of the buckets from i on).
    """

    def __init__(self, cluster: "Cluster", work: Work):
        sizes = np.array(work.buckets(), dtype=float)
        costs = np.array([cluster.network.all_reduce(size) for size in sizes])
        ready = np.cumsum(sizes) / sizes.sum()
        self._before_end = cluster.overlap * (1 - ready)  # in steps
        self._from_here = np.cumsum(costs[::-1])[::-1]

    def exposed(self, seconds: float) -> float:
        return float((self._from_here - seconds * self._before_end).max())


def _seeds(seed: int) -> "list[np.random.SeedSequence]":
    return np.random.SeedSequence(seed).spawn(2)

"""The description of a cluster: how fast its workers compute, and the links between them."""

import inspect
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from palsgd import units
from palsgd.checks import check_choice, check_int, check_number, check_text, in_error
from palsgd.cluster.events import Buckets, Projection, TimeSimulation
from palsgd.cluster.gradient_counts import Counts
from palsgd.cluster.network import ALGORITHMS, Network
from palsgd.cluster.step_times import SPREADS, Compute
from palsgd.cluster.work import Work
from palsgd.payload import Sent


class Cluster:
    """Workers and links, as a model of time.

    Times are seconds or text ("20ms"), rates bits per second or text ("1gbit", "25GB/s").

    Args:
        workers: how many there are.
        step: the mean time of a gradient step.
        rate: the rate of a worker's link in each direction, or of a node's link if workers share
            one.
        latency: the latency of that link, one way.
        slow_rate: the rate of the slowest worker's link, where links are uneven; every all-reduce
            passes through it. None: all are alike.
        spread: how the time of a step varies: "constant", "lognormal" or "heavy-tail" (Pareto).
        cv: the standard deviation over the mean, for a lognormal spread.
        tail: the index of a heavy-tail spread, above 1.
        straggler: the factor on the time of a step of the last workers.
        stragglers: how many these are.
        per_node: workers that share a node and its link.
        ranks_per_worker: devices that are one worker and average every gradient among themselves;
            DDP averages over all of them. `rate` is then that of the link they share.
        node_rate, node_latency: rate and latency of the links between the workers of a node, or
            between the ranks of a worker.
        all_reduce: "ring", "tree", "two-level", "gloo" (its ring over TCP) or "auto", the cheapest
            of the first three.
        overlap: the share of a step, at its end, during which DDP's all-reduces run; by default the
            backward pass, two thirds of the step's arithmetic.
        sync: the time of a worker's own work at a sync: outer step, copies.
        mix: the time of a mixing step.

    Raises:
        ValueError: a value is out of its range or cannot be read; the message says how to write it.

    Example:
        >>> from palsgd.cluster import Cluster, Work
        >>> cluster = Cluster(workers=8, step="50ms", rate="100mbit", latency="20ms")
        >>> run = cluster.project(Work(parameters=1_000_000, sync_every=64), steps=640)
        >>> round(run.compute_s, 6)
        32.0
    """

    def __init__(
        self,
        *,
        workers: int,
        step: float | str,
        rate: float | str,
        latency: float | str = 0.0,
        slow_rate: float | str | None = None,
        spread: str = "constant",
        cv: float = 0.1,
        tail: float = 2.5,
        straggler: float = 1.0,
        stragglers: int = 1,
        per_node: int = 1,
        ranks_per_worker: int = 1,
        node_rate: float | str = "1200gbit",
        node_latency: float | str = "5us",
        all_reduce: str = "auto",
        overlap: float = 2 / 3,
        sync: float | str = 0.0,
        mix: float | str = 0.0,
    ):
        self.workers = check_int("workers", workers, least=1)
        self.step = units.seconds("step", step)
        self.rate = units.rate("rate", rate)
        self.latency = units.seconds("latency", latency, zero=True)
        self.slow_rate = None if slow_rate is None else units.rate("slow_rate", slow_rate)
        check_choice("spread", spread, SPREADS)
        self.spread = spread
        self.cv = check_number("cv", cv, "more than 0", low=0.0)
        self.tail = check_number("tail", tail, "more than 1, or the mean is infinite", low=1.0)
        self.straggler = check_number("straggler", straggler, "a factor of at least 1", low=0.999)
        self.stragglers = check_int("stragglers", stragglers, least=1)
        self.per_node = check_int("per_node", per_node, least=1)
        self.ranks_per_worker = check_int("ranks_per_worker", ranks_per_worker, least=1)
        if self.per_node > 1 and self.ranks_per_worker > 1:
            raise ValueError(
                f"per_node={per_node} and ranks_per_worker={ranks_per_worker} both say what shares "
                "a link; give one of them"
            )
        self.node_rate = units.rate("node_rate", node_rate)
        self.node_latency = units.seconds("node_latency", node_latency, zero=True)
        check_choice("all_reduce", all_reduce, ALGORITHMS)
        self.all_reduce = all_reduce
        self.overlap = check_number("overlap", overlap, "in [0, 1]", low=-1e-12, high=1 + 1e-12)
        self.sync = units.seconds("sync", sync, zero=True)
        self.mix = units.seconds("mix", mix, zero=True)

    @classmethod
    def parse(cls, text: str, *, workers: int) -> "Cluster":
        """The cluster of a text such as "100mbit,20ms,step=50ms": rate and latency, then any other
        field by its name."""
        check_text("cluster", text)
        given: dict[str, Any] = {"workers": workers}
        parts = [part.strip() for part in text.split(",")]
        for place, part in enumerate(parts):
            name, sign, value = part.partition("=")
            if not sign:
                if place > 1:
                    raise ValueError(
                        f"{in_error(part)} in cluster {in_error(text)} has no name; write for "
                        "instance step=50ms"
                    )
                name, value = ("rate", "latency")[place], part
            given[name] = _number(value)
        return cls.from_fields(given)

    @classmethod
    def from_fields(cls, fields: Mapping[str, Any]) -> "Cluster":
        """The cluster of a mapping, as in a file. The error for an unknown or missing field names
        the field."""
        if not isinstance(fields, Mapping):
            raise ValueError(f"fields={in_error(fields)} must be a mapping, as in a file")
        known = inspect.signature(cls).parameters
        for name in fields:
            check_choice("a field of the cluster", name, tuple(known))
        for name, parameter in known.items():
            if parameter.default is inspect.Parameter.empty and name not in fields:
                raise ValueError(f"the cluster has no {name}; add for instance {_EXAMPLES[name]}")
        return cls(**fields)

    def changed(self, **fields: Any) -> "Cluster":
        return Cluster(**{**vars(self), **fields})

    def __repr__(self) -> str:
        return f"Cluster({', '.join(f'{k}={v!r}' for k, v in vars(self).items())})"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Cluster) and vars(self) == vars(other)

    __hash__ = None  # type: ignore[assignment]

    @property
    def network(self) -> Network:
        """The network between the workers."""
        return self._network(self.workers, self.per_node)

    @property
    def network_of_ranks(self) -> Network:
        """The network over which DDP averages: a worker of several ranks is a node of it."""
        ranks = self.ranks_per_worker
        return self._network(ranks * self.workers, max(ranks, self.per_node))

    def _network(self, members: int, per_node: int) -> Network:
        rate = self.rate if self.slow_rate is None else min(self.rate, self.slow_rate)
        return Network(
            members, rate, self.latency, per_node, self.node_rate, self.node_latency,
            self.all_reduce,
        )  # fmt: skip

    @property
    def speeds(self) -> np.ndarray:
        """Of each worker, the gradients that it computes while the fastest computes one."""
        found = np.ones(self.workers)
        found[-self.stragglers :] /= self.straggler
        return found

    def inside_s(self, work: Work) -> float:
        """The seconds by which the ranks of a worker lengthen a gradient step, as they average its
        gradient among themselves."""
        ranks = self.ranks_per_worker
        if ranks == 1:
            return 0.0
        return Buckets(self._network(ranks, ranks), work, self.overlap).exposed(self.step)

    def sync_s(self, message: Sent) -> float:
        """The seconds of one message of a sync. The ranks of a worker send one part each of a plain
        message and give it to each other; a coded one is sent whole by every rank."""
        ranks = self.ranks_per_worker
        if message.coded:
            return self.network.seconds(message._replace(bytes=ranks * message.bytes))
        handed_on = 8 * message.bytes * (ranks - 1) / ranks / self.node_rate
        return self.network.seconds(message) + handed_on

    def compute(self, rng: "np.random.Generator") -> Compute:
        return Compute(
            workers=self.workers, mean=self.step, spread=self.spread, cv=self.cv, tail=self.tail,
            straggler=self.straggler, stragglers=self.stragglers, rng=rng,
        )  # fmt: skip

    def project(
        self,
        work: Work,
        *,
        steps: int,
        seed: int = 0,
        watched: Sequence[int] = (),
        until_s: float = math.inf,
        counts: Counts | None = None,
    ) -> Projection:
        """The wall-clock time of `steps` steps of the clock, divided into computing, waiting and
        exchanging. The timeline of the workers in `watched` is kept up to `until_s`. The numbers of
        gradients are drawn, unless `counts` has them."""
        steps = check_int("steps", steps, least=1)
        until_s = math.inf if until_s == math.inf else units.seconds("until_s", until_s, zero=True)
        machine = TimeSimulation(
            self,
            work,
            end=steps,
            counts=counts,
            seed=check_int("seed", seed),
            watched=self._members(watched),
            until_s=until_s,
        )
        machine.run_until(steps)
        return machine.projection

    def _members(self, watched: Sequence[int]) -> list[int]:
        """The workers whose timeline is kept."""
        if not isinstance(watched, Sequence) or isinstance(watched, str | bytes):
            raise ValueError(f"watched={in_error(watched)} must be a list of workers, as [0, 1]")
        found = [check_int("a worker in watched", each) for each in watched]
        if max(found, default=0) >= self.workers:
            raise ValueError(
                f"watched={in_error(watched)}: there are {self.workers} workers, from 0"
            )
        return found


_EXAMPLES = {"workers": "workers=8", "step": "step=50ms", "rate": "rate=100mbit"}


def _number(text: str) -> Any:
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text

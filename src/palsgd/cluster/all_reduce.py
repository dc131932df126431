"""What an exchange costs on a network: seconds from when the last worker arrives.

`rate` is in bits per second and each direction, `latency` one way. A node holds `per_node`
workers, joined by its inner links; the outer link is the node's, shared by its workers.
"""

import math
from dataclasses import dataclass

ALGORITHMS = ("auto", "ring", "tree", "two-level", "gloo")

GLOO_SEGMENT = 2**20  # bytes: the longest piece that gloo's ring sends at once
FIRST_WINDOW = 10 * 1448  # bytes: what Linux sends before the first answer (RFC 6928)
TCP_PAUSE = 0.2  # seconds of silence, and a round trip, after which TCP starts slowly again


@dataclass(frozen=True)
class Network:
    workers: int
    rate: float
    latency: float
    per_node: int
    node_rate: float
    node_latency: float
    algorithm: str

    @property
    def nodes(self) -> int:
        return math.ceil(self.workers / self.per_node)

    def all_reduce(self, size: float, *, pause: float = 0.0) -> float:
        """Of `size` bytes, `pause` seconds after the last exchange."""
        if self.workers == 1:
            return 0.0
        if self.algorithm == "gloo":
            return gloo(self, size, pause)
        if self.algorithm != "auto":
            return _COSTS[self.algorithm](self, size)
        names = ["ring", "tree"] + ["two-level"] * (self.per_node > 1)
        return min(_COSTS[name](self, size) for name in names)

    def coded(self, size: float, *, pause: float = 0.0) -> float:
        """Of values that are coded into `size` bytes (palsgd.compression): each worker sends every
        other its chunk, all at once, and then the coded means go round a ring.

        The ring crosses a node's outer link once. The chunks of all its workers cross it side by
        side, each for another worker, so there a node with many workers gains less.
        """
        K, inside = self.workers, min(self.workers, self.per_node)
        if K == 1:
            return 0.0
        rate, latency = self.weakest
        abroad = 8 * inside * size * (K - inside) / K / self.rate
        at_home = 8 * size * (inside - 1) / K / self.node_rate
        gather = (K - 1) * (8 * size / K / rate + latency)
        start = slow_start(size, rate, latency, pause) if self.algorithm == "gloo" else 0.0
        return max(abroad, at_home) + latency + gather + start

    @property
    def weakest(self) -> tuple[float, float]:
        """Rate and latency of a ring over all workers: it crosses every kind of link, and in each
        of its steps all wait for the slowest."""
        if self.per_node == 1:
            return self.rate, self.latency
        if self.nodes == 1:
            return self.node_rate, self.node_latency
        return min(self.rate, self.node_rate), max(self.latency, self.node_latency)


def ring(network: Network, size: float) -> float:
    """2(K-1) steps, each of which moves a K-th of the data: bandwidth-optimal."""
    return _ring(network.workers, size, *network.weakest)


def _ring(members: int, size: float, rate: float, latency: float) -> float:
    return 2 * (members - 1) * (8 * size / members / rate + latency)


def tree(network: Network, size: float) -> float:
    """Two binary trees, each with half of the data, as NCCL's: a leaf of one is an inner node of
    the other, so links are full in both directions, and it takes log K hops up and down."""
    rate, latency = network.weakest
    return 2 * 8 * size / rate + 2 * math.ceil(math.log2(network.workers)) * latency


def two_level(network: Network, size: float) -> float:
    """Reduce-scatter inside a node, a ring between the nodes (all parts at once, over the node's
    one outer link), all-gather inside."""
    inside = min(network.workers, network.per_node)
    between = _ring(network.nodes, size, network.rate, network.latency)
    return _ring(inside, size, network.node_rate, network.node_latency) + between


_COSTS = {"ring": ring, "tree": tree, "two-level": two_level}


def gloo(network: Network, size: float, pause: float) -> float:
    """gloo's ring over TCP.

    It cuts the data into S segments per worker, at least two and none above 1 MiB, and has two of
    them on their way at a time. A hop of the ring moves S segments; each takes its time on the
    link, or half of that and the latency where this is longer.
    """
    rate, latency = network.weakest
    chunk = size / network.workers
    segments = max(2, math.ceil(chunk / GLOO_SEGMENT))
    alone = 8 * chunk / segments / rate
    hop = segments * max(alone, (alone + latency) / 2)
    return 2 * (network.workers - 1) * hop + slow_start(size, rate, latency, pause)


def slow_start(size: float, rate: float, latency: float, pause: float) -> float:
    """Seconds that TCP loses, after a pause, until its window holds what the link does.

    The window doubles with each round trip, in which the link could have carried `full` bytes and
    carries `window`.
    """
    trip = 2 * latency
    full = rate / 8 * trip
    if pause < TCP_PAUSE + trip:
        return 0.0
    lost, window, sent = 0.0, float(FIRST_WINDOW), 0.0
    while window < full and sent < size:
        lost += trip * (1 - window / full)
        sent += window
        window *= 2
    return lost

"""The seconds of an exchange on a network, counted from the instant at which the last worker begins
it.

`rate` is in bits per second in each direction; `latency` is one way. A node holds `per_node`
workers, joined by its inner links; the outer link is the node's, shared by its workers.
"""

import math
from dataclasses import dataclass

from palsgd.payload import Sent

ALGORITHMS = ("auto", "ring", "tree", "two-level", "gloo")

# The share of payload in TCP over Ethernet: 1448 of the 1514 bytes of a frame. Half an
# acknowledgement of 66 bytes is added per frame, as in a ring each worker sends and receives at
# once.
TCP_SHARE = 1448 / (1514 + 66 / 2)
GLOO_SEGMENT = 2**20  # bytes: the longest piece that gloo's ring sends at once


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

    def seconds(self, message: Sent) -> float:
        """The seconds of one message of a sync."""
        if message.gathered:
            return self.gather(message.bytes)
        return self.coded(message.bytes) if message.coded else self.all_reduce(message.bytes)

    def all_reduce(self, size: float) -> float:
        """The seconds of an all-reduce of `size` bytes."""
        if self.workers == 1:
            return 0.0
        if self.algorithm != "auto":
            return _COSTS[self.algorithm](self, size)
        names = ["ring", "tree"] + ["two-level"] * (self.per_node > 1)
        return min(_COSTS[name](self, size) for name in names)

    def coded(self, size: float) -> float:
        """The seconds of a mean of values that are coded into `size` bytes (palsgd.codecs). Each
        worker sends every other worker its chunk, all at once, and then a ring gathers the coded
        means.

        gloo takes twice as long for the first step. A chunk is sent when its receiver has requested
        it, and a worker's requests and chunks for another worker follow each other on one
        connection. The requests of the workers that came first are there when the last worker
        comes, so it sends its chunks at once, and its own requests wait behind them. The others'
        chunks for it are sent after that.

        The ring uses a node's outer link once. The chunks of all workers of the node share that
        link, so a node with many workers saves less time in the first step.
        """
        K, inside = self.workers, min(self.workers, self.per_node)
        if K == 1:
            return 0.0
        rate, latency = self.weakest
        abroad = 8 * inside * size * (K - inside) / K / self.rate
        at_home = 8 * size * (inside - 1) / K / self.node_rate
        if self.algorithm == "gloo":
            return 2 * max(abroad, at_home) / TCP_SHARE + 2 * latency + gloo_phase(self, size)
        return max(abroad, at_home) + latency + (K - 1) * (8 * size / K / rate + latency)

    def gather(self, size: float) -> float:
        """The seconds in which a ring sends `size` bytes of every worker to all others."""
        K = self.workers
        if K == 1:
            return 0.0
        if self.algorithm == "gloo":  # each of gloo's hops sends a K-th of what it is given
            return gloo_phase(self, K * size)
        rate, latency = self.weakest
        return (K - 1) * (8 * size / rate + latency)

    @property
    def weakest(self) -> tuple[float, float]:
        """Rate and latency of a ring over all workers: those of the slowest link, as the ring uses
        every kind of link and all workers wait for the slowest in each step."""
        if self.per_node == 1:
            return self.rate, self.latency
        if self.nodes == 1:
            return self.node_rate, self.node_latency
        return min(self.rate, self.node_rate), max(self.latency, self.node_latency)


def ring(network: Network, size: float) -> float:
    """2(K-1) steps, each of which moves a K-th of the data: bandwidth-optimal."""
    return ring_seconds(network.workers, size, *network.weakest)


def ring_hops(workers: int) -> int:
    """2 (K - 1): after K - 1 hops every part is summed on one worker, and after K - 1 more every
    worker has every sum."""
    return 2 * (workers - 1)


def ring_seconds(
    workers: int, size: float, rate: float, latency: float, messages: float = 1
) -> float:
    """The seconds of `messages` ring all-reduces of `size` bytes in total. A K-th of the bytes is
    sent in every hop, and each message has the latency of every hop."""
    return ring_hops(workers) * (8 * size / workers / rate + messages * latency)


def tree(network: Network, size: float) -> float:
    """Two binary trees, each with half of the data, as NCCL's: a leaf of one is an inner node of
    the other, so links are full in both directions, and it takes log K hops up and down."""
    rate, latency = network.weakest
    return 2 * 8 * size / rate + 2 * math.ceil(math.log2(network.workers)) * latency


def two_level(network: Network, size: float) -> float:
    """Reduce-scatter inside a node, a ring between the nodes (all parts at once, over the node's
    one outer link), all-gather inside."""
    inside = min(network.workers, network.per_node)
    between = ring_seconds(network.nodes, size, network.rate, network.latency)
    return ring_seconds(inside, size, network.node_rate, network.node_latency) + between


def gloo(network: Network, size: float) -> float:
    """gloo's ring over TCP: a reduce-scatter and an all-gather."""
    return 2 * gloo_phase(network, size)


def gloo_phase(network: Network, size: float) -> float:
    """K-1 hops, in each of which a K-th of the data moves on.

    gloo cuts that K-th into S segments, at least two and none above 1 MiB. A receiver requests two
    segments at a time. A segment takes t seconds on the link. Segment i + 2 is sent only after
    segment i has arrived and the request for segment i + 2 has come back, so two segments take 2t,
    or t plus a round trip if that is longer. A phase begins with a request and ends with an
    arrival. With K = 2 requests wait behind the data of the other direction, which uses the same
    connection, so each pair of segments except the first waits one latency more.
    """
    (rate, latency), hops = network.weakest, network.workers - 1
    chunk = size / network.workers
    segments = max(2, math.ceil(chunk / GLOO_SEGMENT))
    t, trip = 8 * chunk / segments / (rate * TCP_SHARE), 2 * latency
    busy = hops * segments * t + trip
    idle = hops * segments / 2 * (t + trip) + t
    queued = busy + (math.ceil(segments / 2) - 1) * latency if hops == 1 else 0.0
    return max(busy, idle, queued)


_COSTS = {"ring": ring, "tree": tree, "two-level": two_level, "gloo": gloo}

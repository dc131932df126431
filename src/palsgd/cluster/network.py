"""What an exchange costs on a network: seconds from when the last worker arrives.

`rate` is in bits per second and each direction, `latency` one way. A node holds `per_node`
workers, joined by its inner links; the outer link is the node's, shared by its workers.
"""

import math
from dataclasses import dataclass

from palsgd.payload import Sent

ALGORITHMS = ("auto", "ring", "tree", "two-level", "gloo")

# Payload of TCP over Ethernet: of each frame, beside which half an acknowledgement goes out for
# what comes in, as in a ring all send and receive at once.
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
        """Of one message of a sync."""
        if message.gathered:
            return self.gather(message.bytes)
        return self.coded(message.bytes) if message.coded else self.all_reduce(message.bytes)

    def all_reduce(self, size: float) -> float:
        """Of `size` bytes."""
        if self.workers == 1:
            return 0.0
        if self.algorithm != "auto":
            return _COSTS[self.algorithm](self, size)
        names = ["ring", "tree"] + ["two-level"] * (self.per_node > 1)
        return min(_COSTS[name](self, size) for name in names)

    def coded(self, size: float) -> float:
        """Of values that are coded into `size` bytes (palsgd.codecs): each worker sends every
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
        if self.algorithm == "gloo":  # which asks for each chunk before it is sent
            return max(abroad, at_home) / TCP_SHARE + 2 * latency + gloo_phase(self, size)
        return max(abroad, at_home) + latency + (K - 1) * (8 * size / K / rate + latency)

    def gather(self, size: float) -> float:
        """Of `size` bytes of every worker, which a ring brings to all others."""
        K = self.workers
        if K == 1:
            return 0.0
        if self.algorithm == "gloo":  # in each of its hops a K-th of what it is given moves on
            return gloo_phase(self, K * size)
        rate, latency = self.weakest
        return (K - 1) * (8 * size / rate + latency)

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
    return ring_seconds(network.workers, size, *network.weakest)


def ring_hops(workers: int) -> int:
    """K - 1 until every part is summed somewhere, and K - 1 more until it is known everywhere."""
    return 2 * (workers - 1)


def ring_seconds(
    workers: int, size: float, rate: float, latency: float, messages: float = 1
) -> float:
    """Of `messages` ring all-reduces of `size` bytes in all: a K-th of them moves in every hop, and
    each message pays the latency of every hop."""
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

    gloo cuts that into S segments, at least two and none above 1 MiB, and a receiver asks for two
    at a time: one of t seconds on the link is followed by the next but one not before it has
    arrived and the request for that has come back, so that a pair takes 2t, or t and a round trip
    where this is longer. A phase begins with a request and ends with an arrival. Between two
    workers requests queue behind the data of the other direction, which there shares their
    connection, and each pair but the first waits a latency more.
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

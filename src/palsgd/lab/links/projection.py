"""What a link would cost by the simplest model: a ring that no two messages share."""

from collections.abc import Sequence
from statistics import fmean

from palsgd.lab.links.link import Link


def ring_bytes(handed_over: float, workers: int) -> float:
    """What each worker sends in ring all-reduces of so many bytes: every K-th part travels K - 1
    hops to be summed and K - 1 to be known everywhere."""
    return 2 * (workers - 1) / workers * handed_over


def ring_s(handed_over: float, links: Sequence[Link], messages: float = 1) -> float:
    """Seconds of `messages` ring all-reduces of so many bytes in all. The slowest link sets the
    pace; a message makes 2 (K - 1) hops in a row, each with the delay of whoever sends. Headers,
    lost packets and TCP's caution at the start are left out."""
    workers = len(links)
    rate = min(link.bits_per_second for link in links)
    delay = 2 * (workers - 1) * fmean(link.delay_ms for link in links) / 1e3
    return 8 * ring_bytes(handed_over, workers) / rate + messages * delay

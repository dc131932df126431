"""The properties of one worker's link, and the words that set them in the kernel."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean

from palsgd import units
from palsgd.checks import as_number, check_text, in_error
from palsgd.cluster import network

_FRAME = 1514  # bytes of a full Ethernet frame, as the kernel's shaper counts them


@dataclass(frozen=True)
class Link:
    """The link between one worker and the switch that connects all workers.

    `rate` holds in both directions, for each on its own; None: as fast as the machine. `delay_ms`
    (a number, or text such as "20ms") is added to every packet the worker sends, so a packet from a
    to b takes a's delay, and the round trip a's plus b's. `loss` is the share of the packets the
    worker sends that are dropped.
    """

    rate: str | None = None
    delay_ms: float = 0.0
    loss: float = 0.0

    def __post_init__(self) -> None:
        _ = self.bits_per_second
        delay_ms = units.milliseconds("delay_ms", self.delay_ms, zero=True)
        object.__setattr__(self, "delay_ms", delay_ms)
        if not 0 <= as_number(self.loss) < 1:
            raise ValueError(
                f"loss={in_error(self.loss)} must be a share in [0, 1), for instance 0.01"
            )

    @classmethod
    def parse(cls, text: str) -> "Link":
        """The link of a text such as "100mbit,20ms" or "100mbit,20ms,loss=0.01"."""
        check_text("link", text)
        given: dict[str, str] = {}
        for place, part in enumerate(each.strip() for each in text.split(",")):
            name, sign, value = part.partition("=")
            if not sign:
                name, value = ("rate", "latency", part)[min(place, 2)], part
            if name not in ("rate", "latency", "loss"):
                raise ValueError(
                    f"{in_error(part)} in link {in_error(text)} cannot be emulated; write for "
                    "instance 100mbit,20ms or 100mbit,20ms,loss=0.01"
                )
            given[name] = value
        try:
            loss = float(given.get("loss", 0.0))
        except ValueError:
            raise ValueError(f"loss={in_error(given['loss'])} in a link is no number") from None
        delay = units.milliseconds("latency", given.get("latency", 0.0), zero=True)
        return cls(given.get("rate"), delay, loss)

    @property
    def bits_per_second(self) -> float:
        return math.inf if self.rate is None else _bits_per_second(self.rate)

    @property
    def slow_only(self) -> bool:
        """Does the link neither delay nor drop packets, so that the kernel's shaper is enough?"""
        return not (self.delay_ms or self.loss)

    def shaper(self) -> str:
        """The words for tc's token bucket.

        The bucket holds what the link carries in 2 ms: enough that a timer which fires late costs
        no throughput, and so little that a short message is not sent for free. Larger packets,
        which the kernel puts together to save work, are taken apart again by the shaper. Senders
        hold back what they themselves have queued; the queue is for several that send to one slow
        worker, half a second long, so that TCP loses little.
        """
        per_second = self.bits_per_second / 8
        bucket = max(2 * _FRAME, round(2e-3 * per_second))
        queue = max(64 * _FRAME, round(0.5 * per_second))
        rate = f"{round(self.bits_per_second)}bit"
        return f"tbf rate {rate} burst {bucket} limit {bucket + queue}"


def _bits_per_second(rate: str) -> float:
    """The bits per second of a rate that the kernel's shaper supports."""
    try:
        value = units.rate("rate", rate)
    except ValueError:
        value = 0.0
    if not 8e3 <= value <= 1e12:
        raise ValueError(
            f"rate={in_error(rate)} is no rate from 8kbit to 1000gbit; write for instance 100mbit, "
            "or none for no limit"
        )
    return value


def modelled_ring_seconds(links: Sequence[Link], size: float, messages: float = 1) -> float:
    """What `messages` all-reduces of `size` bytes in all take on a ring over these links, by the
    cluster's model. The rate is that of the slowest link, and each hop has the delay of its sender.
    Headers, lost packets and TCP's slow start are left out."""
    rate = min(link.bits_per_second for link in links)
    delay_s = fmean(link.delay_ms for link in links) / 1e3
    return network.ring_seconds(len(links), size, rate, delay_s, messages)

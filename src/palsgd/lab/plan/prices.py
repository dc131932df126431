"""What a choice costs in steps, from the record of measurements beside this file.

`bench/prices.py` makes the record. A price is the share of steps that a choice needs beyond DDP's.
Between measured points it is interpolated; outside of them it is not known, and nothing here
guesses it.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from palsgd.json_files import read_json_object
from palsgd.lab import methods

RECORD = Path(__file__).parent / "prices.json"


@dataclass(frozen=True)
class Price:
    """The share of steps beyond DDP's, with its 95 % interval; or why it is not known."""

    extra: float | None
    low: float = math.nan
    high: float = math.nan
    why_not: str = ""

    @property
    def measured(self) -> bool:
        return self.extra is not None


FREE = Price(0.0, 0.0, 0.0)


def unknown(why_not: str) -> Price:
    return Price(None, why_not=why_not)


Corner = tuple[float, Price]  # the weight of a measured point, and its price


class PriceTable:
    """The prices of a record, by what was measured."""

    def __init__(self, record: Mapping[str, Any]):
        self.record = record
        self.conditions: Mapping[str, Any] = record.get("conditions", {})
        self._entries = {} if record.get("tiny", True) else _by_key(record["prices"])
        self._empty = "the record of prices is a tiny one, made to see its program run"

    def ddp(self, *, steps: int, accumulate: int = 1, gradients: str = "fp32") -> Price:
        """The price of DDP's variants in a run of so many steps. DDP itself costs nothing beyond
        itself."""
        if accumulate == 1 and gradients == "fp32":
            return FREE
        if not self._entries:
            return unknown(self._empty)
        length = self.conditions["steps"]
        if steps < length:
            return unknown(f"DDP's variants were run with {length:,} steps, not with fewer")
        wanted = methods.baseline().name, gradients, length
        measured = {
            key.accumulate: price
            for key, price in self._entries.items()
            if (key.method, key.gradients, key.steps) == wanted
        }
        between = _between(sorted(measured), accumulate, log=True)
        if between is None:
            return unknown(f"accumulation of {accumulate} gradients is outside of what was run")
        return _mixed([(weight, measured[many]) for many, weight in between])

    def local(
        self,
        method: str,
        *,
        sync_every: int,
        steps: int,
        delay: int = 0,
        compress: str | None = None,
        mix_prob: float = 0.0,
    ) -> Price:
        """The price of a method with rounds, in a run of so many steps."""
        if not self._entries:
            return unknown(self._empty)
        if mix_prob and mix_prob != self.conditions["mix_prob"]:
            return unknown(f"p = {mix_prob:g} was not run")
        length = self.conditions["steps"]
        if steps < length:
            if delay or compress:
                return unknown(f"codes and delays were run with {length:,} steps, not with fewer")
            return self._shorter(method, sync_every, steps)
        if self._grows_with_length(method, sync_every):
            return unknown(f"it grew with the length of the run, which was {length:,} steps")
        share = delay / sync_every
        return self._at(length, method, sync_every, share=share, compress=compress)

    def _shorter(self, method: str, sync_every: int, steps: int) -> Price:
        """Between the short and the long runs of the study."""
        lengths = sorted({key.steps for key in self._entries if key.method == method})
        between = _between(lengths, steps, log=True)
        if between is None:
            return unknown(f"runs of {steps:,} steps are outside of what was run")
        return _mixed(
            [(weight, self._at(length, method, sync_every)) for length, weight in between]
        )

    def _grows_with_length(self, method: str, sync_every: int) -> bool:
        """Was the price of the long runs above that of the short ones by more than chance? If it
        was not, it is taken for that of still longer runs. A method without short runs may grow."""
        lengths = sorted({key.steps for key in self._entries if key.method == method})
        if len(lengths) < 2:
            return True
        short, long = (self._at(length, method, sync_every) for length in lengths)
        known = short.measured and long.measured
        return known and long.low > short.high

    def _at(
        self,
        steps: int,
        method: str,
        sync_every: int,
        *,
        share: float = 0.0,
        compress: str | None = None,
    ) -> Price:
        """By H (its logarithm) and the delay's share of a round, between four measured points."""
        measured = {
            (key.sync_every, key.delay_share): price
            for key, price in self._entries.items()
            if (key.method, key.steps, key.compress) == (method, steps, compress)
        }
        if not measured:
            what = f"{method} with {compress}" if compress else method
            return unknown(f"{what} was not run")
        lengths = _between(sorted({H for H, _ in measured}), sync_every, log=True)
        if lengths is None:
            return unknown(f"H = {sync_every} is outside of what was run")
        shares = _between(sorted({share for _, share in measured}), share, log=False)
        if shares is None:
            return unknown(f"a delay of {share:.0%} of a round is outside of what was run")
        places = [((H, late), a * b) for H, a in lengths for late, b in shares]
        if any(place not in measured for place, _ in places):
            return unknown("some of the points around it were not run")
        return _mixed([(weight, measured[place]) for place, weight in places])


@dataclass(frozen=True)
class Key:
    method: str
    steps: int
    sync_every: int
    delay_share: float
    compress: str | None
    accumulate: int
    gradients: str


def _by_key(entries: Sequence[Mapping[str, Any]]) -> dict[Key, Price]:
    return {
        Key(
            entry["method"], entry["steps"], entry["sync_every"] or 1, entry["delay_share"],
            entry["compress"], entry["accumulate"], entry["gradients"],
        ): _price(entry)
        for entry in entries
    }  # fmt: skip


def _price(entry: Mapping[str, Any]) -> Price:
    found = entry["extra_steps"]
    if found is None:
        return unknown(f"it is more than {entry['at_least']:.0%}")
    return Price(found["mean"], found["low"], found["high"])


def _between(points: Sequence[float], value: float, *, log: bool) -> list[tuple[Any, float]] | None:
    """The measured points on both sides of a value, with their weights; None: it is outside."""
    if not points or not points[0] <= value <= points[-1]:
        return None
    if value in points:
        return [(value, 1.0)]
    above = next(point for point in points if point > value)
    below = max(point for point in points if point < value)
    low, here, high = (math.log(x) if log else x for x in (below, value, above))
    share = (here - low) / (high - low)
    return [(below, 1 - share), (above, share)]


def _mixed(corners: Sequence[Corner]) -> Price:
    """The weighted mean of measured points. It is unknown if one of them is."""
    for _, price in corners:
        if not price.measured:
            return price
    extra, low, high = (
        sum(weight * value for weight, value in values)
        for values in (
            [(weight, price.extra or 0.0) for weight, price in corners],
            [(weight, price.low) for weight, price in corners],
            [(weight, price.high) for weight, price in corners],
        )
    )
    return Price(extra, low, high)


@cache
def committed() -> PriceTable:
    """The table that is part of the package."""
    return PriceTable(read_json_object(RECORD, fix="install palsgd again"))

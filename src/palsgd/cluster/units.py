"""Rates, times and counts: numbers, or text with a unit."""

import math
import re
from collections.abc import Mapping
from typing import Any

_PREFIX = {"": 1.0, "k": 1e3, "m": 1e6, "g": 1e9, "t": 1e12}
_TIME = {"s": 1.0, "ms": 1e-3, "us": 1e-6, "ns": 1e-9, "min": 60.0, "h": 3600.0}
_COUNT = {"": 1.0, "k": 1e3, "M": 1e6, "B": 1e9, "G": 1e9, "T": 1e12}
_NUMBER = r"([+-]?(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d+)?)\s*"


def rate(name: str, value: float | str) -> float:
    """Bits per second: 1e8, "100mbit", "25GB/s" (bytes where the B is large)."""
    found = value
    if isinstance(value, str):
        match = re.fullmatch(_NUMBER + r"([kmgtKMGT]?)(bit|Bit|b|B)(?:/s)?", value.strip())
        if match is None:
            raise ValueError(f"{name}={value!r} is no rate; write for instance '100mbit' or 'GB/s'")
        number, prefix, unit = match.groups()
        found = float(number) * _PREFIX[prefix.lower()] * (8 if unit == "B" else 1)
    return number_in(name, found, "more than 0 bit/s", low=0.0, shown=value)


def seconds(name: str, value: float | str, *, zero: bool = False) -> float:
    """Seconds: 0.05, "50ms", "20us"."""
    found = _scaled(name, value, _TIME, "time; write for instance '50ms'", bare="s")
    words = "a time of 0 s or more" if zero else "a time of more than 0 s"
    return number_in(name, found, words, low=-math.ulp(0.0) if zero else 0.0, shown=value)


def count(name: str, value: float | str) -> int:
    """A whole number >= 1: 8054656, "8M", "70B"."""
    found = _scaled(name, value, _COUNT, "count; write for instance '8M'", bare="")
    return round(number_in(name, found, "at least 1", low=math.nextafter(1.0, 0.0), shown=value))


def number_in(
    name: str,
    value: Any,
    words: str,
    *,
    low: float = -math.inf,
    high: float = math.inf,
    shown: Any = None,
) -> float:
    """`value` if it lies strictly between `low` and `high`; else a ValueError with the range."""
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not (number and low < value < high):
        raise ValueError(f"{name}={value if shown is None else shown!r} must be {words}")
    return float(value)


def _scaled(
    name: str, value: float | str, units: Mapping[str, float], what: str, *, bare: str
) -> Any:
    if not isinstance(value, str):
        return value
    match = re.fullmatch(_NUMBER + r"([a-zA-Z]*)", value.strip())
    if match is None or (match[2] or bare) not in units:
        raise ValueError(f"{name}={value!r} is no {what}")
    return float(match[1]) * units[match[2] or bare]

"""Rates, times and counts: numbers, or text with a unit."""

import re
from collections.abc import Mapping
from typing import Any

from palsgd.checks import below, check_number, in_error

_PREFIX = {"": 1.0, "k": 1e3, "m": 1e6, "g": 1e9, "t": 1e12}
_SECONDS = {"": 1.0, "s": 1.0, "ms": 1e-3, "us": 1e-6, "ns": 1e-9, "min": 60.0, "h": 3600.0}
_MILLISECONDS = {
    "": 1.0, "s": 1e3, "ms": 1.0, "us": 1e-3, "ns": 1e-6, "min": 60e3, "h": 3600e3,
}  # fmt: skip
_COUNT = {"": 1.0, "k": 1e3, "K": 1e3, "M": 1e6, "B": 1e9, "G": 1e9, "T": 1e12}
_NUMBER = r"([+-]?(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d+)?)\s*"


def rate(name: str, value: float | str) -> float:
    """Bits per second: 1e8, "100mbit", "25GB/s" (bytes where the B is large)."""
    found = value
    if isinstance(value, str):
        match = re.fullmatch(_NUMBER + r"([kmgtKMGT]?)(bit|Bit|BIT|b|B)(?:/s)?", value.strip())
        if match is None:
            raise ValueError(
                f"{name}={in_error(value)} is no rate; write for instance '100mbit' or '25GB/s'"
            )
        number, prefix, unit = match.groups()
        found = float(number) * _PREFIX[prefix.lower()] * (8 if unit == "B" else 1)
    return check_number(name, found, "more than 0 bit/s", low=0.0, shown=value)


def seconds(name: str, value: float | str, *, zero: bool = False) -> float:
    """Seconds: 0.05, "50ms", "20us"."""
    found = _scaled(name, value, _SECONDS, "time; write for instance '50ms'")
    return _time(name, found, value, "s", zero=zero)


def milliseconds(name: str, value: float | str, *, zero: bool = False) -> float:
    """Milliseconds: 50, "50" or "50ms", "0.05s". A number without a unit means milliseconds."""
    found = _scaled(name, value, _MILLISECONDS, "time; write for instance '50ms'")
    return _time(name, found, value, "ms", zero=zero)


def count(name: str, value: float | str) -> int:
    """A whole number >= 1: 8054656, "8M", "70B"."""
    found = _scaled(name, value, _COUNT, "count; write for instance '8M'")
    return round(check_number(name, found, "at least 1", low=below(1.0), shown=value))


def size(number: float) -> str:
    """Bytes with a unit: 12 B, 3.4 kB, 5.6 MB."""
    for unit in ("B", "kB", "MB", "GB"):
        if number < 1000:
            return f"{number:.3g} {unit}"
        number /= 1000
    return f"{number:,.3g} TB"


def _time(name: str, found: Any, value: float | str, unit: str, *, zero: bool) -> float:
    words = f"a time of 0 {unit} or more" if zero else f"a time of more than 0 {unit}"
    return check_number(name, found, words, low=below(0.0) if zero else 0.0, shown=value)


def _scaled(name: str, value: float | str, units: Mapping[str, float], what: str) -> Any:
    """Text as a number of the unit whose factor is 1; a value that is no text is returned
    unchanged."""
    if not isinstance(value, str):
        return value
    match = re.fullmatch(_NUMBER + r"([a-zA-Z]*)", value.strip())
    if match is None or match[2] not in units:
        raise ValueError(f"{name}={in_error(value)} is no {what}")
    return float(match[1]) * units[match[2]]

"""Numbers as people read them."""

import math
from collections.abc import Callable, Iterable

from palsgd.lab.judging.interval import Interval

GAP = "\N{NO-BREAK SPACE}"
NONE = "\N{EN DASH}"  # for what is not known
MINUS = "\N{MINUS SIGN}"  # as wide as a digit


def number(value: float | None, digits: int = 4) -> str:
    if value is None:
        return NONE
    if not math.isfinite(value):
        return str(value)
    return f"{value:,.{digits}f}" if abs(value) < 100 else f"{value:,.1f}"


def interval(found: Interval, shown: "Callable[[float | None], str] | None" = None) -> str:
    """The bounds; nothing where there are none."""
    if found.n < 2 or math.isnan(found.low) or math.isinf(found.low):
        return ""
    text = shown or number
    return f"[{text(found.low)}, {text(found.high) if math.isfinite(found.high) else 'no bound'}]"


def times(found: Interval) -> str:
    """A speed-up."""
    bounds = interval(found, lambda value: f"{value:.3g}")
    return f"{found.value:.3g} x{f' {bounds}' if bounds else ''}"


def short(value: float) -> float | None:
    """Six digits, for the page's script; counts stay whole, and JSON has no inf and nan."""
    value = float(value)
    if not math.isfinite(value):
        return None
    return int(value) if value.is_integer() else float(f"{value:.6g}")


def seeds(counts: Iterable[int]) -> str:
    """How many there are, where groups may have different numbers."""
    known = sorted(set(counts))
    span = str(known[0]) if len(known) == 1 else f"{known[0]} to {known[-1]}"
    return f"n = {span} seed{'s' if known[-1] > 1 else ''}"


def count(value: float | None) -> str:
    return NONE if value is None else f"{value:,.0f}"


def small(value: float | None) -> str:
    return NONE if value is None else f"{value:.1e}"


def percent(share: float | None) -> str:
    if share is None or not math.isfinite(share):
        return NONE
    return f"{100 * share:.1f}{GAP}%".replace("-", MINUS)


def seconds(value: float | None) -> str:
    if value is None:
        return NONE
    divisor, unit = time_unit(value)
    number = f"{value / divisor:,.3g}" if value < 100 else f"{value / divisor:,.1f}"
    return number + GAP + unit


def time_unit(largest: float) -> tuple[float, str]:
    if largest < 600:
        return 1.0, "s"
    return (60.0, "min") if largest < 3 * 3600 else (3600.0, "h")


def size(value: float | None) -> str:
    """Bytes, in powers of a thousand."""
    if value is None:
        return NONE
    for unit in ("B", "kB", "MB", "GB", "TB"):
        if abs(value) < 999.5 or unit == "TB":
            break
        value /= 1000
    return f"{value:.3g}{GAP}{unit}"

"""Checks of arguments. Each says what was wrong, the value it got, and what to give instead.

NumPy's numbers are registered as `Integral` and `Real`, so they pass, and the command line, which
checks settings, need not import numpy.
"""

import math
import sys
import warnings
from collections.abc import Sequence
from numbers import Integral, Real
from pathlib import Path
from typing import Any


def warn(text: str) -> None:
    """Warn at the line of the user's code that led here, which is what a warning shows."""
    frame, level, here = sys._getframe(1), 1, str(Path(__file__).parent)
    while frame.f_back is not None and frame.f_code.co_filename.startswith(here):
        frame, level = frame.f_back, level + 1
    warnings.warn(text, stacklevel=level + 1)


def shown(value: Any, most: int = 80) -> str:
    """A value as errors show it: in one line, cut where it is long. A whole number of thousands of
    digits and an object whose repr fails are shown by their type."""
    try:
        text = " ".join(repr(value).split())
    except Exception:  # of a user's own class
        text = f"<{type(value).__name__}>"
    return text if len(text) <= most else f"{text[: most - 3]}..."


def check_text(name: str, value: Any) -> str:
    """`value` if it is text that files and other programs can hold; else a ValueError."""
    if not isinstance(value, str):
        raise ValueError(f"{name}={shown(value)} must be text")
    try:
        value.encode()
    except UnicodeEncodeError:
        whole = False
    else:
        whole = "\0" not in value
    if not whole:
        raise ValueError(f"{name}={shown(value)} has characters that are no text; leave them out")
    return value


def check_int(name: str, value: Any, *, least: int = 0) -> int:
    """`value` as an int, or a ValueError that says what it must be."""
    if isinstance(value, bool) or not isinstance(value, Integral) or value < least:
        raise ValueError(f"{name}={value!r} must be a whole number >= {least}")
    return int(value)


def check_number(
    name: str,
    value: Any,
    words: str,
    *,
    low: float = -math.inf,
    high: float = math.inf,
    shown: Any = None,
) -> float:
    """`value` if it lies strictly between `low` and `high`; else a ValueError with the range.

    `words` names the range, and `shown` is what the user wrote where `value` was parsed from it.
    """
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not (number and low < value < high):
        raise ValueError(f"{name}={value if shown is None else shown!r} must be {words}")
    return float(value)


def below(number: float) -> float:
    """The next smaller float: as a strict lower limit it lets `number` itself pass."""
    return math.nextafter(number, -math.inf)


def check_choice(name: str, value: Any, choices: Sequence[str]) -> None:
    if value not in choices:
        raise ValueError(f"{name}={value!r} is unknown; use one of {', '.join(map(repr, choices))}")


def check_mix_prob(mix_prob: float) -> None:
    if not (isinstance(mix_prob, Real) and 0 <= mix_prob < 1):
        raise ValueError(
            f"mix_prob={mix_prob!r} must be a number in [0, 1): the share of steps that mix; "
            "use 0 for DiLoCo, 0.05 to 0.1 for PALSGD"
        )


def check_mix_rate(mix_rate: float) -> None:
    if not (isinstance(mix_rate, Real) and 0 <= mix_rate < math.inf):
        raise ValueError(f"mix_rate={mix_rate!r} must be a finite number >= 0")


def check_pull(pull: float) -> None:
    if not (isinstance(pull, Real) and 0 <= pull <= 1):
        raise ValueError(
            f"pull={pull!r} must be a number in [0, 1]: the share of a round's displacement that "
            "its mixing steps take back; use about 0.5"
        )

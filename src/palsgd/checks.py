"""Checks of arguments. Each says what was wrong, the value it got, and what to give instead.

NumPy's numbers are registered as `Integral` and `Real`, so they pass, and the command line, which
checks settings, need not import numpy.
"""

import difflib
import math
import sys
import warnings
from collections.abc import Iterable, Sequence
from numbers import Integral, Real
from pathlib import Path
from typing import Any

LARGEST = 2**63 - 1  # of whole numbers, which other programs and torch must be able to hold


def warn(text: str) -> None:
    """Warn at the line of the user's code that led here, which is what a warning shows."""
    frame, level, here = sys._getframe(1), 1, str(Path(__file__).parent)
    while frame.f_back is not None and frame.f_code.co_filename.startswith(here):
        frame, level = frame.f_back, level + 1
    warnings.warn(text, stacklevel=level + 1)


def in_error(value: Any, most: int = 80) -> str:
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
        raise ValueError(f"{name}={in_error(value)} must be text")
    try:
        value.encode()
    except UnicodeEncodeError:
        whole = False
    else:
        whole = "\0" not in value
    if not whole:
        raise ValueError(
            f"{name}={in_error(value)} has characters that are no text; leave them out"
        )
    return value


def check_path(name: str, value: Any) -> Path:
    """`value`, a path or text, as a path that a file can have; else a ValueError."""
    return Path(check_text(name, str(value) if isinstance(value, Path) else value))


def check_int(name: str, value: Any, *, least: int = 0) -> int:
    """`value` as an int, or a ValueError that says what it must be."""
    if not is_whole(value) or value < least:
        raise ValueError(f"{name}={in_error(value)} must be a whole number >= {least}")
    if value > LARGEST:
        raise ValueError(f"{name}={in_error(value)} must be a whole number <= {LARGEST}")
    return int(value)


def is_whole(value: Any) -> bool:
    """Is it a whole number, of Python or NumPy? True and False are none."""
    return isinstance(value, Integral) and not isinstance(value, bool)


def as_number(value: Any) -> float:
    """A number of Python or NumPy as a float; nan for anything else, True and False included."""
    if not isinstance(value, Real) or isinstance(value, bool):
        return math.nan
    try:
        return float(value)
    except OverflowError:  # a whole number of more than 300 digits
        return math.copysign(math.inf, 1 if value > 0 else -1)


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
    number = as_number(value)
    if not low < number < high:
        given = value if shown is None else shown
        raise ValueError(f"{name}={in_error(given)} must be {words}")
    return number


def below(number: float) -> float:
    """The next smaller float: as a strict lower limit it lets `number` itself pass."""
    return math.nextafter(number, -math.inf)


def check_choice(name: str, value: Any, choices: Sequence[str]) -> None:
    if not isinstance(value, str) or value not in choices:
        known = ", ".join(map(repr, choices))
        raise ValueError(f"{name}={in_error(value)} is unknown; use one of {known}")


def check_flag(name: str, value: Any) -> bool:
    if not isinstance(value, bool):
        raise ValueError(f"{name}={in_error(value)} is neither True nor False; use {name}=True")
    return value


def check_function(name: str, value: Any, example: str) -> None:
    if not callable(value):
        raise ValueError(f"{name}={in_error(value)} cannot be called; give a function: {example}")


def nearest(word: str, known: Iterable[str]) -> str:
    """The known name that is most like a word. Of a long word only the beginning is compared."""
    (found,) = difflib.get_close_matches(word[:60], list(known), n=1, cutoff=0.0)
    return found


def check_mix_prob(mix_prob: Any) -> None:
    if not 0 <= as_number(mix_prob) < 1:
        raise ValueError(
            f"mix_prob={in_error(mix_prob)} must be a number in [0, 1): the share of steps that "
            "mix; use 0 for DiLoCo, 0.05 to 0.1 for PALSGD"
        )


def check_mix_rate(mix_rate: Any) -> None:
    if not 0 <= as_number(mix_rate) < math.inf:
        raise ValueError(f"mix_rate={in_error(mix_rate)} must be a finite number >= 0")


def check_pull(pull: Any) -> None:
    if not 0 <= as_number(pull) <= 1:
        raise ValueError(
            f"pull={in_error(pull)} must be a number in [0, 1]: the share of a round's "
            "displacement that its mixing steps take back; use about 0.5"
        )

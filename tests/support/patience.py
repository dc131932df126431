"""One factor for all time limits of the tests, because a slow machine needs longer for them all."""

import math
import os

NAME = "PALSGD_TEST_PATIENCE"


def factor() -> float:
    """What the environment asks for; 1 means the limits as they are written."""
    given = os.environ.get(NAME, "1")
    try:
        value = float(given)
    except ValueError:
        value = math.nan
    if not 0 < value < math.inf:
        raise ValueError(f"{NAME}={given!r} must be a finite number above 0; 3 triples all limits")
    return value


def patient(seconds: float) -> float:
    """A time limit, as long as the environment wants it."""
    return seconds * factor()

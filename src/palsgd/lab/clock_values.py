"""Settings that change with the clock, as text.

`0:16,1000:8` is 16, and 8 from step 1000 on; `cosine:0.5..0` (or `linear:`) goes from 0.5 at the
first step to 0 at the last one; `qsr:16:0.05`, for sync_every, is max(16, (0.05 / lr)^2) steps.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

from palsgd.checks import as_given

SHAPES: dict[str, Callable[[float], float]] = {
    "linear": lambda done: done,
    "cosine": lambda done: 0.5 - 0.5 * math.cos(math.pi * done),
}
EXAMPLES = "a number, 0:16,1000:8 or cosine:0.5..0"


@dataclass(frozen=True)
class Pieces:
    """A number that changes at given steps: (step, value from then on), the first from step 0."""

    pieces: tuple[tuple[int, float], ...]

    @property
    def values(self) -> tuple[float, ...]:
        return tuple(value for _, value in self.pieces)

    def at(self, clock: int, steps: int) -> float:
        return next(value for start, value in reversed(self.pieces) if clock >= start)


@dataclass(frozen=True)
class Course:
    """A number that goes from `first` to `last` over the run."""

    shape: str
    first: float
    last: float

    @property
    def values(self) -> tuple[float, ...]:
        """The extremes; all others lie between them."""
        return self.first, self.last

    def at(self, clock: int, steps: int) -> float:
        done = SHAPES[self.shape](min(1.0, clock / max(1, steps - 1)))
        return self.first + (self.last - self.first) * done


@dataclass(frozen=True)
class QSR:
    """The quadratic synchronization rule: H = max(base, (alpha / lr)^2), rounded down, so that
    workers sync less often as the learning rate falls."""

    base: int
    alpha: float

    @property
    def values(self) -> tuple[float, ...]:
        return (self.base,)

    def length(self, lr: float, most: int) -> int:
        """H at a learning rate. `most`, the steps that are left, bounds what a rate of 0 asks."""
        asked = (self.alpha / lr) ** 2 if lr > 0 else math.inf
        return max(self.base, int(min(asked * (1 + 1e-9), most)))  # (0.3 / 0.1)^2 is 9, not 8.99...


def parse(name: str, text: str) -> Pieces | Course | QSR:
    """The value of the setting `name` from text, or a ValueError that shows the forms."""
    kind, _, rest = text.partition(":")
    try:
        if kind in SHAPES and name != "sync_every":
            first, last = rest.split("..")
            return Course(kind, float(first), float(last))
        if kind == "qsr" and name == "sync_every":
            base, alpha = rest.split(":")
            if 0 < float(alpha) < math.inf:
                return QSR(int(base), float(alpha))
        pairs = [each.split(":") for each in text.split(",")]
        number = int if name == "sync_every" else float
        pieces = tuple((int(start), number(value)) for start, value in pairs)
    except ValueError:
        pieces = ()
    starts = [start for start, _ in pieces]
    if not starts or starts[0] != 0 or sorted(set(starts)) != starts:
        forms = "a whole number, auto, 0:16,1000:64 or qsr:16:0.05"
        raise ValueError(
            f"{name}={as_given(text)} is no number and does not say how one changes; give "
            f"{forms if name == 'sync_every' else EXAMPLES} (steps from 0 on, each later than the "
            "one before)"
        )
    return Pieces(pieces)


def function_of_clock(name: str, text: str, steps: int) -> Callable[[int], float]:
    """The text as the library takes it. The function's name is the text, as workers and saved
    states compare functions by their names."""
    found = parse(name, text)
    assert not isinstance(found, QSR)

    def value(clock: int) -> float:
        return found.at(clock, steps)

    value.__qualname__ = text
    return value


def separated(text: str) -> list[str]:
    """The values of a list such as `8,0:16,1000:8,cosine:1..0`. A piece that begins at a later step
    than 0 belongs to the value before it."""
    found: list[str] = []
    for each in text.split(","):
        start, sign, _ = each.partition(":")
        if found and sign and start.isdigit() and int(start) > 0:
            found[-1] += f",{each}"
        else:
            found.append(each)
    return found

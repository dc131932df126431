"""Words for what was measured. All statements of a run are judged together: the probability that
any word is wrong is at most LEVEL (Bonferroni: LEVEL is shared out evenly among the statements)."""

import math
from dataclasses import dataclass

from palsgd.theory.fits import Measured

LEVEL = 0.05
UNDECIDED = "undecided"
_MOST_SEEDS = 10_000_000  # more are as good as none


@dataclass(frozen=True)
class Family:
    """The statements that are judged together."""

    statements: int

    @property
    def doubt(self) -> float:
        """The probability with which a single word may be wrong."""
        return LEVEL / self.statements


@dataclass(frozen=True)
class Words:
    """For a value whose interval lies below another, within a margin around it, or above it."""

    below: str
    within: str
    above: str


@dataclass(frozen=True)
class Verdict:
    word: str
    half: float = 0.0  # of the interval that was judged
    seeds: int | None = None  # about so many would decide; None: decided, or no number would

    @property
    def decided(self) -> bool:
        return self.word != UNDECIDED

    def __str__(self) -> str:
        if self.decided:
            return self.word
        if self.seeds is None:
            return f"{self.word} (nearly equal)"
        return f"{self.word} (about {self.seeds:,} seeds would decide)"


def judged(
    measured: Measured, claimed: float, margin: float, words: Words, family: Family, seeds: int
) -> Verdict:
    """Within, if the whole interval is nearer to `claimed` than the margin; else below or above, if
    `claimed` is outside the interval. `seeds`: the number that the measurement stands for."""
    half = measured.half(family.doubt)
    miss = measured.mean - claimed
    if not math.isfinite(half + miss):
        return Verdict(UNDECIDED, half)
    if abs(miss) + half < margin:
        return Verdict(words.within, half)
    if abs(miss) > half:
        return Verdict(words.below if miss < 0 else words.above, half)
    # An interval of this half would decide, if the value stays where it is.
    needed = max(abs(miss), margin - abs(miss))
    return Verdict(UNDECIDED, half, enough(seeds, half / needed))


def enough(seeds: int, factor: float) -> int | None:
    """Seeds for an interval that is `factor` times narrower, rounded up to two digits."""
    if not factor**2 * seeds < _MOST_SEEDS:
        return None
    needed = max(seeds + 1, math.ceil(seeds * factor**2))
    unit = 10 ** max(0, len(str(needed)) - 2)
    return math.ceil(needed / unit) * unit

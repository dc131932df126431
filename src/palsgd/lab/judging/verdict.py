"""Words for a difference: from its interval, and from a margin that is stated before the runs."""

import math
from dataclasses import dataclass
from enum import StrEnum

from palsgd.lab.judging.interval import Interval


class Word(StrEnum):
    BETTER = "better"
    WORSE = "worse"
    EQUIVALENT = "equivalent"
    UNDECIDED = "undecided"


@dataclass(frozen=True)
class Verdict:
    word: Word
    difference: Interval  # relative; above zero: worse
    margin: float
    seeds_needed: int | None = None  # that would decide it; None: decided, or nobody can say


def judge(difference: Interval, margin: float) -> Verdict:
    """`difference` is relative to the opponent, and above zero where it is worse.

    equivalent: the whole interval lies within the margin.
    better, worse: the whole interval lies on one side of zero.
    undecided: neither.
    """
    if margin <= 0:
        raise ValueError(f"margin={margin:g} allows no difference at all; give one above 0")
    if not difference.known:
        return Verdict(Word.UNDECIDED, difference, margin, None)
    if -margin < difference.low and difference.high < margin:
        return Verdict(Word.EQUIVALENT, difference, margin)
    if difference.high < 0:
        return Verdict(Word.BETTER, difference, margin)
    if difference.low > 0:
        return Verdict(Word.WORSE, difference, margin)
    return Verdict(Word.UNDECIDED, difference, margin, seeds_that_decide(difference, margin))


def seeds_that_decide(difference: Interval, margin: float) -> int | None:
    """How many pairs of seeds find a difference of the margin with 95% confidence and a power of
    80%: n = ((1.96 + 0.84) s / margin)^2, with s the deviation between pairs. At least one more
    than there were, since those did not decide."""
    if not math.isfinite(difference.deviation):
        return None
    return max(difference.n + 1, math.ceil((2.8 * difference.deviation / margin) ** 2))

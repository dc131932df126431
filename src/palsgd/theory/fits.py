"""Means with their standard errors, ratios of paired means, and the exponents of lines."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from statistics import NormalDist

import numpy as np
from torch import Tensor

_POINTWISE = 0.05  # the doubt of an interval that is shown and not judged


@lru_cache
def reach(doubt: float, freedom: float) -> float:
    """How many standard errors a mean is off with probability `doubt`, to either side: Student's t
    for whole degrees of freedom, the normal distribution for infinitely many."""
    if math.isinf(freedom):
        return NormalDist().inv_cdf(1 - doubt / 2)
    low, high = 0.0, 1.0
    while _outside(high, int(freedom)) > doubt:
        low, high = high, 2 * high
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if _outside(middle, int(freedom)) > doubt else (low, middle)
    return high


def _outside(t: float, freedom: int) -> float:
    """The probability of |t| or more. With x = t / sqrt(freedom) = tan(angle), the density is a
    power of cos(angle), whose integral is a finite sum."""
    angle, odd = math.atan(t / math.sqrt(freedom)), freedom % 2
    cosine, total = math.cos(angle), 0.0
    term = cosine if odd else 1.0
    for k in range(1 + odd, freedom, 2):
        total += term
        term *= cosine**2 * k / (k + 1)
    inside = math.sin(angle) * total
    return 1 - (2 / math.pi * (angle + inside) if odd else inside)


@dataclass(frozen=True)
class Measured:
    """A mean. What is known exactly has the error 0."""

    mean: float
    error: float = 0.0  # standard error
    freedom: float = math.inf  # degrees of freedom of the error

    @classmethod
    def of(cls, values: Tensor, fitted: int = 0) -> "Measured":
        """One value per run; `fitted` numbers were chosen so that the values spread the least."""
        freedom = len(values) - 1 - fitted
        spread = values.std().item() * math.sqrt((len(values) - 1) / freedom)
        return cls(values.mean().item(), spread / math.sqrt(len(values)), freedom)

    def half(self, doubt: float = _POINTWISE) -> float:
        """Half the confidence interval."""
        return reach(doubt, self.freedom) * self.error if self.error else 0.0

    def scaled(self, factor: float) -> "Measured":
        return Measured(self.mean * factor, self.error * abs(factor), self.freedom)


def paired_ratio(values: Tensor, others: Tensor, fitted: int = 0) -> Measured:
    """The mean of `values` divided by that of `others`. A run has the same chance in both, and what
    they share does not widen the interval."""
    ratio = values.mean() / others.mean()
    errors = Measured.of((values - ratio * others) / others.mean(), fitted)
    return Measured(ratio.item(), errors.error, errors.freedom)


def power_law(x: Sequence[float], measured: Sequence[Measured]) -> Measured:
    """The exponent b of y = a x^b."""
    return straight_line(np.log(x), measured)


def straight_line(x: Sequence[float] | np.ndarray, measured: Sequence[Measured]) -> Measured:
    """The slope of ln y, by least squares with each point's own error.

    If the points lie further from the line than their errors explain, the line is not exactly the
    law, and the error is larger by the same factor. Of the points' degrees of freedom the fewest
    count, which is on the safe side.
    """
    at = np.asarray(x, dtype=float)
    mean = np.array([each.mean for each in measured])
    error = np.array([each.error for each in measured])
    # A thousandth at least: where runs agree to rounding, points would have weights without end.
    weight = (np.maximum(error / mean, 1e-3)) ** -2.0
    middle = np.average(at, weights=weight)
    spread = (weight * (at - middle) ** 2).sum()
    y = np.log(mean)
    slope = (weight * (at - middle) * y).sum() / spread
    off = y - np.average(y, weights=weight) - slope * (at - middle)
    surplus = (weight * off**2).sum() / (len(at) - 2) if len(at) > 2 else 1.0
    freedom = min(each.freedom for each in measured)
    return Measured(float(slope), float(math.sqrt(max(1.0, surplus) / spread)), freedom)

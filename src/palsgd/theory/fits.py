"""Means with their confidence, and the exponents that lines through them have."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from torch import Tensor

SIGMAS = 1.959964  # of a normal distribution, for 95 %


@dataclass(frozen=True)
class Measured:
    mean: float
    half: float  # of the 95 % confidence interval

    @classmethod
    def of(cls, values: Tensor) -> "Measured":
        """One value per run."""
        error = values.std().item() / math.sqrt(len(values))
        return cls(values.mean().item(), quantile(len(values) - 1) * error)


def quantile(freedom: int) -> float:
    """Student's t for 95 %, by its expansion around the normal distribution: 1 % short at 5 degrees
    of freedom, exact to rounding at hundreds."""
    z = SIGMAS
    first = (z**3 + z) / 4
    second = (5 * z**5 + 16 * z**3 + 3 * z) / 96
    return z + first / freedom + second / freedom**2


@dataclass(frozen=True)
class Fit:
    slope: float
    half: float  # of the 95 % confidence interval
    points: int


def power_law(x: Sequence[float], measured: Sequence[Measured]) -> Fit:
    """The exponent b of y = a x^b."""
    return straight_line(np.log(x), measured)


def straight_line(x: Sequence[float] | np.ndarray, measured: Sequence[Measured]) -> Fit:
    """The slope of ln y, by least squares with each point's own error.

    If the points lie further from the line than their errors explain, the line is not exactly the
    law, and the interval is widened by the same factor.
    """
    at = np.asarray(x, dtype=float)
    mean = np.array([each.mean for each in measured])
    half = np.array([each.half for each in measured])
    # A thousandth at least: where runs agree to rounding, points would have weights without end.
    weight = (np.maximum(half / SIGMAS / mean, 1e-3)) ** -2.0
    middle = np.average(at, weights=weight)
    spread = (weight * (at - middle) ** 2).sum()
    y = np.log(mean)
    slope = (weight * (at - middle) * y).sum() / spread
    off = y - np.average(y, weights=weight) - slope * (at - middle)
    surplus = (weight * off**2).sum() / (len(at) - 2) if len(at) > 2 else 1.0
    return Fit(float(slope), float(SIGMAS * math.sqrt(max(1.0, surplus) / spread)), len(at))

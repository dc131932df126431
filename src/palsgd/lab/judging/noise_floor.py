"""How far a program is ahead of itself, by the chance of seeds alone."""

import math
from itertools import combinations

import numpy as np

from palsgd.lab.judging.quality_curve import QualityCurve, bounds, crossing
from palsgd.lab.judging.speedup import SpeedUp

MOST_SPLITS = 500


def noise_floor(curve: QualityCurve, axis: str, levels: np.ndarray) -> SpeedUp:
    """The speed-up of one half of a program's seeds against the other, over all splits into halves;
    the truth is 1. A method whose line stays inside the band may owe that to its seeds. The band is
    nan with one seed, and at levels that some half never reaches."""
    n = len(curve.seeds)
    ones, unknown = np.ones(len(levels)), np.full(len(levels), np.nan)
    if n < 2:
        return SpeedUp(levels, ones, unknown, unknown, n)
    halves = _halves(n)
    rests = np.array([[seed for seed in range(n) if seed not in half] for half in halves])
    spent = [crossing(curve.mean(rows), curve.costs[axis], levels) for rows in (halves, rests)]
    with np.errstate(divide="ignore", invalid="ignore"):
        ratios = np.concatenate([spent[0] / spent[1], spent[1] / spent[0]])
    band = np.array([_band(column) for column in ratios.T])
    return SpeedUp(levels, ones, band[:, 0], band[:, 1], n)


def _halves(n: int) -> np.ndarray:
    """Rows of seeds: every half of them, or, where there are too many, some that are drawn; always
    the same ones."""
    if math.comb(n, n // 2) <= MOST_SPLITS:
        return np.array(list(combinations(range(n), n // 2)))
    random = np.random.default_rng(n)
    return np.array([random.permutation(n)[: n // 2] for _ in range(MOST_SPLITS)])


def _band(ratios: np.ndarray) -> tuple[float, float]:
    known = np.isfinite(ratios) & (ratios > 0)
    return bounds(ratios) if known.all() else (np.nan, np.nan)

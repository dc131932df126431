"""Speed-up against quality: for every level, what the baseline spent divided by what a method
spent, with a band. It replaces one accidental target, and shows where a method stops."""

from dataclasses import dataclass

import numpy as np

from palsgd.lab.judging.quality_curve import DRAWS, QualityCurve, bounds, crossing, resampled


@dataclass(frozen=True, eq=False)
class SpeedUp:
    """At `levels`, from poor to good: above 1 the method is ahead. nan where one of the two never
    reaches a level; the band is nan with one seed. It begins at 0 where in some draws of the seeds
    the method never arrives, and has no end where in some the baseline never does."""

    levels: np.ndarray
    ratio: np.ndarray
    low: np.ndarray
    high: np.ndarray
    pairs: int


def speed_up(
    baseline: QualityCurve,
    method: QualityCurve,
    axis: str,
    levels: np.ndarray,
    *,
    draws: int = DRAWS,
    noise: "tuple[np.ndarray, np.ndarray] | None" = None,
) -> SpeedUp:
    """`noise`: factors of the two costs, one per draw, where the cost itself is uncertain, as
    measured seconds per step are."""
    seeds = [seed for seed in method.seeds if seed in baseline.seeds]
    if not seeds:
        raise ValueError(
            f"seeds {method.seeds} and {baseline.seeds} have none in common; run both with the same"
        )
    rows = _rows(baseline, seeds), _rows(method, seeds)

    def ratio(chosen: np.ndarray) -> np.ndarray:
        """Whoever never arrives spends without end; where neither does, nan."""
        spent = [
            crossing(curve.mean(row[chosen]), curve.costs[axis], levels)
            for curve, row in zip((baseline, method), rows, strict=True)
        ]
        base, own = (np.where(np.isnan(each), np.inf, each) for each in spent)
        with np.errstate(divide="ignore", invalid="ignore"):
            return base / own

    n = len(seeds)
    found = ratio(np.arange(n))
    found = np.where(np.isfinite(found) & (found > 0), found, np.nan)
    if n < 2:
        unknown = np.full(len(levels), np.nan)
        return SpeedUp(levels, found, unknown, unknown, n)
    drawn = ratio(resampled(n, draws))
    if noise is not None:
        drawn = drawn * (noise[0] / noise[1])[:, None]
    band = np.array([_band(column, value) for column, value in zip(drawn.T, found, strict=True)])
    return SpeedUp(levels, found, band[:, 0], band[:, 1], n)


def _band(drawn: np.ndarray, value: float) -> tuple[float, float]:
    """Draws in which neither arrives say nothing about who is ahead."""
    known = drawn[~np.isnan(drawn)]
    if np.isnan(value) or not len(known):
        return np.nan, np.nan
    return bounds(known)


def _rows(curve: QualityCurve, seeds: list[int]) -> np.ndarray:
    return np.array([curve.seeds.index(seed) for seed in seeds])


def levels_between(worst: float, best: float, count: int = 60) -> np.ndarray:
    """Levels from poor to the best itself, denser towards the good end, where the questions are."""
    return best + (worst - best) * np.append(np.geomspace(1.0, 0.001, count - 1), 0.0)

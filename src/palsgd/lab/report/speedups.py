"""Speed-ups against quality, as lines: what the baseline spends until it is at a level, divided by
what a method spends."""

from dataclasses import dataclass, replace

import numpy as np

from palsgd.lab.comparison import Comparison
from palsgd.lab.groups import Group
from palsgd.lab.judging.noise_floor import noise_floor
from palsgd.lab.judging.quality_curve import QualityCurve
from palsgd.lab.judging.speedup import SpeedUp, levels_between, speed_up
from palsgd.lab.report.curves import Curve

FIRST_PART = 0.05  # of the baseline's steps, whose levels nobody asks for


@dataclass(frozen=True)
class SpeedLine:
    group: Group
    curve: Curve  # x is the level, in the unit that is shown
    stops: bool  # it does not reach what the baseline reaches


class QualityUnit:
    """How levels of the judged quality are shown: a share of which more is better as an error."""

    def __init__(self, comparison: Comparison):
        quality, curves = comparison.quality, map(comparison.curve, comparison.groups)
        values = [curve.values[np.isfinite(curve.values)] for curve in curves if curve is not None]
        every = np.concatenate([np.zeros(0), *values])
        share = bool(np.all((every <= 0) & (every >= -1)))
        self.is_error = quality.higher_is_better and share
        self.name = f"error (1 - {quality.name})" if self.is_error else quality.name
        self.falling = self.is_error or not quality.higher_is_better
        self._sign = 1 if self.falling else -1
        self._shift = 1.0 if self.is_error else 0.0

    def shown(self, level: np.ndarray) -> np.ndarray:
        """From a level of which less is better."""
        return self._shift + self._sign * level


def speed_lines(
    comparison: Comparison, groups: list[Group], axis: str, unit: QualityUnit
) -> list[SpeedLine]:
    """Those of the groups that have a baseline, and seeds and seconds in common with it."""
    found = []
    for group in groups:
        base = comparison.baseline(group)
        if base is None or base is group or comparison.same_programs.get(group) is base:
            continue
        own, other = comparison.curve(group), comparison.curve(base)
        if own is None or other is None or not _comparable(own, other, axis):
            continue
        levels = _levels(other, own)
        if len(levels):
            noise = _noise(comparison, base, group) if axis == "time_s" else None
            line = speed_up(other, own, axis, levels, noise=noise)
            stops = bool(np.isnan(line.ratio[-1]))
            early = comparison.in_warmup(group, levels)  # when it is no other method yet
            line = replace(line, ratio=np.where(early, np.nan, line.ratio))
            if np.isfinite(line.ratio).any():
                found.append(SpeedLine(group, _curve(line, unit), stops))
    return found


def noise_line(
    comparison: Comparison, base: Group, axis: str, levels: np.ndarray, unit: QualityUnit
) -> Curve | None:
    """The baseline against itself, where it has several seeds. `levels` are in the unit shown."""
    curve = comparison.curve(base)
    if curve is None or axis not in curve.costs or len(curve.seeds) < 2:
        return None
    wanted = _levels(curve, curve)
    if not len(wanted):
        return None
    band = _curve(noise_floor(curve, axis, wanted), unit)
    inside = (band.x["level"] >= levels.min()) & (band.x["level"] <= levels.max())
    kept = inside & np.isfinite(band.low)
    if not kept.any():
        return None
    return Curve(
        {"level": band.x["level"][kept]}, band.mean[kept], band.low[kept], band.high[kept], band.n
    )


def _comparable(own: QualityCurve, other: QualityCurve, axis: str) -> bool:
    return (
        axis in own.costs
        and axis in other.costs
        and bool(set(own.seeds) & set(other.seeds))
        and bool(own.costs[axis][-1] > 0 and other.costs[axis][-1] > 0)
    )


def _levels(other: QualityCurve, own: QualityCurve) -> np.ndarray:
    """From what the baseline reaches in its first part, or where both have been evaluated, to the
    best that it reaches; none where it reaches nothing more."""
    mean, steps = other.mean(), other.costs["step"]
    best = float(mean[-1])
    early = np.interp(FIRST_PART * steps[-1], steps, mean)
    firsts = [each[np.isfinite(each)][:1] for each in (mean, own.mean(), np.array([early]))]
    worst = min((float(first[0]) for first in firsts if len(first)), default=best)
    return levels_between(worst, best) if np.isfinite(best) and worst > best else np.zeros(0)


def _noise(comparison: Comparison, base: Group, own: Group) -> tuple[np.ndarray, np.ndarray]:
    """Of measured seconds, at the end of the runs; a warm-up's seconds are as uncertain as those
    behind it, near enough for a band."""
    found = []
    for group in (base, own):
        pace, curve = comparison.paces[group], comparison.curve(group)
        assert pace is not None
        assert curve is not None
        found.append(pace.factors(float(curve.costs["step"][-1])))
    return found[0], found[1]


def _curve(found: SpeedUp, unit: QualityUnit) -> Curve:
    kept = np.isfinite(found.ratio)
    levels, ratio = unit.shown(found.levels[kept]), found.ratio[kept]
    low, high = found.low[kept], found.high[kept]
    if found.pairs < 2:
        low, high = ratio, ratio
    return Curve({"level": levels}, ratio, low, high, found.pairs)

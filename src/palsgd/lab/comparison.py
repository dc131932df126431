"""Runs beside each other: what each setting ends with, and what it spends to reach a quality."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from statistics import fmean
from typing import Any

import numpy as np

from palsgd.lab.controls import Recipe, find_controls
from palsgd.lab.groups import Group
from palsgd.lab.judging.interval import Interval, of_mean, relative_difference
from palsgd.lab.judging.quality_curve import DRAWS, QualityCurve, Reached, crossing, reach
from palsgd.lab.judging.speedup import speed_up
from palsgd.lab.judging.verdict import Verdict, judge
from palsgd.lab.run_folder import Run
from palsgd.lab.targets import (
    Quality,
    Target,
    baseline_target,
    end_target,
    margin_of,
    stated_target,
)
from palsgd.lab.timing.pace import Pace
from palsgd.lab.timing.paces import paces
from palsgd.lab.twins import Twin, twins
from palsgd.lab.worker_changes import examples_seen

AXES = ("step", "gradient_steps", "examples", "bytes_sent", "time_s")
_TOTALS = (
    "steps", "gradient_steps", "examples", "syncs", "wall_s", "waiting_s", "sync_s", "bytes_sent",
)  # fmt: skip


@dataclass(frozen=True)
class Final:
    """What a group ends with, over the seeds that finished.

    `loss`, `metric`: means with intervals. `difference`: of the judged quality from the baseline's,
    relative and paired by seed, above zero where it is worse; None for the baseline and without
    one. `verdict`: its word. `equal`: the judged quality, in its own unit, when the scale's budget
    of an axis is spent, between two evaluations by a straight line; axes that are not known are
    left out. `totals`: mean counts and seconds of whole runs; None where not known.
    """

    group: Group
    loss: Interval
    metric: Interval
    difference: Interval | None
    verdict: Verdict | None
    equal: dict[str, Interval]
    totals: dict[str, float | None]


@dataclass(frozen=True)
class ToTarget:
    """What a group spends until its mean over seeds reaches the target.

    `costs`: by axis, with intervals and the resolution of the evaluations; empty if it never is
    reached. `speed_ups`: by axis, the baseline's cost over this one's, above 1 where this one is
    ahead; none for the baseline itself, none where one of both never arrives, and none where this
    one arrives in its warm-up. `shortfall`: how far the final value is from the target, relative,
    above zero where it falls short. `steps`: the length of the runs. `in_warmup`: was it seen at
    the target before its warm-up had ended, until when it is no other method than the baseline?
    """

    group: Group
    target: Target
    costs: dict[str, Reached]
    speed_ups: dict[str, Interval]
    shortfall: Interval
    steps: float
    in_warmup: bool

    @property
    def reached(self) -> bool:
        return bool(self.costs)


class Comparison:
    """The groups of one workload beside each other.

    `groups`: as `palsgd.lab.groups.group` makes them, those of the baseline first.
    `quality`: the figure that is judged (a key of metrics.jsonl, its name, whether more is better).
    `target`: the Target, where all groups have one in common, else None; `target_of(group)` has
    that of each scale. A scale is what makes runs comparable: equal K, batch and data.
    `headline`: gain and loss over a link in one sentence; None where there is no link.
    `verdicts`: sentences with their numbers and intervals, the most important first.
    `curve(group)`: its QualityCurve (less is better: a metric of which more is better is negated),
    or None before anything was evaluated; axes are AXES, `time_s` only where seconds are known.
    `finals()`: a Final for each group of which a run has finished.
    `to_target()`: a ToTarget for each of those that has a target.
    `to_own_end(group)`: the same for what the group itself ends with, and worse by the margin.
    `to_quality(group, target)`: the same for any Target.
    `baseline(group)`: the group that it is measured against: of its scale, at its best setting.
    `budgets(group)`: by axis, the least that a group of its K and batch spent in all.
    `same_programs`: for each group that is the same program as an earlier one, that one.
    `controls`: for each group of a mixing method, the groups that are its controls, by their kind.
    `paces`: for each group its Pace, which turns steps into seconds; None where nobody knows. With
    a `link` they are projected on it.
    `twins`: the runs that real processes and the simulator both have trained.
    """

    def __init__(self, groups: list[Group], link: str | None = None):
        self.groups = groups
        self.paces: dict[Group, Pace | None] = paces(groups, link)
        self.runs = [run for group in groups for run in group.runs]
        self.quality = Quality.of(self.runs[0])
        self.margin = margin_of(groups)
        self.controls: dict[Group, dict[Recipe, Group]] = find_controls(groups)
        self.same_programs: dict[Group, Group] = _same_programs(groups)
        self.twins: list[Twin] = twins(groups)
        self._curves: dict[Group, QualityCurve | None] = {}
        self._targets: dict[tuple[Any, ...], Target | None] = {}

    # -- who is compared with whom ---------------------------------------------------------------

    def scale(self, group: Group) -> tuple[Any, ...]:
        """Groups of equal scale have one target. A control has that of what it controls, also if
        its batch is another."""
        of = (mixing for mixing, there in self.controls.items() if group in there.values())
        return _scale(next(of, group))

    @property
    def scales(self) -> list[tuple[Any, ...]]:
        return list(dict.fromkeys(map(self.scale, self.groups)))

    def baseline(self, group: Group) -> Group | None:
        best = self._baselines(self.scale(group))
        return best[0] if best else None

    def _baselines(self, scale: tuple[Any, ...]) -> list[Group]:
        """The settings of the baseline at this scale, the best final quality first."""
        there = [group for group in self.groups if group.is_baseline and _scale(group) == scale]
        known = [group for group in there if self.final_losses(group)]
        return sorted(known, key=lambda group: fmean(self.final_losses(group).values()))

    @property
    def target(self) -> Target | None:
        found = {self.target_of(group) for group in self.groups}
        return found.pop() if len(found) == 1 else None

    def target_of(self, group: Group) -> Target | None:
        scale = self.scale(group)
        if scale not in self._targets:
            self._targets[scale] = self._target_at(scale)
        return self._targets[scale]

    def _target_at(self, scale: tuple[Any, ...]) -> Target | None:
        peers = [other for other in self.groups if self.scale(other) == scale]
        stated = stated_target(peers, self.quality, self.margin)
        if stated is not None:
            return stated
        best = self._baselines(scale)
        if not best:
            return None
        final = of_mean(list(self.final_losses(best[0]).values()))
        if not np.isfinite(final.value):
            return None
        return baseline_target(best[0], final, len(best), self.quality, self.margin)

    # -- figures ---------------------------------------------------------------------------------

    def final_losses(self, group: Group) -> dict[int, float]:
        """The judged quality at the end of each finished seed; less is better."""
        found = {}
        for run in group.finished:
            if lines := self.quality.evaluated(run):
                found[run.config.get("seed", 0)] = self.quality.loss(lines[-1])
        return found

    def curve(self, group: Group) -> QualityCurve | None:
        if group not in self._curves:
            runs = group.finished or group.runs
            self._curves[group] = curve_of(runs, self.quality, self.paces[group])
        return self._curves[group]

    def budgets(self, group: Group) -> dict[str, float]:
        curves = [
            curve
            for other in self.groups
            if other.finished and _scale(other) == _scale(group)
            if (curve := self.curve(other)) is not None
        ]
        axes = [axis for axis in AXES if curves and all(axis in curve.costs for curve in curves)]
        return {axis: min(float(curve.costs[axis][-1]) for curve in curves) for axis in axes}

    def difference(self, group: Group, other: Group) -> Interval | None:
        """Of the final qualities, relative to the other's, paired; None without a common seed."""
        own, others = self.final_losses(group), self.final_losses(other)
        if not own.keys() & others.keys() or not fmean(others.values()):
            return None
        return relative_difference(own, others)

    def finals(self) -> list[Final]:
        return self._finals

    @cached_property
    def _finals(self) -> list[Final]:
        return [self._final(group) for group in self.groups if self.final_losses(group)]

    def _final(self, group: Group) -> Final:
        baseline = self.baseline(group)
        own = baseline is None or baseline is group
        difference = None if own else self.difference(group, baseline)  # type: ignore[arg-type]
        return Final(
            group=group,
            loss=of_mean(_finite(_column(group, "final_loss"))),
            metric=of_mean(_finite(_column(group, "final_metric"))),
            difference=difference,
            verdict=None if difference is None else judge(difference, self.margin),
            equal=self.at_budget(self.curve(group), self.budgets(group)),
            totals={key: _mean(_column(group, key)) for key in _TOTALS},
        )

    def at_budget(
        self, curve: QualityCurve | None, budgets: dict[str, float]
    ) -> dict[str, Interval]:
        """The quality when each budget is spent, in its own unit."""
        if curve is None:
            return {}
        sign = self.quality.sign
        return {
            axis: of_mean(
                [sign * float(np.interp(budget, curve.costs[axis], row)) for row in curve.values]
            )
            for axis, budget in budgets.items()
        }

    def to_target(self) -> list[ToTarget]:
        return self._to_targets

    @cached_property
    def _to_targets(self) -> list[ToTarget]:
        return [
            self.to_quality(group, target)
            for group in self.groups
            if group.finished and (target := self.target_of(group)) is not None
        ]

    def to_own_end(self, group: Group) -> ToTarget | None:
        """What a group that has finished spends until the quality that it ends with, for one that
        never has its baseline's. Worse by the margin, as the mean of its seeds arrives at the end
        itself only there. None: a seed has no finite end."""
        final = of_mean(list(self.final_losses(group).values()))
        if not np.isfinite(final.value):
            return None
        return self.to_quality(group, end_target(group, final, self.quality, self.margin))

    def to_quality(self, group: Group, target: Target) -> ToTarget:
        """What a group spends until a quality, beside its baseline."""
        level, finals = self.quality.sign * target.value, self.final_losses(group)
        short = [(value - level) / (abs(level) or 1.0) for value in finals.values()]
        curve, early = self.curve(group), bool(self.in_warmup(group, np.array([level]))[0])
        return ToTarget(
            group=group,
            target=target,
            costs=costs_to(curve, level, self.paces[group]),
            speed_ups={} if early else self._speed_ups(group, level),
            shortfall=of_mean(short),
            steps=0.0 if curve is None else float(curve.costs["step"][-1]),
            in_warmup=early,
        )

    def in_warmup(self, group: Group, levels: np.ndarray) -> np.ndarray:
        """For each level, of which less is better: did an evaluation in the group's warm-up see it
        there?"""
        curve, warmup = self.curve(group), group.settings.get("warmup_steps") or 0
        if curve is None or not warmup:
            return np.zeros(len(levels), dtype=bool)
        until = curve.mean()[curve.costs["step"] <= warmup]
        return until.min(initial=np.inf) <= levels

    def _speed_ups(self, group: Group, level: float) -> dict[str, Interval]:
        base = self.baseline(group)
        if base is None or base is group or self.same_programs.get(group) is base:
            return {}
        own, other = self.curve(group), self.curve(base)
        if own is None or other is None or not set(own.seeds) & set(other.seeds):
            return {}
        found = {}
        for axis in [axis for axis in AXES if axis in own.costs and axis in other.costs]:
            timed = axis == "time_s"
            noise = (
                seconds_noise(other, level, self.paces[base] if timed else None),
                seconds_noise(own, level, self.paces[group] if timed else None),
            )
            ratio = speed_up(other, own, axis, np.array([level]), noise=noise)
            if np.isfinite(ratio.ratio[0]):
                found[axis] = _interval(ratio.ratio[0], ratio.low[0], ratio.high[0], ratio.pairs)
        return found

    @cached_property
    def headline(self) -> str | None:
        from palsgd.lab.headline import headline  # it asks this class for every number

        return headline(self)

    @cached_property
    def verdicts(self) -> list[str]:
        from palsgd.lab.verdicts import sentences  # it asks this class for every number

        return sentences(self)


# -- one group -------------------------------------------------------------------------------------


def curve_of(
    runs: Sequence[Run], quality: Quality, pace: Pace | None = None
) -> QualityCurve | None:
    """The quality of runs that differ in their seed alone, at the steps that all of them have
    evaluated; costs are means over them, and seconds are those of the pace."""
    by_seed = {
        run.config.get("seed", 0): {line["step"]: line for line in quality.evaluated(run)}
        for run in runs
    }
    by_seed = {seed: lines for seed, lines in by_seed.items() if lines}
    steps = sorted(set.intersection(*map(set, by_seed.values()))) if by_seed else []
    if not steps:
        return None
    values = [[quality.loss(lines[step]) for step in steps] for lines in by_seed.values()]
    costs = {
        key: np.array([fmean(lines[step][key] for lines in by_seed.values()) for step in steps])
        for key in ("step", "gradient_steps", "bytes_sent")
    }
    costs["examples"] = examples_seen(runs[0].config, costs["gradient_steps"])
    if pace is not None:
        costs["time_s"] = np.array([pace.seconds(step) for step in steps])
    return QualityCurve(tuple(by_seed), np.array(values), costs)


def costs_to(
    curve: QualityCurve | None, level: float, pace: Pace | None = None
) -> dict[str, Reached]:
    """By axis, what was spent when the mean over seeds first was at the level; empty: never."""
    if curve is None:
        return {}
    found = {}
    for axis in [axis for axis in AXES if axis in curve.costs]:
        noise = seconds_noise(curve, level, pace if axis == "time_s" else None)
        found[axis] = reach(curve, level, axis, noise=noise)
    return {axis: reached for axis, reached in found.items() if reached is not None}


def seconds_noise(curve: QualityCurve, level: float, pace: Pace | None) -> np.ndarray:
    """Factors of the seconds to a level, one for each draw, by the chance of what was timed; ones
    where nothing was timed."""
    at = crossing(curve.mean(), curve.costs["step"], np.array([level]))[0]
    return np.ones(DRAWS) if pace is None or np.isnan(at) else pace.factors(float(at))


def _scale(group: Group) -> tuple[Any, ...]:
    names = ("workers", "batch_size", "sharding", "split", "context")
    return tuple(group.settings.get(name) for name in names)


def _same_programs(groups: list[Group]) -> dict[Group, Group]:
    """Groups whose runs were linked, or have equal evaluations line by line for every seed."""
    found: dict[Group, Group] = {}
    lines = {group: _evaluations(group) for group in groups}
    for place, group in enumerate(groups):
        for other in groups[:place]:
            if other not in found and lines[group] and lines[group] == lines[other]:
                found[group] = other
                break
    return found


def _evaluations(group: Group) -> dict[Any, list[tuple[Any, ...]]]:
    keys = ("step", "gradient_steps", "loss", "metric")
    return {
        run.config.get("seed"): [
            tuple(line.get(key) for key in keys) for line in run.lines if "metric" in line
        ]
        for run in group.finished
    }


def _interval(value: float, low: float, high: float, n: int) -> Interval:
    if n < 2:
        return Interval(float(value), -np.inf, np.inf, n, "one seed, no interval")
    return Interval(float(value), float(low), float(high), n, f"95% bootstrap over {n} seeds")


def _column(group: Group, key: str) -> list[float | None]:
    if key == "examples":
        counts = _column(group, "gradient_steps")
        config = group.runs[0].config
        return [None if c is None else float(examples_seen(config, np.array([c]))[0])
                for c in counts]  # fmt: skip
    return [run.summary.get(key) for run in group.finished if run.summary is not None]


def _finite(values: Iterable[float | None]) -> list[float]:
    return [np.inf if value is None else float(value) for value in values]


def _mean(values: list[float | None]) -> float | None:
    known = [float(value) for value in values if value is not None]
    return fmean(known) if known else None

"""Compares runs: the cost of reaching the target, and the metric at equal steps, gradients and
time. The target is the metric that DDP reached."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, variance
from typing import Any, TypeVar

from palsgd.lab.groups import Group
from palsgd.lab.methods import is_baseline
from palsgd.lab.run_folder import Line, Record, Run

COSTS = ("time_s", "step", "gradient_steps", "bytes_sent")
_TO_TARGET = {
    "steps_to_target": "step",
    "gradient_steps_to_target": "gradient_steps",
    "time_to_target_s": "time_s",
    "bytes_to_target": "bytes_sent",
}
# Fields of summary.json that need the other runs
COMPARED = ("target", *_TO_TARGET, "metric_at_equal_gradients", "metric_at_equal_time")

T = TypeVar("T")

# -- one run beside others -----------------------------------------------------------------------


def first_reaching(
    lines: Sequence[Line], target: float | None, *, higher_is_better: bool
) -> Line | None:
    """The first evaluation whose metric is the target or better."""
    if target is None:
        return None
    known = (line for line in lines if line.get("metric") is not None)
    sign = 1 if higher_is_better else -1
    return next((line for line in known if sign * line["metric"] >= sign * target), None)


def metric_within(lines: Sequence[Line], key: str, budget: float | None) -> float | None:
    """The metric at the last evaluation that did not go beyond the budget."""
    if budget is None:
        return None
    within = [line for line in lines if line.get("metric") is not None and line[key] <= budget]
    return within[-1]["metric"] if within else None


def most_alike(settings: Mapping[str, Any], others: Mapping[T, Mapping[str, Any]]) -> T | None:
    """The one of `others` that has most settings in common with these; None where there is none."""

    def likeness(other: T) -> int:
        return sum(settings.get(key) == value for key, value in others[other].items())

    return max(others, key=likeness, default=None)


def to_target(lines: Sequence[Line], target: float | None, *, higher_is_better: bool) -> Record:
    """The fields of summary.json that say what the target is and what it took to reach it."""
    reached = first_reaching(lines, target, higher_is_better=higher_is_better)
    return {"target": target} | {name: reached and reached[key] for name, key in _TO_TARGET.items()}


def compared(
    records: Mapping[str, Record],
    lines: Mapping[str, list[Line]],
    higher_is_better: bool,
    settings: Mapping[str, Mapping[str, Any]],
) -> dict[str, Record]:
    """The same records with targets (what DDP reached; where it ran several times, with the most
    alike settings) and the metric at equal gradients and equal time."""
    fewest = min(record["gradient_steps"] for record in records.values())
    shortest = min(record["wall_s"] for record in records.values())
    if len(records) == 1:  # a single run has nothing to be compared with
        fewest = shortest = None
    ddp = {name: settings[name] for name in records if is_baseline(records[name]["method"])}
    found = {}
    for name, record in records.items():
        base = most_alike(settings[name], ddp)
        target = None if base is None else records[base]["final_metric"]
        found[name] = (
            record
            | to_target(lines[name], target, higher_is_better=higher_is_better)
            | {
                "metric_at_equal_gradients": metric_within(lines[name], "gradient_steps", fewest),
                "metric_at_equal_time": metric_within(lines[name], "time_s", shortest),
            }
        )
    return found


# -- groups of runs ------------------------------------------------------------------------------


@dataclass(frozen=True)
class ToTarget:
    """What a group spent until it reached the target: means over the runs that did."""

    group: Group
    reached: int
    tried: int  # runs that finished or reached it; the others may still
    spent: dict[str, float | None]
    saved: dict[str, float | None]  # share of DDP's cost; None unless all runs reached the target


@dataclass(frozen=True)
class Final:
    """The final values of a group, over its finished runs."""

    group: Group
    loss: float | None
    loss_variance: float | None
    metric: float | None
    metric_variance: float | None
    equal: dict[str, float | None]  # the metric when `step`, `gradient_steps`, `time_s` ran out
    totals: dict[str, float | None]


class Comparison:
    """The groups of one workload beside each other."""

    def __init__(self, groups: list[Group]):
        self.groups = groups
        self.runs = [run for group in groups for run in group.runs]
        self.higher_is_better = bool(self.runs[0].config.get("higher_is_better", True))
        self.baselines = [group for group in groups if group.is_baseline and group.finished]
        self.budgets = {key: self._budget(key) for key in ("step", "gradient_steps", "time_s")}

    def target(self, run: Run) -> float | None:
        """The run's own; for one that ran alone, what DDP reached at its last evaluation here."""
        if run.summary and run.summary.get("target") is not None:
            return float(run.summary["target"])
        ddp = [other for group in self.baselines for other in group.finished if other.evaluations]
        same_seed = [other for other in ddp if other.config.get("seed") == run.config.get("seed")]
        return mean([other.evaluations[-1]["metric"] for other in same_seed or ddp])

    @property
    def targets(self) -> list[float]:
        return sorted({t for run in self.runs if (t := self.target(run)) is not None})

    def reach(self, run: Run) -> Line | None:
        """The first evaluation that reached the target."""
        return first_reaching(run.lines, self.target(run), higher_is_better=self.higher_is_better)

    def to_target(self) -> list[ToTarget]:
        spent = {group: self._spent(group) for group in self.groups}
        rows = []
        for group in self.groups:
            reached = [run for run in group.runs if self.reach(run) is not None]
            tried = [run for run in group.runs if run.finished or run in reached]
            base = self._baseline(group) if len(reached) == len(tried) else None
            ddp = spent[base] if base else {}
            own = spent[group]
            saved = {key: _saved(ddp.get(key), own[key]) for key in COSTS}
            rows.append(ToTarget(group, len(reached), len(tried), own, saved))
        return rows

    def finals(self) -> list[Final]:
        return [self._final(group) for group in self.groups if group.finished]

    def _budget(self, key: str) -> float | None:
        """The smallest final value of `key` among the finished runs."""
        return min((run.evaluations[-1][key] for run in self._ended), default=None)

    @property
    def _ended(self) -> list[Run]:
        return [run for run in self.runs if run.finished and run.evaluations]

    def _spent(self, group: Group) -> dict[str, float | None]:
        lines = [line for run in group.runs if (line := self.reach(run)) is not None]
        return {key: mean([line[key] for line in lines]) for key in COSTS}

    def _baseline(self, group: Group) -> Group | None:
        """The DDP group most like this one: of the same K where K varies."""
        return most_alike(group.settings, {ddp: ddp.settings for ddp in self.baselines})

    def _final(self, group: Group) -> Final:
        runs = group.finished
        losses, metrics = _column(runs, "final_loss"), _column(runs, "final_metric")
        keys = ("steps", "gradient_steps", "syncs", "wall_s", "waiting_s", "sync_s", "bytes_sent")
        return Final(
            group=group,
            loss=mean(losses),
            loss_variance=_variance(losses),
            metric=mean(metrics),
            metric_variance=_variance(metrics),
            equal={
                key: _mean_of_all([metric_within(run.lines, key, budget) for run in runs])
                for key, budget in self.budgets.items()
            },
            totals={key: mean(_column(runs, key)) for key in keys},
        )


def mean(values: Sequence[float]) -> float | None:
    return fmean(values) if values else None


def _column(runs: list[Run], key: str) -> list[float]:
    values = [run.summary.get(key) for run in runs if run.summary is not None]
    return [float(value) for value in values if value is not None]


def _variance(values: list[float]) -> float | None:
    """The variance of a sample, with the divisor n - 1."""
    finite = all(math.isfinite(value) for value in values)
    return variance(values) if len(values) > 1 and finite else None


def _mean_of_all(values: list[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return mean(known) if len(known) == len(values) else None


def _saved(ddp: float | None, own: float | None) -> float | None:
    return (ddp - own) / ddp if ddp and own is not None else None

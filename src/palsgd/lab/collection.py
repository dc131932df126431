"""summary.json of a collection: a record for each setting, its runs of different seeds averaged,
with intervals; the target and the verdicts beside them."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from palsgd.lab.comparison import Comparison, Final, costs_to, curve_of
from palsgd.lab.groups import Group, group
from palsgd.lab.judging.interval import of_mean
from palsgd.lab.programs import first_of_each
from palsgd.lab.run_folder import Record, Run, read_run, without_seed, write_json
from palsgd.lab.settings import Settings, setting_name
from palsgd.lab.summary import AT_EQUAL, COMPARED, TO_TARGET
from palsgd.lab.targets import Quality
from palsgd.lab.timing.pace import Pace

# Figures of a run of which a mean over seeds has an interval.
_WITH_INTERVAL = ("final_loss", "final_metric", "best_loss", "best_metric")
_NAMES = ("workers", "seed", "target")  # numbers that are no figures


def write_collection(
    runs: Mapping[str, Settings], out: Path, swept: Sequence[str] = ()
) -> dict[str, Any]:
    """Write summary.json of every run and of the collection. All runs have finished. The records
    also have the `swept` fields."""
    read = {name: read_run(out / name, name=name) for name in runs}
    comparisons = _comparisons(read)
    for name, run in read.items():
        record = _alone(run, comparisons[name], is_only=len(runs) == 1)
        run.folder.write_summary(record)
        read[name] = replace(run, summary=record)
    first = first_of_each(runs)
    found: dict[str, Any] = {}
    for point, names in _points(runs).items():
        record = _averaged([read[name] for name in names], comparisons[names[0]])
        found[point] = _swept(runs[names[0]], swept, len(names)) | record
        origin = point_of(_origin(first[names[0]], comparisons[names[0]]), runs)
        if origin != point:
            found[point]["same_as"] = origin
        else:
            found[point].pop("same_as", None)
    every = list(dict.fromkeys(comparisons.values()))
    target = every[0].target if len(every) == 1 else None
    found["target"] = None if target is None else target.as_dict()
    found["verdicts"] = [sentence for each in every for sentence in each.verdicts]
    write_json(out / "summary.json", found)
    return found


def point_of(name: str, runs: Mapping[str, Settings]) -> str:
    """The name of a run less its seed, where the runs have several seeds."""
    if len({settings.seed for settings in runs.values()}) == 1:
        return name
    return without_seed(name) or runs[name].method


def _points(runs: Mapping[str, Settings]) -> dict[str, list[str]]:
    """For each setting the names of its runs."""
    found: dict[str, list[str]] = {}
    for name in runs:
        found.setdefault(point_of(name, runs), []).append(name)
    return found


def _comparisons(runs: Mapping[str, Run]) -> dict[str, Comparison]:
    """For each run the comparison that it is in, one for each workload."""
    found: dict[str, Comparison] = {}
    for workload in dict.fromkeys(run.workload for run in runs.values()):
        there = {name: run for name, run in runs.items() if run.workload == workload}
        found |= dict.fromkeys(there, Comparison(group(list(there.values()))))
    return found


def _origin(name: str, comparison: Comparison) -> str:
    """The first run with the same program by its lines, of one that is the first by its
    settings."""
    other = comparison.same_programs.get(_group_of(name, comparison))
    return name if other is None else other.runs[0].name


def _group_of(name: str, comparison: Comparison) -> Group:
    return next(
        each
        for each in comparison.groups
        if any(run.name == name for run in (*each.runs, *each.repeats))
    )


def _alone(run: Run, comparison: Comparison, *, is_only: bool) -> Record:
    """The run's own record with the fields that need the others. A single run has no budgets."""
    assert run.summary is not None
    own = _group_of(run.name, comparison)
    budgets = {} if is_only else comparison.budgets(own)
    found = dict(run.summary) | dict.fromkeys(COMPARED)
    at_budgets = _at_budgets([run], budgets, comparison.paces[own])
    return found | _to_target([run], own, comparison) | at_budgets


def _to_target(runs: list[Run], own: Group, comparison: Comparison) -> Record:
    target = comparison.target_of(own)
    if target is None:
        return {}
    level = comparison.quality.sign * target.value
    pace = comparison.paces[own]
    costs = costs_to(curve_of(runs, comparison.quality, pace), level, pace)
    found: Record = {"target": target.value}
    for name, axis in TO_TARGET.items():
        if axis in costs:
            found[name] = costs[axis].cost.value
            found[f"{name}_interval"] = costs[axis].cost.as_dict()
    return found if len(runs) > 1 else _without_intervals(found)


def _at_budgets(runs: list[Run], budgets: Mapping[str, float], pace: Pace | None) -> Record:
    """The metric when each budget is spent."""
    metric = Quality("metric", "metric", higher_is_better=False)
    curve = curve_of(runs, metric, pace)
    if curve is None:
        return {}
    mean = curve.values.mean(axis=0)
    return {
        name: float(np.interp(budgets[axis], curve.costs[axis], mean))
        for name, axis in AT_EQUAL.items()
        if axis in budgets and axis in curve.costs
    }


def _averaged(runs: list[Run], comparison: Comparison) -> Record:
    """The record of a setting: the mean over its seeds, and what can be said of it."""
    records = [run.summary for run in runs if run.summary is not None]
    found = dict(records[0])
    own = _group_of(runs[0].name, comparison)
    if len(records) > 1:
        del found["seed"]
        found |= {key: _mean(records, key) for key in found if _is_figure(key, records)}
        found |= dict.fromkeys(TO_TARGET) | _to_target(runs, own, comparison)
    found["seeds"] = [record["seed"] for record in records]
    for key in _WITH_INTERVAL:
        values = [record[key] for record in records]
        if None not in values:
            found[f"{key}_interval"] = of_mean(values).as_dict()
    difference = _final(own, comparison).difference
    if difference is not None:
        found["difference_interval"] = difference.as_dict()
    return found


def _final(own: Group, comparison: Comparison) -> Final:
    return next(row for row in comparison.finals() if row.group is own)


def _is_figure(key: str, records: list[Record]) -> bool:
    known = [record[key] for record in records if record.get(key) is not None]
    numbers = all(isinstance(v, int | float) and not isinstance(v, bool) for v in known)
    return key not in _NAMES and bool(known) and numbers


def _mean(records: list[Record], key: str) -> float | None:
    """A figure that one of the seeds does not have (a loss that is not finite) is unknown."""
    values = [record.get(key) for record in records]
    if any(value is None for value in values):
        return None
    return of_mean([float(value) for value in values if value is not None]).value


def _swept(settings: Settings, swept: Sequence[str], seeds: int) -> Record:
    values = settings.as_dict()
    return {field: values[setting_name(field)] for field in swept if seeds == 1 or field != "seed"}


def _without_intervals(record: Record) -> Record:
    return {key: value for key, value in record.items() if not key.endswith("_interval")}

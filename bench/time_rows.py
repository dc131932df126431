"""The rows of bench/time_to_target.py from its runs, and their cells; `tables.py` puts them into a
page.

A run is at the target where its own evaluations say so, between two of them by a straight line, as
`steps_to_target` of the lab has it. Seconds, gradients and the model's seconds are read at the same
place of the run. A run that never is at the target has no place and no time.
"""

import math
from collections.abc import Sequence
from statistics import fmean
from typing import Any

import numpy as np

from palsgd.lab.judging.interval import of_mean
from palsgd.lab.judging.quality_curve import arrival, cost_at

Record = dict[str, Any]

AXES = ("step", "gradient_steps", "time_s", "projected_s")
METHODS = {"ddp": "DDP", "diloco": "DiLoCo", "palsgd": "PALSGD"}


def rows(runs: Sequence[Record], margin: float) -> list[Record]:
    """One for each case, in the order of K, H and p."""
    cases: dict[str, list[Record]] = {}
    for run in sorted(runs, key=_place):
        cases.setdefault(run["case"], []).append(run)
    return [_row(own, _baseline(runs, own[0]), margin) for own in cases.values()]


def _place(run: Record) -> tuple[float, ...]:
    return run["workers"], run["sync_every"] or 0, run["mix_prob"] or 0.0, run["seed"]


def _baseline(runs: Sequence[Record], own: Record) -> list[Record]:
    """The runs of DDP with as many workers."""
    alike = [run for run in runs if run["workers"] == own["workers"]]
    return [run for run in alike if run["method"] == "ddp"]


def _row(own: list[Record], baseline: list[Record], margin: float) -> Record:
    level = target(baseline, margin)
    places = {run["seed"]: arrived(run, level) for run in own}
    theirs = {run["seed"]: arrived(run, level) for run in baseline}
    reached = {seed: at for seed, at in places.items() if at is not None}
    head = {name: own[0][name] for name in ("case", "workers", "method", "sync_every", "mix_prob")}
    return head | {
        "seeds": len(own),
        "missed": None if level is None else len(own) - len(reached),
        "target": level,
        "loss": _mean(run["loss"] for run in own),
        "steps": _mean(at["step"] for at in reached.values()),
        "gradient_steps": _mean(at["gradient_steps"] for at in reached.values()),
        "seconds": _mean(at["time_s"] for at in reached.values()),
        "of_ddp": _mean(_ratio(at, theirs.get(seed)) for seed, at in reached.items()),
        "step_ms": _mean(run["step_s"] and 1e3 * run["step_s"] for run in own),
        "projected_seconds": _mean(at["projected_s"] for at in reached.values()),
        "over_projected": _mean(at["time_s"] / at["projected_s"] for at in reached.values()),
    }


def target(baseline: Sequence[Record], margin: float) -> float | None:
    """The loss to be reached; None without a run of DDP."""
    losses = [run["loss"] for run in baseline if run["loss"] is not None]
    return (1 + margin) * fmean(losses) if losses else None


def arrived(run: Record, level: float | None) -> dict[str, float] | None:
    """What the run had spent, on each of AXES, when it first was at the level; None: never."""
    lines = run["lines"]
    if level is None or not lines:
        return None
    lowest = np.minimum.accumulate([line["loss"] for line in lines])
    place = float(arrival(lowest, level))
    if math.isnan(place):
        return None
    return {axis: float(cost_at(np.array([line[axis] for line in lines]), place)) for axis in AXES}


def _ratio(own: dict[str, float], other: dict[str, float] | None) -> float | None:
    """Of the seconds of two runs of one seed. They were taken within minutes, so what slowed one
    slowed the other."""
    return None if other is None else own["time_s"] / other["time_s"]


def _mean(values: Any) -> Record | None:
    """Over the seeds that have a value, with Student's interval."""
    known = [value for value in values if value is not None]
    return of_mean(known).as_dict() if known else None


# -- cells -----------------------------------------------------------------------------------------

FIGURES = {  # columns with a mean and its interval, by the row's key
    "loss": ("final loss", "{:.4f}"),
    "steps": ("steps to the target", "{:.0f}"),
    "gradient_steps": ("gradient steps", "{:.0f}"),
    "seconds": ("seconds", "{:.1f}"),
    "of_ddp": ("of DDP's seconds", "{:.2f}"),
    "step_ms": ("ms a step after the warm-up", "{:.1f}"),
    "projected_seconds": ("seconds by the model", "{:.1f}"),
    "over_projected": ("measured over the model's", "{:.2f} x"),
}
COLUMNS = ("K", "method", "H", "p", *(title for title, _ in FIGURES.values()))


def cells(row: Record) -> tuple[str, ...]:
    H, p = (_number(row[name]) for name in ("sync_every", "mix_prob"))
    shown = {name: figure(row[name], form) for name, (_, form) in FIGURES.items()}
    shown["steps"] = "; ".join(each for each in (shown["steps"], _missed(row)) if each)
    return str(row["workers"]), METHODS[row["method"]], H, p, *shown.values()


def _missed(row: Record) -> str:
    if row["missed"] is None:
        return "no DDP beside it"
    return f"missed by {row['missed']} of {row['seeds']} seeds" if row["missed"] else ""


def figure(found: Record | None, form: str) -> str:
    """The mean and its interval. One seed has none, and equal ones need none."""
    if found is None:
        return ""
    value, low, high = (found[name] for name in ("value", "low", "high"))
    if low is None or low == high:
        return form.format(value)
    return f"{form.format(value)} [{form.format(low)}, {form.format(high)}]"


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:g}"

"""A quantity along a run: its mean over the seeds of a group, with an interval."""

from collections.abc import Callable
from dataclasses import dataclass
from statistics import fmean

import numpy as np

from palsgd.lab.judging.interval import of_mean
from palsgd.lab.run_folder import Line, Run
from palsgd.lab.timing.pace import Pace
from palsgd.lab.worker_changes import examples_seen

# What a curve can be drawn against: a word for the switch, a label, the form of its values. The
# first that is known is shown first.
AXES = {
    "time_s": ("time", "training time", "seconds"),
    "bytes_sent": ("bytes", "sent by a worker", "bytes"),
    "examples": ("examples", "examples, of all workers", "count"),
    "gradient_steps": ("gradients", "gradients computed by a worker", "count"),
    "step": ("steps", "step", "count"),
}


@dataclass(frozen=True)
class Curve:
    """The mean over n runs at common places, and the bounds of its 95% t interval; without bounds
    they are the mean itself."""

    x: dict[str, np.ndarray]
    mean: np.ndarray
    low: np.ndarray
    high: np.ndarray
    n: int

    @property
    def has_band(self) -> bool:
        return bool(np.any(self.low < self.high))


def _plain(key: str) -> Callable[[Line], float | None]:
    return lambda line: line.get(key)


def _error(line: Line) -> float | None:
    metric = line.get("metric")
    return None if metric is None else 1 - metric


def _distance(line: Line) -> float | None:
    """The mean distance of the workers to the anchor. None in the warm-up, where there is none."""
    values = [value for value in line.get("distance") or [] if value is not None]
    return fmean(values) if any(values) else None


QUANTITIES: dict[str, Callable[[Line], float | None]] = {
    "loss": _plain("loss"),
    "metric": _plain("metric"),
    "error": _error,
    "train_loss": _plain("train_loss"),
    "distance": _distance,
    "agreement": _plain("agreement"),
}


def average(
    runs: list[Run], quantity: str, *, points: int, pace: Pace | None = None
) -> Curve | None:
    """The mean over the runs at the steps that all of them recorded, so that every point is a mean
    over the same runs. Seconds are those of the pace."""
    recorded = [known for run in runs if (known := _recorded(run, QUANTITIES[quantity]))]
    if not recorded:
        return None
    steps = sorted(set.intersection(*(set(known) for known in recorded)))
    steps = [steps[at] for at in _thinned(len(steps), points)]
    if not steps:
        return None
    found = [of_mean([known[step][1] for known in recorded]) for step in steps]
    bounds = [(each.low, each.high) if each.known else (each.value, each.value) for each in found]
    low, high = np.array(bounds).T
    return Curve(
        _spent(runs[0], recorded, steps, pace),
        np.array([each.value for each in found]), low, high, len(recorded),
    )  # fmt: skip


def _spent(
    run: Run,
    recorded: list[dict[int, tuple[Line, float]]],
    steps: list[int],
    pace: Pace | None,
) -> dict[str, np.ndarray]:
    found = {
        key: np.array([fmean(known[step][0][key] for known in recorded) for step in steps])
        for key in ("bytes_sent", "gradient_steps", "step")
    }
    found["examples"] = examples_seen(run.config, found["gradient_steps"])
    if pace is not None:
        found["time_s"] = np.array([pace.seconds(step) for step in steps])
    return found


def _recorded(run: Run, read: Callable[[Line], float | None]) -> dict[int, tuple[Line, float]]:
    values = ((line, read(line)) for line in run.lines)
    return {
        line["step"]: (line, value)
        for line, value in values
        if value is not None and np.isfinite(value)
    }


def _thinned(number: int, points: int) -> np.ndarray:
    """Indices spread evenly over all of them, first and last included."""
    return np.unique(np.linspace(0, number - 1, min(number, points)).round().astype(int))

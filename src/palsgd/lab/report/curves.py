"""A quantity along a run, averaged over the runs of a group."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from palsgd.lab.run_folder import Line, Run
from palsgd.lab.timing.pace import Pace

# What a curve can be drawn against, by the key of metrics.jsonl.
AXES = {
    "step": "step",
    "gradient_steps": "gradients computed by a worker",
    "time_s": "training time",
    "bytes_sent": "sent by a worker",
}

Spread = tuple[float, float, float]  # mean, lowest, highest


@dataclass(frozen=True)
class Curve:
    """The mean over runs (and workers) with the lowest and highest value, at common steps."""

    x: dict[str, np.ndarray]
    mean: np.ndarray
    low: np.ndarray
    high: np.ndarray

    @property
    def has_band(self) -> bool:
        return bool(np.any(self.low < self.high))


def _plain(key: str) -> Callable[[Line], Spread | None]:
    def read(line: Line) -> Spread | None:
        value = line.get(key)
        return None if value is None else (value, value, value)

    return read


def _distance(line: Line) -> Spread | None:
    """The distance to the anchor over the workers. None in the warm-up, where there is no
    anchor."""
    values = line.get("distance") or []
    return (float(np.mean(values)), min(values), max(values)) if any(values) else None


QUANTITIES: dict[str, Callable[[Line], Spread | None]] = {
    "loss": _plain("loss"),
    "metric": _plain("metric"),
    "train_loss": _plain("train_loss"),
    "distance": _distance,
    "agreement": _plain("agreement"),
}


def average(
    runs: list[Run], quantity: str, *, points: int, pace: Pace | None = None
) -> Curve | None:
    """The mean over the runs at the steps that all runs recorded, so that every point is a mean
    over the same runs. Seconds are those of the pace; without one there are none."""
    recorded = [known for run in runs if (known := _recorded(run, QUANTITIES[quantity]))]
    if not recorded:
        return None
    steps = sorted(set.intersection(*(set(known) for known in recorded)))
    steps = [steps[at] for at in _thinned(len(steps), points)]
    if not steps:
        return None
    values = np.array([[known[step][1] for step in steps] for known in recorded], dtype=float)
    x = {
        key: np.array([[known[step][0][key] for step in steps] for known in recorded]).mean(axis=0)
        for key in AXES
        if key != "time_s"
    }
    if pace is not None:
        x["time_s"] = np.array([pace.seconds(step) for step in steps])
    return Curve(x, values[..., 0].mean(0), values[..., 1].min(0), values[..., 2].max(0))


def _recorded(run: Run, read: Callable[[Line], Spread | None]) -> dict[int, tuple[Line, Spread]]:
    spreads = ((line, read(line)) for line in run.lines)
    return {
        line["step"]: (line, spread)
        for line, spread in spreads
        if spread is not None and np.isfinite(spread[0])
    }


def _thinned(number: int, points: int) -> np.ndarray:
    """Indices spread evenly over all of them, first and last included."""
    return np.unique(np.linspace(0, number - 1, min(number, points)).round().astype(int))

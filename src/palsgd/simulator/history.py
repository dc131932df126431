"""Records the history of a simulation, and shows its progress."""

import math
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from palsgd.cluster import WallClock
from palsgd.ledger import Ledger
from palsgd.progress import ProgressBar

Evaluate = Callable[[nn.Module], Any]
Every = int | Callable[[int], bool]


class Watch:
    """Measures the seconds of a simulation while it runs, without those of evaluations. Runs of one
    program share one watch."""

    def __init__(self) -> None:
        self._before, self._since = 0.0, math.nan

    def seconds(self) -> float:
        running = not math.isnan(self._since)
        return self._before + (time.monotonic() - self._since if running else 0.0)

    def set(self, seconds: float) -> None:
        """Go on from these seconds, which a checkpoint has."""
        self._before = seconds

    @contextmanager
    def running(self) -> Iterator[None]:
        self._since = time.monotonic()
        try:
            yield
        finally:
            self._before, self._since = self.seconds(), math.nan

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        self._before, self._since = self.seconds(), math.nan
        try:
            yield
        finally:
            self._since = time.monotonic()


class Recorder:
    """Records one run, which ends at the clock `steps`. It says where the global model is evaluated
    and, by `pause_every`, where the simulation pauses; None: nowhere."""

    def __init__(
        self,
        evaluate: Evaluate | None,
        evaluate_every: Every,
        *,
        steps: int,
        progress: bool | None = False,
        wall_clock: WallClock | None = None,
        pause_every: Every | None = None,
    ):
        self.wall_clock = wall_clock
        self.watch = Watch()
        self.history: list[dict[str, Any]] = []
        self._evaluate, self._every, self._pause_every = evaluate, evaluate_every, pause_every
        self.bar = sys.stderr.isatty() if progress is None else progress
        self._steps = steps
        self._progress: ProgressBar | None = None

    def add(
        self,
        *,
        clock: int,
        round: int,
        losses: list[float],
        distance: list[float],
        ledger: Ledger,
        metric: Any,
    ) -> None:
        entry: dict[str, Any] = {
            "clock": clock,
            "round": round,
            "loss": _mean(losses),
            "losses": losses,
            "distance": distance,
            "bytes_sent": ledger.bytes_sent,
            "gradient_steps": ledger.gradient_steps,
            "syncs": ledger.syncs,
            "seconds": self.watch.seconds(),
        }
        if self.wall_clock is not None:
            entry["time_s"] = self.wall_clock.seconds(clock)
        if metric is not None:
            entry["metric"] = metric
        if self._progress is None:
            self._progress = ProgressBar(
                "simulation", self._steps, start=self._clock, quiet=not self.bar
            )
        self.history.append(entry)
        self._progress.at(clock)

    @property
    def _clock(self) -> int:
        """The clock of the last entry."""
        return self.history[-1]["clock"] if self.history else 0

    def metric(self, clock: int, show: Callable[[], AbstractContextManager[nn.Module]]) -> Any:
        """The metric of the global model if it is to be evaluated at this clock, else None. `show`
        gives the model."""
        if self._evaluate is None or not self.wants_metric(clock):
            return None
        with self.watch.evaluating(), show() as model, torch.random.fork_rng():
            modes = [(module, module.training) for module in model.modules()]
            value = self._evaluate(model)
            for module, training in modes:  # undoes an eval() inside the evaluation
                module.training = training
        return float(value) if isinstance(value, Tensor) else value

    def wants_metric(self, clock: int) -> bool:
        """Is the global model to be evaluated after the exchange at this clock?"""
        return self._evaluate is not None and self._is_due(self._every, clock)

    def wants_pause(self, clock: int) -> bool:
        """Does the simulation pause after the exchange at this clock? It is asked before the
        exchange is added to the history."""
        return self._pause_every is not None and self._is_due(self._pause_every, clock)

    def _is_due(self, every: Every, clock: int) -> bool:
        if clock >= self._steps:
            return True
        return every(clock) if callable(every) else len(self.history) % every == every - 1

    def state(self) -> dict[str, Any]:
        """The entries so far, as a tensor for each figure, and the metrics."""
        entries, first = self.history, self.history[0] if self.history else {}
        found = {
            name: torch.tensor(
                [entry[name] for entry in entries],
                dtype=torch.int64 if isinstance(value, int) else torch.float64,
            )
            for name, value in first.items()
            if name != "metric"
        }
        metrics = {n: storable(e["metric"]) for n, e in enumerate(entries) if "metric" in e}
        return {"figures": found, "metrics": metrics}

    def load(self, saved: dict[str, Any]) -> None:
        figures = saved["figures"]
        rows = zip(*(column.tolist() for column in figures.values()), strict=True)
        self.history[:] = [dict(zip(figures, row, strict=True)) for row in rows]
        for number, metric in saved["metrics"].items():
            self.history[number]["metric"] = metric

    def end(self) -> None:
        if self._progress is not None:
            self._progress.close()


def _mean(losses: list[float]) -> float:
    """The mean over the workers that have a loss. A worker has none after a round of mixing steps
    only."""
    known = [loss for loss in losses if not math.isnan(loss)]
    return sum(known) / len(known) if known else math.nan


def storable(value: Any) -> Any:
    """A metric in the types that a checkpoint holds, or a ValueError."""
    if isinstance(value, np.generic):
        return value.item()
    if value is None or isinstance(value, (bool, int, float, str, Tensor)):
        return value
    if type(value) in (list, tuple):
        return type(value)(storable(each) for each in value)
    if type(value) is dict:
        return {key: storable(each) for key, each in value.items()}
    raise ValueError(
        f"evaluate returned a {type(value).__name__}, which a checkpoint cannot hold; return "
        "numbers, texts, tensors, or lists, tuples and dicts of them"
    )

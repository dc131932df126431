"""Records the history of a simulation, and shows its progress."""

import math
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from palsgd.cluster import WallClock
from palsgd.ledger import Ledger
from palsgd.progress import ProgressBar

Evaluate = Callable[[nn.Module], Any]
Every = int | Callable[[int], bool]


class Watch:
    """Measures the seconds of a simulation without those of evaluations. Runs of one program share
    one watch."""

    def __init__(self) -> None:
        self.began, self._evaluating = time.monotonic(), 0.0

    def seconds(self) -> float:
        return time.monotonic() - self.began - self._evaluating

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        began = time.monotonic()
        try:
            yield
        finally:
            self._evaluating += time.monotonic() - began


class Recorder:
    def __init__(
        self,
        evaluate: Evaluate | None,
        evaluate_every: Every,
        progress: bool | None,
        wall_clock: WallClock | None = None,
    ):
        self.wall_clock = wall_clock
        self.history: list[dict[str, Any]] = []
        self._evaluate, self._every = evaluate, evaluate_every
        self.bar = sys.stderr.isatty() if progress is None else progress
        self._steps, self._watch = 0, Watch()
        self._progress: ProgressBar | None = None

    def begin(self, steps: int, watch: Watch | None = None) -> None:
        self._steps, self._watch = steps, watch or Watch()
        self._progress = ProgressBar("simulation", steps, quiet=not self.bar)

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
            "seconds": self._watch.seconds(),
        }
        if self.wall_clock is not None:
            entry["time_s"] = self.wall_clock.seconds(clock)
        if metric is not None:
            entry["metric"] = metric
        self.history.append(entry)
        if self._progress is not None:
            self._progress.at(clock)

    def metric(self, clock: int, show: Callable[[], AbstractContextManager[nn.Module]]) -> Any:
        """The metric of the global model if it is to be evaluated at this clock, else None. `show`
        gives the model."""
        if self._evaluate is None or not self.wants_metric(clock):
            return None
        with self._watch.evaluating(), show() as model, torch.random.fork_rng():
            modes = [(module, module.training) for module in model.modules()]
            value = self._evaluate(model)
            for module, training in modes:  # undoes an eval() inside the evaluation
                module.training = training
        return float(value) if isinstance(value, Tensor) else value

    def wants_metric(self, clock: int) -> bool:
        """Is the global model to be evaluated after the exchange at this clock?"""
        return self._evaluate is not None and (clock >= self._steps or self._is_due(clock))

    def _is_due(self, clock: int) -> bool:
        if callable(self._every):
            return self._every(clock)
        return len(self.history) % self._every == self._every - 1

    def end(self) -> None:
        if self._progress is not None:
            self._progress.close()


def _mean(losses: list[float]) -> float:
    """The mean over the workers that have a loss. A worker has none after a round of mixing steps
    only."""
    known = [loss for loss in losses if not math.isnan(loss)]
    return sum(known) / len(known) if known else math.nan

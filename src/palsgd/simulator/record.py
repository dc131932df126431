"""The history of a simulation, and a bar that shows how far it is."""

import math
import sys
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import nn

Evaluate = Callable[[nn.Module], float]


class Recorder:
    def __init__(self, evaluate: Evaluate | None, evaluate_every: int, progress: bool | None):
        self.history: list[dict[str, Any]] = []
        self._evaluate, self._every = evaluate, evaluate_every
        self.bar = sys.stderr.isatty() if progress is None else progress
        self._steps, self._began, self._shown = 0, 0.0, 0.0

    def begin(self, steps: int) -> None:
        self._steps, self._began = steps, time.monotonic()

    def add(
        self,
        *,
        clock: int,
        round: int,
        losses: list[float],
        distance: list[float],
        bytes_sent: int,
        metric: float | None,
    ) -> None:
        entry: dict[str, Any] = {
            "clock": clock,
            "round": round,
            "loss": _mean(losses),
            "losses": losses,
            "distance": distance,
            "bytes_sent": bytes_sent,
        }
        if metric is not None:
            entry["metric"] = metric
        self.history.append(entry)
        self._draw(clock)

    def metric(
        self, clock: int, show: Callable[[], AbstractContextManager[nn.Module]]
    ) -> float | None:
        """The metric of the global model, which `show` gives, where one is due."""
        due = clock >= self._steps or len(self.history) % self._every == self._every - 1
        if self._evaluate is None or not due:
            return None
        with show() as model, torch.random.fork_rng():
            modes = [(module, module.training) for module in model.modules()]
            value = float(self._evaluate(model))
            for module, training in modes:  # an evaluation that calls eval() ends there
                module.training = training
        return value

    def end(self) -> None:
        if self.bar and self._shown:
            print(file=sys.stderr)

    def _draw(self, clock: int) -> None:
        now = time.monotonic()
        if not self.bar or now - self._began < 1 or (now - self._shown < 0.2 < self._steps - clock):
            return
        self._shown = now
        rate = clock / (now - self._began)
        filled = 30 * clock // self._steps
        print(
            f"\r[{'#' * filled}{'.' * (30 - filled)}] {clock}/{self._steps} steps, "
            f"{rate:.1f}/s, {(self._steps - clock) / rate:.0f} s left ",
            end="",
            file=sys.stderr,
            flush=True,
        )


def _mean(losses: list[float]) -> float:
    """Of the workers that computed a loss: in a round of mixing alone a worker has none."""
    known = [loss for loss in losses if not math.isnan(loss)]
    return sum(known) / len(known) if known else math.nan

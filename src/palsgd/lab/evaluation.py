"""When a run is evaluated, and what is found."""

import math
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn

from palsgd.errors import NonFiniteError
from palsgd.lab.run_folder import RunFolder
from palsgd.lab.settings import Settings
from palsgd.lab.workload import Workload
from palsgd.schedule import Schedule

STATISTICS_BATCHES = 16  # of each worker, over which buffers=recompute takes its statistics


def evaluation_is_due(schedule: Schedule, every: int, clock: int) -> bool:
    """True at the first change of the global model at or after each multiple of `every`. Between
    two changes the global model stays the same."""
    if not schedule.changes_model(clock):
        return False
    return clock // every > schedule.last_change(clock) // every


def evaluated(
    workload: Workload,
    model: nn.Module,
    *,
    part: int = 0,
    parts: int = 1,
    summed: Callable[[Tensor], Tensor] = lambda totals: totals,
) -> dict[str, float]:
    """Loss and metric of a model; its metric on training examples too, where the workload has one.
    `summed` adds up the totals of all parts."""
    loss, metric = workload.score(summed(workload.totals(model, part=part, parts=parts)))
    found = {"loss": float(loss), "metric": float(metric)}
    seen = workload.training_totals(model, part=part, parts=parts)
    if seen is not None:
        found["train_metric"] = float(workload.score(summed(seen))[1])
    return found


def refuse_nonfinite(found: dict[str, float], step: int) -> None:
    """Raise NonFiniteError if an evaluation found a loss that is inf or nan."""
    if not math.isfinite(found["loss"]):
        raise NonFiniteError(
            f"the validation loss is {found['loss']} at step {step}; lower the learning rate or "
            "clip gradients"
        )


class BestModel:
    """The best metric so far, and the model that had it in the folder of the run."""

    def __init__(self, folder: RunFolder, *, higher_is_better: bool):
        self._folder, self._sign = folder, 1 if higher_is_better else -1
        self.metric: float | None = None

    def offer(self, metric: float, model: nn.Module, *, step: int, writes: bool) -> None:
        """Keep a model if it is the best. All ranks keep its metric; the one that `writes` writes
        the model."""
        if self.metric is not None and self._sign * metric <= self._sign * self.metric:
            return
        self.metric = metric
        if writes:
            best = {"step": step, "metric": metric, "model": model.state_dict()}
            self._folder.write_best(best)


def random_numbers_kept(device: torch.device) -> AbstractContextManager[None]:
    """What is drawn inside is not missing outside."""
    return torch.random.fork_rng(devices=[device] if device.type == "cuda" else [])


def statistics_batches(workload: Workload, settings: Settings, worker: int) -> Iterator[Any]:
    """Batches of a worker over which the statistics of a global model are taken: always its first
    ones, so that evaluations are comparable and a resumed run takes the same."""
    for index in range(STATISTICS_BATCHES):
        yield workload.batch(
            worker=worker, workers=settings.workers, size=settings.batch_size, index=index
        )

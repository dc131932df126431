"""Simulated runs, which write the same files as runs in real processes."""

import copy
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

import palsgd
from palsgd import registry
from palsgd.lab.evaluation import evaluation_is_due
from palsgd.lab.factory import (
    MeanNorm,
    agreement,
    build_optimizer,
    learning_rate,
    low_precision,
)
from palsgd.lab.run_folder import RunFolder
from palsgd.lab.settings import Settings
from palsgd.lab.summary import summarize
from palsgd.lab.trainer import WARMUP_LINES, run_config, split_batch, start_line
from palsgd.lab.workload import Workload
from palsgd.progress import ProgressBar

# What runs of one stacked program may differ in; see palsgd.simulate_many.
FREE = (
    "lr",
    "schedule",
    "lr_warmup_steps",
    "mix_prob",
    "mix_rate",
    "pull",
    "draws",
    "outer",
    "outer_lr",
    "outer_momentum",
    "seed",
)


class SimulatedRun:
    """One simulated run: the arguments for simulate_many, and the writing of its files."""

    def __init__(self, settings: Settings, workload: Workload, folder: RunFolder):
        settings = settings.in_steps(workload.examples)
        self.settings, self.workload, self.folder = settings, workload, folder
        self.steps = settings.total_steps(workload.examples)
        self.every = settings.evaluate_every or max(1, self.steps // 20)
        self._mean_norm: MeanNorm | None = None
        self._model: nn.Module | None = None  # that is shown as the global one
        self._opt: palsgd.LocalOptimizer | None = None  # worker 0's
        self._start = (math.nan, math.nan)
        self._best: dict[str, Any] = {}

    def batches(self, worker: int) -> Any:
        index = 0
        while True:
            yield self.workload.batch(
                worker=worker,
                workers=self.settings.workers,
                size=self.settings.batch_size,
                index=index,
            )
            index += 1

    def method(self, model: nn.Module) -> palsgd.LocalOptimizer:
        opt = build_optimizer(self.settings, self.steps, model)
        if opt.transport.worker == 0:
            self._mean_norm, self._model, self._opt = MeanNorm(opt), model, opt
        return opt

    def evaluation_is_due(self, clock: int) -> bool:
        assert self._opt is not None
        return evaluation_is_due(self._opt.schedule, self.every, clock)

    def begin(self, evaluate: Callable[[nn.Module], tuple[float, float]]) -> None:
        """Evaluate the model as simulate will build it."""
        with torch.random.fork_rng():
            torch.manual_seed(self.settings.seed)
            self._model = self.workload.model().to(self.workload.device)
        self._start, self._best = evaluate(self._model), {}
        self.evaluated(self._model, self._start[1])

    def evaluated(self, model: nn.Module, metric: float) -> None:
        """If the model is this run's, it may be its best so far."""
        sign = 1 if self.workload.higher_is_better else -1
        better = not self._best or sign * metric > sign * self._best["metric"]
        if model is self._model and better:
            self._best = {"metric": metric, "model": copy.deepcopy(model.state_dict())}

    def write(self, result: Any) -> None:
        config = run_config(
            self.settings, self.workload, self.steps, engine=result.engine, model=result.model
        )
        self.folder.clear()
        self.folder.create(config)
        lines = [self._first(), *self._lines(result.history)]
        self.folder.append("metrics", lines)
        if result.error is not None:
            self.folder.write_failure(result.error)
            return
        best = self._best["metric"]
        step = next((x["step"] for x in lines if x.get("metric") == best), 0)
        self.folder.write_best({"step": step, **self._best})
        self.folder.write_summary(summarize(config, lines, {}))  # last: the run is finished

    def _first(self) -> dict[str, Any]:
        loss, metric = self._start
        first = start_line(self.settings, self.steps, self.settings.workers)
        return first | {"loss": loss, "metric": metric}

    def _lines(self, history: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """The lines of all syncs and, for the warm-up, of the evaluated exchanges and some
        others."""
        found, losses = [], []
        norms = self._mean_norm.all if self._mean_norm is not None else []
        thin = max(1, self.steps // WARMUP_LINES)
        for entry in history:
            losses.append(entry["loss"])
            applied = entry["syncs"] - self.settings.warmup_steps  # outer steps so far
            synced = bool(norms) and applied > 0
            if not (synced or "metric" in entry or entry["clock"] % thin == 0):
                continue
            norm = float(norms[applied - 1]) if synced else None
            line = {
                "step": entry["clock"],
                "gradient_steps": entry["gradient_steps"],
                "time_s": entry.get("time_s", entry["seconds"]),
                "bytes_sent": entry["bytes_sent"],
                "syncs": entry["syncs"],
                "train_loss": sum(losses) / len(losses),
                "lr": self._lr(entry["clock"]),
                "distance": entry["distance"],
                "agreement": agreement(norm, entry["distance"]),
            }
            if "time_s" in entry:
                line["simulation_s"] = entry["seconds"]
            if "metric" in entry:
                line |= dict(zip(("loss", "metric"), entry["metric"], strict=True))
            found.append(line)
            losses = []
        return found

    def _lr(self, clock: int) -> float:
        return learning_rate(self.settings, self.steps, clock)


def simulate_runs(runs: list[SimulatedRun], *, quiet: bool, vectorize: bool | str = "auto") -> None:
    """Runs that may share a program: they differ in nothing but what is in FREE."""
    first = runs[0]
    workload, settings = first.workload, first.settings
    autocast = low_precision(settings, workload.device)

    def loss(model: nn.Module, batch: Any) -> Tensor:
        parts = split_batch(batch, settings.micro_batches)
        with autocast():
            losses = [workload.loss(model, part) for part in parts]
        return losses[0] if len(losses) == 1 else torch.stack(losses).mean()

    def score(model: nn.Module) -> tuple[float, float]:
        with autocast():
            return workload.score(workload.totals(model))

    def evaluate(model: nn.Module) -> tuple[float, float]:
        found = score(model)
        for run in runs:
            run.evaluated(model, found[1])
        return found

    for run in runs:
        run.begin(score)
    with ProgressBar(_title(runs), first.steps, quiet=quiet) as bar:

        def is_due(clock: int) -> bool:
            bar.at(clock)
            return first.evaluation_is_due(clock)

        results = palsgd.simulate_many(
            [{"method": run.method, "seed": run.settings.seed, "data": run.batches}
             for run in runs],
            workers=settings.workers,
            steps=first.steps,
            model=workload.model,
            loss=loss,
            device=workload.device,
            evaluate=evaluate,
            evaluate_every=is_due,
            vectorize=vectorize,
            progress=False,
            cluster=None
            if settings.cluster is None
            else palsgd.Cluster.parse(settings.cluster, workers=settings.workers),
        )  # fmt: skip
    for run, result in zip(runs, results, strict=True):
        run.write(result)


def _title(runs: list[SimulatedRun]) -> str:
    settings, count = runs[0].settings, len(runs)
    return f"{settings.workload} {settings.method if count == 1 else f'{count} runs'}"


def shape_of(settings: Settings) -> tuple[Any, ...]:
    """Equal for settings that differ in nothing but what is in FREE."""
    fixed = {k: v for k, v in settings.as_dict().items() if k not in FREE}
    if registry.row(settings.method).rounds:
        fixed["method"] = "local"
    return tuple(sorted((k, str(v)) for k, v in fixed.items()))

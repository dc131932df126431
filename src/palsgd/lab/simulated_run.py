"""One simulated run, which writes the same files as a run in real processes."""

import copy
from collections.abc import Mapping
from functools import cached_property
from typing import Any

import torch
from torch import nn

import palsgd
from palsgd import registry
from palsgd.buffers import Buffers
from palsgd.lab.evaluation import evaluated, evaluation_is_due, statistics_batches
from palsgd.lab.factory import (
    MeanNorm,
    agreement,
    build_optimizer,
    learning_rate,
    low_precision,
)
from palsgd.lab.joint_batches import JointBatches
from palsgd.lab.run_folder import RunFolder
from palsgd.lab.settings import Settings
from palsgd.lab.summary import summarize
from palsgd.lab.timing import Pace
from palsgd.lab.timing.projection import projected_pace
from palsgd.lab.trainer import WARMUP_LINES, run_config, start_line
from palsgd.lab.warmups import LabWarmUp
from palsgd.lab.workload import Workload
from palsgd.progress import ProgressBar
from palsgd.simulator.result import Result
from palsgd.simulator.warm_start import Found

# What runs of one stacked program may differ in; see palsgd.simulate_many.
FREE = (
    "lr",
    "schedule",
    "lr_warmup_steps",
    "mix_prob",
    "mix_rate",
    "pull",
    "draws",
    "speeds",
    "outer",
    "outer_lr",
    "outer_momentum",
    "seed",
)


class SimulatedRun:
    """One simulated run: the arguments for palsgd.simulator.programs, and the writing of its files.

    A run whose folder is finished writes nothing. It is trained again where others, which are not
    finished, shared its program: their rounding depends on it.
    """

    def __init__(
        self,
        settings: Settings,
        workload: Workload,
        folder: RunFolder,
        warmup: LabWarmUp | None = None,
    ):
        """`warmup`: what it has in common with other runs."""
        settings = settings.in_steps(workload.examples)
        self.settings, self.workload, self.folder = settings, workload, folder
        self.steps = settings.total_steps(workload.examples)
        self._writes = not (folder.finished or folder.failure)
        self._every = settings.evaluate_every or max(1, self.steps // 20)
        self._autocast = low_precision(settings, workload.device)
        self.bar: ProgressBar | None = None
        self._mean_norm: MeanNorm | None = None
        self._opt: palsgd.LocalOptimizer | None = None  # worker 0's
        self._lines: list[dict[str, Any]] = []  # of metrics.jsonl, written or not
        self._written = self._seen = 0  # how many of them are written, and entries of the history
        self._losses: list[float] = []  # of the entries since the last line
        self._best: dict[str, Any] = {}
        self._clock = 0  # of the last exchange
        self._warmup = None if warmup is None else RunsWarmUp(self, warmup)
        self.warmup_best: dict[str, Any] = {}  # until others may start after this run's warm-up

    # -- what a simulation asks for ----------------------------------------------------------------

    def plan(self) -> dict[str, Any]:
        return {
            "method": self._method,
            "seed": self.settings.seed,
            "data": JointBatches(self.settings, self.workload),
            "evaluate": self._evaluate,
            "evaluate_every": self._evaluation_is_due,
            "pause_every": self._pause_is_due,
            "warmup": self._warmup,
        }

    @property
    def _row(self) -> registry.Row:
        return registry.row(self.settings.method)

    def _method(self, model: nn.Module) -> palsgd.LocalOptimizer:
        opt = build_optimizer(self.settings, self.steps, model)
        if opt.transport.worker == 0:
            self._mean_norm, self._opt = MeanNorm(opt), opt
        return opt

    def _evaluate(self, model: nn.Module) -> dict[str, float]:
        """The loss and the metrics of the global model, of which the best so far is kept."""
        with self._autocast():
            if self._recomputes:
                self.recompute_buffers(model)
            found = evaluated(self.workload, model)
        if self._is_best(found["metric"]):
            self._best = {"metric": found["metric"], "model": copy.deepcopy(model.state_dict())}
            self._keep_for_others(self._best)
        return found

    def _is_best(self, metric: float) -> bool:
        sign = 1 if self.workload.higher_is_better else -1
        return not self._best or sign * metric > sign * self._best["metric"]

    def _keep_for_others(self, best: dict[str, Any]) -> None:
        """In a warm-up that others may start after: the best model so far will be theirs too."""
        awaited = self._warmup is not None and self._warmup.found is None
        self.warmup_best = dict(best) if awaited else {}

    @property
    def _recomputes(self) -> bool:
        """Does an evaluation take the statistics of the model again? Not before training, and not
        in the warm-up, where all workers have the same."""
        local = self._clock > self.settings.warmup_steps
        return self.settings.buffers == "recompute" and local and self._row.rounds

    @torch.no_grad()
    def recompute_buffers(self, model: nn.Module) -> None:
        """Take a model's statistics over the batches of all workers, as their processes do
        together."""
        batches = (
            batch
            for worker in range(self.settings.workers)
            for batch in statistics_batches(self.workload, self.settings, worker)
        )
        Buffers(model, "recompute").recompute(model, batches, self.workload.loss)

    def _evaluation_is_due(self, clock: int) -> bool:
        self._clock = clock
        return self._is_due(self._every, clock)

    def _pause_is_due(self, clock: int) -> bool:
        if self.bar is not None:
            self.bar.at(clock)
        rounds = self.settings.checkpoint_every
        if rounds is not None and self._is_due(rounds * int(self.settings.sync_every), clock):
            return True
        return self._evaluation_is_due(clock)

    def _is_due(self, every: int, clock: int) -> bool:
        assert self._opt is not None
        return evaluation_is_due(self._opt.schedule, every, clock)

    # -- files -------------------------------------------------------------------------------------

    def start(self, engine: str, program: list[str]) -> None:
        """Make the folder, and evaluate the model as the simulation builds it."""
        with torch.random.fork_rng():
            torch.manual_seed(self.settings.seed)
            model = self.workload.new_model().to(self.workload.device)
        first = start_line(self.settings, self.steps, self.settings.workers)
        self._lines = [
            first | {"time_s": self._time(0), "simulation_s": 0.0} | self._evaluate(model)
        ]
        if self._writes:
            config = run_config(
                self.settings, self.workload, self.steps, engine=engine, model=model
            )
            self.folder.start_over()
            self.folder.create(config | {"program": program})
        self._write()

    def start_warm(self, history: list[dict[str, Any]]) -> None:
        """Take over the lines and the best model of a warm-up that another run has computed."""
        assert self._warmup is not None
        if self._writes:
            origin = {"warmup_computed_by": self._warmup.shared.computed_by}
            self.folder.create(self.folder.config() | origin)
        self._take(history)
        if self._is_best(self._warmup.shared.best["metric"]):
            self._best = dict(self._warmup.shared.best)
        self._write()

    def state(self) -> dict[str, Any]:
        """What is saved of this run beside the simulation."""
        norms = [float(norm) for norm in self._norms]
        return {"first": self._lines[0], "norms": torch.tensor(norms, dtype=torch.float64)}

    def resume(self, saved: Mapping[str, Any], history: list[dict[str, Any]]) -> None:
        """Go on from a checkpoint. The lines that were written after it are dropped, and the best
        model is in the folder already."""
        self._norms[:] = saved["norms"].unbind()
        self._lines = [saved["first"]]
        self._take(history)
        sign = 1 if self.workload.higher_is_better else -1
        metrics = [line["metric"] for line in self._lines if "metric" in line]
        self._best = {"metric": max(metrics, key=lambda metric: sign * metric)}
        written = None if self._warmup is None else self.folder.best()
        if written is not None and written["metric"] == self._best["metric"]:
            self._keep_for_others({"metric": written["metric"], "model": written["model"]})
        if self._writes:
            self.folder.write_lines(self._lines)
        self._written = len(self._lines)

    def pause(self, history: list[dict[str, Any]]) -> None:
        """Write the lines that are new."""
        self._take(history)
        self._write()

    def pass_warmup(self, clock: int) -> None:
        """Say, from its end on, that this run has left none to others if that is so: it has
        diverged, has skipped a step, or was resumed."""
        if self._warmup is not None and clock >= self._warmup.steps and not self._warmup.found:
            self._warmup.shared.give_up()

    def keep_best(self) -> None:
        """Write the best model so far, if it is not written. It goes with a state that is saved and
        with the end of training: without either, nobody goes on from it, and a large model takes
        as long to write as many steps do."""
        if self._writes and "model" in self._best:
            metric, model = self._best["metric"], self._best.pop("model")
            # by str, as a metric that is nan is not equal to itself
            at = (line["step"] for line in self._lines if str(line.get("metric")) == str(metric))
            step = next(at)
            self.folder.write_best({"step": step, "metric": metric, "model": model})

    def finish(self, result: Result) -> None:
        self.pause(result.history)
        self.keep_best()
        self._opt = self._mean_norm = None  # they lead to all workers, whose memory others need
        if not self._writes:
            return
        if result.error is not None:
            self.folder.write_failure(result.error)
            return
        # last, as the run is then finished
        self.folder.write_summary(summarize(self.folder.config(), self._lines, {}))

    def forget_norms(self, count: int) -> None:
        """Keep the norms of the first `count` syncs. A state is made with steps of the outer
        optimizer that are undone, and these are no syncs."""
        del self._norms[count:]

    @property
    def norms(self) -> int:
        return len(self._norms)

    @property
    def _norms(self) -> list[torch.Tensor]:
        return [] if self._mean_norm is None else self._mean_norm.all

    def _write(self) -> None:
        if self._writes:
            self.folder.append(self._lines[self._written :])
            self._written = len(self._lines)

    def _take(self, history: list[dict[str, Any]]) -> None:
        """Make lines of the new entries: of all syncs and, in the warm-up, of the evaluated
        exchanges and some others."""
        thin = max(1, self.steps // WARMUP_LINES)
        for entry in history[self._seen :]:
            self._losses.append(entry["loss"])
            applied = entry["syncs"] - self.settings.warmup_steps  # outer steps so far
            synced = bool(self._norms) and applied > 0
            if synced or "metric" in entry or entry["clock"] % thin == 0:
                norm = float(self._norms[applied - 1]) if synced else None
                self._lines.append(self._line(entry, norm))
                self._losses = []
        self._seen = len(history)

    def _time(self, clock: int) -> float | None:
        """The seconds on the cluster that the settings name. The simulation's own say nothing about
        a run: one process does the work of all workers, and perhaps of other runs too."""
        return None if self._pace is None else self._pace.seconds(clock)

    @cached_property
    def _pace(self) -> Pace | None:
        cluster = self.settings.cluster
        config = self.settings.as_dict() | {"steps": self.steps}
        return None if cluster is None else projected_pace(config, cluster)

    def _line(self, entry: dict[str, Any], norm: float | None) -> dict[str, Any]:
        """A line of metrics.jsonl. `norm` is that of the mean displacement at the sync, if it was
        one."""
        clock = entry["clock"]
        line = {
            "step": clock,
            "gradient_steps": entry["gradient_steps"],
            "time_s": self._time(clock),
            "simulation_s": entry["seconds"],
            "bytes_sent": entry["bytes_sent"],
            "syncs": entry["syncs"],
            "train_loss": sum(self._losses) / len(self._losses),
            "lr": learning_rate(self.settings, self.steps, clock),
            "workers": self.settings.workers,
            "distance": entry["distance"],
            "agreement": agreement(norm, entry["distance"]),
        }
        if "metric" in entry:
            line |= entry["metric"]
        return line


class RunsWarmUp:
    """A run's hand on the warm-up that it shares."""

    def __init__(self, run: SimulatedRun, shared: LabWarmUp):
        self.shared, self._run = shared, run

    @property
    def steps(self) -> int:
        return self.shared.steps

    @property
    def found(self) -> Found | None:
        return self.shared.found

    def leave(self, found: Found) -> None:
        """With the best model of the same run, as those of others may differ. A run that went on
        from a checkpoint without its best model leaves nothing."""
        best, self._run.warmup_best = self._run.warmup_best, {}
        if best:
            self.shared.leave(found, best, self._run.folder.path.name)


def shape_of(settings: Settings) -> tuple[Any, ...]:
    """Equal for settings that differ in nothing but what is in FREE."""
    fixed = {k: v for k, v in settings.as_dict().items() if k not in FREE}
    if registry.row(settings.method).rounds:
        fixed["method"] = "local"
    return tuple(sorted((k, str(v)) for k, v in fixed.items()))

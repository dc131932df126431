"""One run in real processes: the work of each process."""

import logging
import os
import shutil
import time
import warnings
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import palsgd
from palsgd import registry
from palsgd.events import Averaged, Event, Synced
from palsgd.lab import workloads
from palsgd.lab.data.sharding import random_stream
from palsgd.lab.device import device_words, wait_for
from palsgd.lab.evaluation import (
    BestModel,
    evaluated,
    evaluation_is_due,
    random_numbers_kept,
    refuse_nonfinite,
    statistics_batches,
)
from palsgd.lab.factory import MeanNorm, agreement, learning_rate
from palsgd.lab.provenance import provenance
from palsgd.lab.run_folder import RunFolder, plain
from palsgd.lab.settings import Settings
from palsgd.lab.summary import summarize
from palsgd.lab.timeline import Timeline, joined
from palsgd.lab.worker_changes import Change, changes_in, said_of
from palsgd.lab.worker_loop import WorkerLoop
from palsgd.lab.workload import Workload
from palsgd.progress import Whole
from palsgd.transports.json_exchange import gathered
from palsgd.transports.waiting import barrier, waiting_for

log = logging.getLogger("palsgd")

WARMUP_LINES = 200  # about so many all-reduces of DDP and the warm-up become a line


class LeftError(Exception):
    """All workers were asked to leave; what they have done is saved."""


class Trainer:
    """This process's part of a run. Every rank makes one; rank 0 writes the files."""

    def __init__(
        self,
        settings: Settings,
        workload: Workload,
        folder: RunFolder,
        *,
        resume: bool = False,
        elastic: bool = False,
        quiet: bool = False,
        command: Sequence[str] | None = None,
        link: str | None = None,
        twin_of: str | None = None,
    ):
        """A run that is not resumed begins in a folder that holds none. `elastic`: it may be
        resumed by another number of workers. `command` is what config.yaml names as the command
        line; by default this process's. `link` is the emulated one between the workers,
        `twin_of` the simulated run with the same settings and seed."""
        self._command, self._link, self._twin_of = command, link, twin_of
        settings = settings.in_steps(workload.examples)
        self.settings, self.workload, self.folder = settings, workload, folder
        self._loop = WorkerLoop(settings, workload)
        self.rank, self.world, self.steps = self._loop.rank, self._loop.world, self._loop.steps
        self.net, self.opt = self._loop.net, self._loop.opt
        self._mean_norm = MeanNorm(self.opt)
        self._timeline = Timeline(self.opt)
        self._records: list[dict[str, Any]] = []  # since the last evaluation
        self._loss, self._losses = torch.zeros((), device=workload.device), 0
        self._every = settings.evaluate_every or max(1, self.steps // 20)
        self._evaluated_at = self._saved_at = 0
        self._seconds, self._resumed_at = 0.0, time.perf_counter()
        self._best = BestModel(folder, higher_is_better=workload.higher_is_better)
        self._lines = 0  # of metrics.jsonl
        self._quiet = quiet or self.rank != 0
        if resume and self._has_checkpoint():
            self._resume(elastic=elastic)
        elif self.rank == 0:
            folder.begin(self._config(), resume=resume)
        self._go_on()
        self.opt.on(Averaged, self._after_exchange)
        self.opt.on(Synced, self._after_exchange)
        palsgd.leave_on_sigterm(self.opt)

    # -- the loop --------------------------------------------------------------------------------

    def train(self, whole: Whole | None = None) -> None:
        """`whole` is what the run is part of."""
        if self.opt.clock == 0:
            self._evaluate()
        with self._loop.progress(quiet=self._quiet, whole=whole) as bar:
            for batch in palsgd.until(self._loop.batches(), self.opt, steps=self.steps):
                self._loss += self._loop.gradient(batch)
                self._losses += 1
                self._timeline.before_step()
                self.opt.step()
                self._timeline.after_step()
                self.opt.zero_grad()
                bar.at(self.opt.clock)
        if self._evaluated_at < self.opt.clock:
            self._evaluate()
        spans = gathered(self._timeline.spans())
        if self.rank == 0:
            first_ranks = spans[:: self.settings.ranks_per_worker]
            self.folder.write_lines(joined(first_ranks), "timeline")
            self._finish()
        barrier()
        if os.environ.get("LOCAL_RANK", "0") == "0":  # each machine may have a disk of its own
            shutil.rmtree(self.folder.checkpoints, ignore_errors=True)

    def _after_exchange(self, event: Event) -> None:
        """Record, evaluate and save. A listener does this, as it is called at the same clocks on
        all workers, while one step() of a worker with many mixing steps may contain several
        exchanges. train() does the same at the end."""
        if isinstance(event, Synced) and not event.completes:
            return
        self._record()
        if self.opt.clock >= self.steps:
            return
        due = self._evaluation_is_due()
        if due:
            self._evaluate()
        if self._checkpoint_is_due(due) or self.opt.leaving:
            self._save()
        if self.opt.leaving:
            raise LeftError

    def _evaluation_is_due(self) -> bool:
        return evaluation_is_due(self.opt.schedule, self._every, self.opt.clock)

    def _warming_up(self) -> bool:
        """Was the last step one of the warm-up?"""
        return self.opt.schedule.warms_up(self.opt.clock - 1)

    def _checkpoint_is_due(self, evaluated: bool) -> bool:
        if self.settings.checkpoint_every is None:
            return evaluated
        every = self.settings.checkpoint_every * self.opt.sync_every
        return self.opt.clock - self._saved_at >= every

    # -- records ---------------------------------------------------------------------------------

    def _record(self) -> None:
        """Record this worker's part of a line. The parts of all workers are joined at the next
        evaluation, so that recording sends no messages."""
        clock, warming_up = self.opt.clock, self._warming_up()
        due = self._evaluation_is_due() or clock >= self.steps
        if warming_up and not due and clock % max(1, self.steps // WARMUP_LINES):
            return
        ledger, settings = self.opt.ledger, self.settings
        loss_sum = float(self._loss)  # float() waits for a GPU, so the time is read after it
        self._records.append(
            {
                "step": clock,
                "gradient_steps": self.opt.gradient_steps,
                "time_s": self._elapsed(),
                "bytes_sent": ledger.bytes_sent,
                "syncs": ledger.syncs,
                "loss_sum": loss_sum,
                "losses": self._losses,
                "lr": learning_rate(settings, self.steps, clock),
                "workers": settings.workers,
                "distance": 0.0 if warming_up else ledger.distance,
                "mean_norm": self._mean_norm.take(),
            }
        )
        self._loss.zero_()
        self._losses = 0

    def _elapsed(self) -> float:
        return self._seconds + time.perf_counter() - self._resumed_at

    def _evaluate(self) -> None:
        """Evaluate the global model on all ranks together. Its seconds are no training seconds."""
        self._pause()
        if self._warming_up():  # as DDP itself does before its next forward pass
            for buffer in self.net.buffers():
                with waiting_for(None):
                    dist.broadcast(buffer, src=0)
        elif self.settings.buffers == "recompute":
            self._recompute_buffers()
        with self.opt.anchor_weights(), self._loop.autocast():
            found = evaluated(
                self.workload, self.net, part=self.rank, parts=self.world, summed=_summed
            )
        lines = self._joined_records()
        if self.opt.clock == 0:
            lines = [start_line(self.settings, self.steps, self.settings.workers)]
        self._evaluated_at = self.opt.clock
        lines[-1] |= found
        self._write(lines)
        with self.opt.anchor_weights():
            self._best.offer(found["metric"], self.net, step=self.opt.clock, writes=self.rank == 0)
        refuse_nonfinite(found, self.opt.clock)
        self._go_on()

    def _recompute_buffers(self) -> None:
        """Take the statistics of the global model anew. Dropout inside draws no random numbers of
        the training."""
        worker = self.rank // self.settings.ranks_per_worker
        batches = statistics_batches(self.workload, self.settings, worker)
        with random_numbers_kept(self.workload.device), self._loop.autocast():
            self.opt.recompute_buffers(
                batches, lambda _, batch: self.workload.loss(self.net, batch)
            )

    def _joined_records(self) -> list[dict[str, Any]]:
        """The lines from the records of all ranks since the last call."""
        everyone = gathered(self._records)
        self._records = []
        ranks = self.settings.ranks_per_worker
        return [_joined(parts, ranks) for parts in zip(*everyone, strict=True)]

    def _write(self, lines: list[dict[str, Any]]) -> None:
        self._lines += len(lines)
        if self.rank == 0:
            self.folder.append(lines)

    def _pause(self) -> None:
        wait_for(self.workload.device)
        self._seconds = self._elapsed()
        self._timeline.pause()

    def _go_on(self) -> None:
        barrier()
        self._resumed_at = time.perf_counter()
        self._timeline.go_on()

    def _config(self) -> dict[str, Any]:
        twin = {} if self._twin_of is None else {"twin_of": self._twin_of}
        return run_config(
            self.settings, self.workload, self.steps, engine="processes", model=self.net,
            command=self._command,
        ) | {"link": self._link, **twin}  # fmt: skip

    def _finish(self) -> None:
        lines = self.folder.lines()
        self.folder.write_summary(
            summarize(self.folder.config(), lines, plain(self.opt.ledger.as_dict()))
        )

    # -- checkpoints -----------------------------------------------------------------------------

    def _save(self) -> None:
        """Save a checkpoint. The lines of metrics.jsonl are written first, so that no checkpoint is
        ahead of them; those behind the last checkpoint are written again."""
        self._pause()
        self._write(self._joined_records())
        palsgd.checkpoint.save(self.folder.checkpoints, self.net, self.opt, extra=self._own_state())
        self._saved_at = self.opt.clock
        self._go_on()

    def _own_state(self) -> dict[str, Any]:
        """The state of this rank beside model and optimizer. What the run has is in that of every
        rank, as a disk may be lost."""
        gpu = self.workload.device.type == "cuda"
        return {
            "rng": torch.get_rng_state(),
            "gpu_rng": torch.cuda.get_rng_state(self.workload.device) if gpu else None,
            "loss": self._loss,
            "losses": self._losses,
            "spans": self._timeline.spans_to_save(),
            "time_s": self._seconds,
            "best": self._best.metric,
            "lines": self._lines,
            "batch_size": self.settings.batch_size,
            "gradient_steps": self._gradient_steps(),
            "changes": [change.as_dict() for change in self._loop.changes],
        }

    def _gradient_steps(self) -> list[int]:
        """Those of every worker."""
        return gathered(self.opt.gradient_steps)[:: self.settings.ranks_per_worker]

    # -- beginning and going on ------------------------------------------------------------------

    def _has_checkpoint(self) -> bool:
        """Does any rank see one, damaged or not? Machines may have disks of their own."""
        return any(gathered(bool(palsgd.checkpoint.find(self.folder.checkpoints))))

    def _resume(self, *, elastic: bool) -> None:
        """Go on from the newest checkpoint that is whole on all disks."""
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            loaded = palsgd.checkpoint.load(
                self.folder.checkpoints, self.net, self.opt, elastic=elastic
            )
        state, worker = _own_state_in(loaded), self.rank // self.settings.ranks_per_worker
        self._load_own_state(state, joins=loaded.source != worker)
        self._loop.changes = self._changes(state, loaded.workers)
        self._evaluated_at = self._saved_at = self.opt.clock
        if self.rank == 0:
            remarks = [str(each.message) for each in said]
            if len(self._loop.changes) > len(state["changes"]):
                remarks.append(said_of(self._loop.changes[-1], dealt=self._loop.deals_anew))
            if remarks:
                log.warning("palsgd: %s: %s", self.folder.path, "; ".join(remarks))
            self._record_changes()
            self.folder.keep_lines(until_step=self.opt.clock, written=self._lines)

    def _load_own_state(self, state: dict[str, Any], *, joins: bool) -> None:
        """`joins`: the state is another worker's, whose random numbers and sums are its own."""
        if joins:
            seed = random_stream(self.settings.seed, self.rank, self.opt.clock).integers(2**63)
            torch.manual_seed(int(seed))
        else:
            torch.set_rng_state(state["rng"].cpu())
            if state["gpu_rng"] is not None and self.workload.device.type == "cuda":
                torch.cuda.set_rng_state(state["gpu_rng"].cpu(), self.workload.device)
            self._loss.copy_(state["loss"])
            self._losses = state["losses"]
            self._timeline.restore(state["spans"])
        self._lines, self._seconds = state["lines"], state["time_s"]
        self._best.metric = state["best"] if self._has_best() else None
        self._timeline.go_on(at=self._seconds)

    def _has_best(self) -> bool:
        """Is the best model so far there? If not, the next one is the best that there is."""
        return all(gathered(self.rank != 0 or self.folder.best_path.exists()))

    def _changes(self, state: dict[str, Any], workers: int) -> tuple[Change, ...]:
        """Those before the checkpoint, and the one that there is now."""
        change = Change(
            step=self.opt.clock,
            workers=(workers, self.settings.workers),
            batch_size=(state["batch_size"], self.settings.batch_size),
            taken=tuple(state["gradient_steps"]),
            begins=tuple(self._gradient_steps()),
        )
        return (*changes_in(state), *([change] if change.is_one else []))

    def _record_changes(self) -> None:
        """config.yaml with what the run is now, and with how it came to be."""
        there = (self.folder.path / "config.yaml").exists()
        before = self.folder.config() if there else self._config()
        config = {name: value for name, value in before.items() if name != "changes"}
        config |= {name: getattr(self.settings, name) for name in ("workers", "batch_size")}
        if self._loop.changes:
            config["changes"] = [change.as_dict() for change in self._loop.changes]
        if not there or config != before:
            self.folder.create(config)


def _own_state_in(loaded: palsgd.checkpoint.Loaded) -> dict[str, Any]:
    """What `_own_state` gave to a checkpoint, unless a program of the user's has saved it."""
    if not isinstance(loaded.extra, dict) or "changes" not in loaded.extra:
        raise ValueError(
            f"{loaded.path} was not saved by a run of the lab; move it away to go on from another"
        )
    return loaded.extra


def run_config(
    settings: Settings,
    workload: Workload,
    steps: int,
    *,
    engine: str,
    model: nn.Module,
    command: Sequence[str] | None = None,
) -> dict[str, Any]:
    """The contents of config.yaml: the resolved settings, the program and the machine."""
    return (
        settings.as_dict()
        | own_files(settings)
        | {
            "steps": steps,
            "palsgd": palsgd.__version__,
            **provenance(command),
            "torch": str(torch.__version__),
            "device": device_words(workload.device),
            "simulated": engine != "processes",
            "engine": engine,
            "metric": workload.metric,
            "higher_is_better": workload.higher_is_better,
            "floor": None if workload.floor is None else float(workload.floor),
            "parameters": sum(p.numel() for p in model.parameters() if p.requires_grad),
        }
    )


def own_files(settings: Settings) -> dict[str, str | None]:
    """Hashes of the files of the user's own workload and method, where the run has such."""
    found = {
        "workload_sha256": workloads.sha256(settings.workload),
        "method_sha256": registry.sha256(settings.method),
    }
    return {key: value for key, value in found.items() if value is not None}


def _summed(totals: torch.Tensor) -> torch.Tensor:
    with waiting_for(None):
        dist.all_reduce(totals)
    return totals


def _joined(parts: tuple[dict[str, Any], ...], ranks: int = 1) -> dict[str, Any]:
    """One line of metrics.jsonl from the records of the same exchange by all ranks, `ranks` for
    each worker. The ranks of a worker send its bytes together."""
    line = dict(parts[0])
    line["bytes_sent"] = sum(part["bytes_sent"] for part in parts[:ranks])
    losses = sum(part["losses"] for part in parts)
    distances = [part["distance"] for part in parts[::ranks]]
    total, mean_norm = sum(part["loss_sum"] for part in parts), line.pop("mean_norm")
    del line["loss_sum"], line["losses"]
    return line | {
        "train_loss": total / losses if losses else None,
        "distance": distances,
        "agreement": agreement(mean_norm, distances),
    }


def start_line(settings: Settings, steps: int, workers: int) -> dict[str, Any]:
    zeros = dict.fromkeys(("step", "gradient_steps", "time_s", "bytes_sent", "syncs"), 0)
    return zeros | {
        "train_loss": None,
        "lr": learning_rate(settings, steps, 0),
        "workers": workers,
        "distance": [0.0] * workers,
        "agreement": None,
    }

"""One run in processes of which some may die and come back: the work of each process.

There is no process group, so the workers exchange nothing but syncs. At each sync the lowest of
those who took part writes for all: its line of metrics.jsonl, the best model, a checkpoint. All of
them evaluate, so that nobody comes late to the next sync because it was the one to write.
"""

import shutil
import time
from typing import Any

import torch

import palsgd
from palsgd.checkpoint.everyone import speaks_for_all, took_part
from palsgd.events import Synced
from palsgd.lab.data.sharding import random_stream
from palsgd.lab.evaluation import BestModel, evaluated, evaluation_is_due, refuse_nonfinite
from palsgd.lab.factory import learning_rate
from palsgd.lab.run_folder import Line, RunFolder, plain
from palsgd.lab.settings import Settings
from palsgd.lab.summary import summarize
from palsgd.lab.trainer import LeftError, run_config, start_line
from palsgd.lab.worker_changes import changes_of
from palsgd.lab.worker_loop import WorkerLoop
from palsgd.lab.workload import Workload
from palsgd.progress import Whole

_COUNTED = ("bytes_sent", "syncs")  # by a worker's own ledger


class ElasticTrainer:
    """This process's part of a run. A newcomer makes one too, and is let in meanwhile."""

    def __init__(
        self,
        settings: Settings,
        workload: Workload,
        folder: RunFolder,
        transport: palsgd.ElasticTransport,
        *,
        resume: bool = False,
        quiet: bool = False,
    ):
        self.settings = settings = settings.in_steps(workload.examples)
        self.workload, self.folder = workload, folder
        self._loop = WorkerLoop(settings, workload, transport=transport)
        self.net, self.opt, self.steps = self._loop.net, self._loop.opt, self._loop.steps
        self._every = settings.evaluate_every or max(1, self.steps // 20)
        self._loss, self._losses = torch.zeros((), device=workload.device), 0
        self._saved_at = 0
        self._best = BestModel(folder, higher_is_better=workload.higher_is_better)
        self._line: Line = {}  # of the last sync
        self._written: Line | None = None  # the last line, if this worker wrote it
        self._zero = time.time()  # seconds count from here, those of evaluations too
        self._before = dict.fromkeys(_COUNTED, 0)  # what the ledger does not have
        self._quiet = quiet or transport.worker != 0
        if self.opt.clock:
            self._take_up()
        elif resume and palsgd.checkpoint.find(folder.checkpoints):
            self._resume()
        elif speaks_for_all(self.opt):
            folder.begin(self._config(), resume=resume)
        self.opt.on(Synced, self._after_sync)
        palsgd.leave_on_sigterm(self.opt)

    # -- the loop --------------------------------------------------------------------------------

    def train(self, whole: Whole | None = None) -> None:
        """`whole` is what the run is part of."""
        if self.opt.clock == 0:
            self._line = start_line(self.settings, self.steps, self.settings.workers)
            self._write(self._line | self._evaluation())
        with self._loop.progress(quiet=self._quiet, whole=whole) as bar:
            for batch in palsgd.until(self._loop.batches(), self.opt, steps=self.steps):
                self._loss += self._loop.gradient(batch)
                self._losses += 1
                self.opt.step()
                self.opt.zero_grad()
                bar.at(self.opt.clock)
        self._write(self._line | self._evaluation())
        if speaks_for_all(self.opt):
            ledger = plain(self.opt.ledger.as_dict())
            self.folder.write_summary(summarize(self.folder.config(), self.folder.lines(), ledger))
            shutil.rmtree(self.folder.checkpoints, ignore_errors=True)

    def _after_sync(self, event: Synced) -> None:
        """Record, evaluate and save. The last sync is left to train()."""
        if not event.completes:
            return
        self._line = self._recorded()
        if self.opt.clock >= self.steps:
            return
        due = evaluation_is_due(self.opt.schedule, self._every, self.opt.clock)
        self._write(self._line | (self._evaluation() if due else {}))
        every = (self.settings.checkpoint_every or 0) * self.opt.sync_every
        saves = self.opt.clock - self._saved_at >= every if every else due
        if saves or self.opt.leaving:
            self._save()
        if self.opt.leaving:
            raise LeftError

    # -- records ---------------------------------------------------------------------------------

    def _recorded(self) -> Line:
        """A line by this worker: its own losses and its own distance, and who took part."""
        ledger, clock, members = self.opt.ledger, self.opt.clock, took_part(self.opt)
        loss = float(self._loss) / self._losses if self._losses else None
        self._loss.zero_()
        self._losses = 0
        return {
            "step": clock,
            "gradient_steps": self.opt.gradient_steps,
            "time_s": time.time() - self._zero,
            **{name: self._before[name] + getattr(ledger, name) for name in _COUNTED},
            "train_loss": loss,
            "lr": learning_rate(self.settings, self.steps, clock),
            "workers": len(members),
            "members": members,
            "by": self.opt.transport.worker,
            "distance": [ledger.distance],
            "agreement": None,
        }

    def _evaluation(self) -> dict[str, Any]:
        with self.opt.anchor_weights(), self._loop.autocast():
            found = evaluated(self.workload, self.net)
            self._best.offer(
                found["metric"], self.net, step=self.opt.clock, writes=speaks_for_all(self.opt)
            )
        refuse_nonfinite(found, self.opt.clock)
        return found

    def _write(self, line: Line) -> None:
        """Add a line to metrics.jsonl, if this worker speaks for all, and to config.yaml that the
        number of workers has changed, if it has."""
        if not speaks_for_all(self.opt):
            self._written = None
            return
        before = self._written or self._taken_over()
        self.folder.append([line])
        self._written = line
        if before is not None and before["workers"] != line["workers"]:
            self._record_changes()

    def _record_changes(self) -> None:
        changes = changes_of(self.folder.lines(), self.settings.batch_size)
        found = {"changes": [change.as_dict() for change in changes]}
        self.folder.create(self.folder.config() | found)

    def _taken_over(self) -> Line | None:
        """The last line that another worker wrote. It may have been killed while it wrote, so what
        it had not finished is dropped."""
        lines = self.folder.lines_and_cut()[0]
        self.folder.write_lines(lines)
        return lines[-1] if lines else None

    # -- checkpoints, beginning and going on -----------------------------------------------------

    def _save(self) -> None:
        extra = {"time_s": time.time() - self._zero, "best": self._best.metric}
        palsgd.checkpoint.save(self.folder.checkpoints, self.net, self.opt, extra=extra)
        self._saved_at = self.opt.clock

    def _config(self) -> dict[str, Any]:
        config = run_config(
            self.settings, self.workload, self.steps, engine="processes", model=self.net
        )
        return config | {"goes_on": True}

    def _resume(self) -> None:
        """Go on from the newest checkpoint that is whole."""
        loaded = palsgd.checkpoint.load(self.folder.checkpoints, self.net, self.opt)
        self._zero -= loaded.extra["time_s"]
        self._best.metric, self._saved_at = loaded.extra["best"], self.opt.clock
        self._draw_anew()
        if speaks_for_all(self.opt):
            self.folder.keep_lines(until_step=self.opt.clock, written=0)
            self._record_changes()

    def _take_up(self) -> None:
        """Go on from what a newcomer was given, and from the lines of the others."""
        lines, _ = self.folder.lines_and_cut()
        if lines:
            self._before = {name: lines[-1][name] for name in _COUNTED}
            self._zero = self.folder.written_at - lines[-1]["time_s"]
        best = self.folder.best()
        self._best.metric, self._saved_at = None if best is None else best["metric"], self.opt.clock
        self._draw_anew()

    def _draw_anew(self) -> None:
        """Random numbers other than those of the steps that are behind this worker."""
        place = (self.settings.seed, self.opt.transport.worker, self.opt.clock)
        torch.manual_seed(int(random_stream(*place).integers(2**63)))

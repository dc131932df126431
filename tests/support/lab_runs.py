"""Runs of the lab by the processes of a test, which can be stopped where a test wants."""

import logging
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from palsgd.lab import workloads
from palsgd.lab.run_folder import RunFolder
from palsgd.lab.settings import Settings
from palsgd.lab.trainer import Trainer


class StoppedError(Exception):
    pass


class StoppingTrainer(Trainer):
    """Ends as a kill does: nothing is written after the checkpoint at `stop_at`."""

    stop_at: int | None = None

    def _save(self) -> None:
        super()._save()
        if self.stop_at is not None and self.opt.clock >= self.stop_at:
            raise StoppedError


@dataclass
class Trained:
    said: list[str]  # what a user reads
    model: dict[str, Tensor]  # the global one


def train(settings: Settings, folder: Path, *, stop_at: int | None = None, **how: Any) -> Trained:
    """What each process of a run does."""
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    log = logging.getLogger("palsgd")
    log.addHandler(handler)
    try:
        workload = workloads.load(settings.workload, **workloads.data_settings(settings))
        trainer = StoppingTrainer(settings, workload, RunFolder(folder), quiet=True, **how)
        trainer.stop_at = stop_at
        with suppress(StoppedError):
            trainer.train()
        with trainer.opt.anchor_weights():
            model = {name: value.clone() for name, value in trainer.net.state_dict().items()}
        return Trained(said, model)
    finally:
        log.removeHandler(handler)

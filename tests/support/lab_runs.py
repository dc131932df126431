"""Runs of the lab by the processes of a test, which can be stopped where a test wants."""

import logging
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

from torch import Tensor

import palsgd
from palsgd.lab import workloads
from palsgd.lab.run_folder import RunFolder
from palsgd.lab.settings import Settings
from palsgd.lab.trainer import Trainer


class StoppedError(Exception):
    pass


def stop_after_save(clock: int) -> Any:
    """Ends all workers as a kill does, in the moment in which the checkpoint at this clock, or the
    first one after it, has its name."""
    save = palsgd.checkpoint.save

    def saved(folder: Path, model: Any, opt: palsgd.LocalOptimizer, **how: Any) -> Path:
        path = save(folder, model, opt, **how)
        if opt.clock >= clock:
            raise StoppedError
        return path

    return mock.patch.object(palsgd.checkpoint, "save", saved)


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
        trainer = Trainer(settings, workload, RunFolder(folder), quiet=True, **how)
        with suppress(StoppedError), nullcontext() if stop_at is None else stop_after_save(stop_at):
            trainer.train()
        with trainer.opt.anchor_weights():
            model = {name: value.clone() for name, value in trainer.net.state_dict().items()}
        return Trained(said, model)
    finally:
        log.removeHandler(handler)

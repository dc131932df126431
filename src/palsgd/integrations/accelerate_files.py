"""The state of each worker, in files beside those that accelerate's `save_state` writes."""

import functools
from collections.abc import Callable
from copy import deepcopy
from pathlib import Path
from typing import Any

from torch import nn

from palsgd import checkpoint
from palsgd.local_optimizer import LocalOptimizer
from palsgd.packing import numbers
from palsgd.replica import unwrapped

FOLDER = "palsgd"  # of the workers' own files, in a folder of save_state()


class OwnFiles:
    """For models of which every process has a copy. accelerate writes what process 0 has."""

    def __init__(self, opt: LocalOptimizer):
        self._opt = opt
        self._folder: Path | None = None  # what load_state is about to load

    def register(self, accelerator: Any) -> None:
        accelerator.register_save_state_pre_hook(self._save)
        accelerator.register_load_state_pre_hook(self._find)
        self._opt.register_load_state_dict_pre_hook(self._load)

    def _place(self, models: list[nn.Module]) -> int:
        inside = unwrapped(self._opt.model)
        return next(i for i, model in enumerate(models) if unwrapped(model) is inside)

    def _path(self, models: list[nn.Module], folder: str) -> Path:
        """Numbered as accelerate numbers its own files of several models."""
        place = self._place(models)
        return Path(folder) / (FOLDER if place == 0 else f"{FOLDER}_{place}")

    def _save(self, models: list[nn.Module], weights: list[Any], folder: str) -> None:
        opt, place = self._opt, self._place(models)
        checkpoint.save(self._path(models, folder), opt.model, opt, keep=1)
        with opt.anchor_weights():
            weights[place] = deepcopy(models[place].state_dict())  # what is tied stays tied

    def _find(self, models: list[nn.Module], folder: str) -> None:
        self._folder = self._path(models, folder)

    def _load(self, opt: Any, state: dict[str, Any]) -> dict[str, Any] | None:
        """Load this worker's own files in place of process 0's state, after accelerate has loaded
        the model. The state of a plain optimizer goes into the inner one."""
        folder, self._folder = self._folder, None
        if folder is None or not _is_local(state):
            return None
        checkpoint.load(folder, opt.model, opt)
        found: dict[str, Any] = opt.state_dict()
        return found


def _is_local(state: dict[str, Any]) -> bool:
    """Is this the state of a palsgd optimizer?"""
    try:
        numbers(state)
    except ValueError:
        return False
    return True


class ShardedFiles:
    """For a model that accelerate shards. It writes and reads the shards before it calls hooks."""

    def __init__(self, opt: LocalOptimizer):
        self._opt = opt

    def register(self, accelerator: Any) -> None:
        accelerator.register_save_state_pre_hook(self._save)
        accelerator.register_load_state_pre_hook(self._load)
        accelerator.save_state = self._with_the_global_model(accelerator.save_state)

    def _with_the_global_model(self, save_state: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(save_state)
        def save(*args: Any, **kwargs: Any) -> Any:
            lasts = self._opt._evaluation.lasts  # then the user ends it
            self._opt.eval()
            try:
                return save_state(*args, **kwargs)
            finally:
                if not lasts:
                    self._opt.train()

        return save

    def _save(self, models: list[nn.Module], weights: list[Any], folder: str) -> None:
        checkpoint.save(Path(folder) / FOLDER, self._opt.model, self._opt, keep=1)

    def _load(self, models: list[nn.Module], folder: str) -> None:
        checkpoint.load(Path(folder) / FOLDER, self._opt.model, self._opt)

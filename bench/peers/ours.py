"""palsgd's own methods, through its public names only."""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from task import MAX_NORM, SEED, Task
from torch import nn
from torch.optim.lr_scheduler import LambdaLR
from trainee import Trainee

import palsgd


def optimizer(
    model: nn.Module, inner: torch.optim.Optimizer, task: Task, *, method: str,
    outer: list[float] | None = None, seed: int = SEED, **settings: Any,
) -> Any:  # fmt: skip
    """palsgd's optimizer of that name, the same in processes and in the simulator."""
    if outer is not None:
        settings["outer"] = palsgd.nesterov(*outer)
    if method == "PALSGD":
        settings["seed"] = seed
    scheduler = partial(LambdaLR, lr_lambda=task.lr_factor)
    return getattr(palsgd, method)(
        model, inner, scheduler=scheduler, max_norm=MAX_NORM, **settings
    )  # fmt: skip


class Ours(Trainee):
    clips = False  # the optimizer does

    def __init__(self, *args: Any, **settings: Any):
        self.settings = settings
        super().__init__(*args)

    def prepare(self) -> None:
        self.opt = optimizer(self.net, self.inner, self.task, **self.settings)
        # What a sync sends is applied so many steps later; then nothing is under way.
        self.delay = self.settings.get("delay", 0)

    def step_all(self) -> None:
        self.opt.step()
        self.clock, self.gradient_steps = self.opt.clock, self.opt.gradient_steps

    @contextmanager
    def global_model(self) -> Iterator[nn.Module]:
        with self.opt.anchor_weights():
            yield self.net

    def close(self) -> None:
        self.opt.finish()

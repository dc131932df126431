"""palsgd's own methods, through its public names only."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from task import SEED
from torch import nn
from torch.optim.lr_scheduler import LambdaLR
from trainee import Trainee

import palsgd


class Ours(Trainee):
    def __init__(self, *args: Any, method: str, outer: list[float] | None = None, **settings: Any):
        self.method, self.settings = getattr(palsgd, method), settings
        if outer is not None:
            self.settings["outer"] = palsgd.nesterov(*outer)
        if method == "PALSGD":
            self.settings["seed"] = SEED
        super().__init__(*args)

    def prepare(self) -> None:
        self.opt = self.method(
            self.net,
            self.inner,
            scheduler=lambda opt: LambdaLR(opt, self.task.lr_factor),
            **self.settings,
        )
        self.opt.run_until(self.task.steps)

    def step_all(self) -> None:
        self.opt.step()
        self.clock, self.gradient_steps = self.opt.clock, self.opt.gradient_steps

    def round_ended(self) -> bool:
        # with a delay the new global model comes that many steps into the next round, and where
        # that round begins some workers mix past it
        return self.opt.synced

    @contextmanager
    def global_model(self) -> Iterator[nn.Module]:
        with self.opt.anchor_weights():
            yield self.net

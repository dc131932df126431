"""Hugging Face accelerate's LocalSGD."""

import os
from typing import Any

from trainee import Trainee


class AccelerateLocalSGD(Trainee):
    def __init__(self, *args: Any, sync_every: int):
        self.sync_every = sync_every
        super().__init__(*args)

    def prepare(self) -> None:
        os.environ["ACCELERATE_USE_CPU"] = "true"
        from accelerate import Accelerator
        from accelerate.local_sgd import LocalSGD

        super().prepare()
        accelerator = Accelerator()
        self.model = accelerator.prepare_model(self.net)
        self.local = LocalSGD(accelerator, self.model, local_sgd_steps=self.sync_every)
        if not self.local.enabled:
            raise RuntimeError("accelerate turned its LocalSGD off: it sees a single process")
        self.local.__enter__()

    def step_all(self) -> None:
        super().step_all()
        self.local.step()

    def close(self) -> None:
        self.local.__exit__(None, None, None)

"""What all contenders share: the loop's body, the inner optimizer, the schedule."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from task import MAX_NORM, Task
from torch import nn
from torch.optim.lr_scheduler import LambdaLR


class Trainee:
    """One way to train `net`. As it stands: AdamW alone, nothing sent, which is the compute time
    that all others are measured against."""

    clips = True
    delay = 0  # steps after the end of a round at which nothing is under way any more

    def __init__(self, task: Task):
        self.task = task
        self.net = task.model()
        self.model = self.net  # what the forward pass goes through: the net, or a wrapper of it
        self.inner = torch.optim.AdamW(self.net.parameters(), lr=task.size.lr, fused=True)
        self.clock = self.gradient_steps = 0
        self.prepare()

    def prepare(self) -> None:
        """Wrap what must be wrapped. `self.step_all()` is called after each backward pass."""
        self.scheduler = LambdaLR(self.inner, self.task.lr_factor)

    def step(self, worker: int) -> None:
        self.model(*self.task.next_batch(worker, self.gradient_steps)).backward()
        if self.clips:
            nn.utils.clip_grad_norm_(self.net.parameters(), MAX_NORM)
        self.step_all()
        self.inner.zero_grad()

    def step_all(self) -> None:
        self.inner.step()
        self.scheduler.step()
        self.clock += 1
        self.gradient_steps += 1

    @contextmanager
    def global_model(self) -> Iterator[nn.Module]:
        """Asked for where nothing is under way: here, the model as it is."""
        yield self.net

    def close(self) -> None:
        """End what runs beside the training."""

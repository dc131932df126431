"""A workload of one's own, in the commands of the lab (pip install 'palsgd[lab]'):

    palsgd compare examples/custom_workload.py --methods ddp,diloco,palsgd --simulate

Short signals of one of four frequencies, with noise and any phase. Which one is it? Data from files
are read in `load` in the same way: `self.data` is the folder that `--data` names.
"""

from typing import ClassVar

import torch
from torch import Tensor, nn

from palsgd.lab.workload import Workload

LENGTH, CLASSES = 64, 4
SEARCH = {"lr": (1e-3, 1e-2), "outer_lr": (0.3, 1.0), "pull": (0.2, 0.8)}  # for palsgd tune


class Signals(Workload):
    metric, higher_is_better = "accuracy", True
    labelled = True  # the last tensor is the class, by which --sharding dirichlet:0.3 deals
    recipe: ClassVar = {"workers": 4, "steps": 320, "sync_every": 16, "lr": 3e-3, "pull": 0.5}

    def load(self) -> None:
        random = torch.Generator().manual_seed(0)  # the same data, whatever the seed of a run
        labels = torch.arange(4096) % CLASSES
        phase = 2 * torch.pi * torch.rand(4096, 1, generator=random)
        time = torch.linspace(0, 2 * torch.pi, LENGTH)
        clean = torch.sin((2 + labels)[:, None] * time + phase)
        noisy = clean + torch.randn(4096, LENGTH, generator=random)
        self.train, self.valid = (noisy[:3072], labels[:3072]), (noisy[3072:], labels[3072:])

    def model(self) -> nn.Module:
        return nn.Sequential(nn.Linear(LENGTH, 128), nn.ReLU(), nn.Linear(128, CLASSES))

    def loss(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        signals, labels = batch
        return nn.functional.cross_entropy(model(signals), labels)

    def measure(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        signals, labels = batch
        return (model(signals).argmax(1) == labels).float().mean()

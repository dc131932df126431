"""CIFAR-10 and the paper's small CNN, for studies with many workers."""

from dataclasses import replace
from pathlib import Path

from torch import Tensor, nn

from palsgd.lab.classification import Batch, InMemory
from palsgd.lab.data import cifar10, sources
from palsgd.lab.settings import Settings

# The paper gives no batch size: 32 is ours. Learning rates are from its grid. docs/paper.md
# compares every setting.
_PAPER = Settings(
    workload="cifar10-cnn", workers=4, epochs=100, batch_size=32, sync_every=32, mix_prob=0.25,
    mix_rate=1.0, sharding="fixed", inner="sgd", lr=1e-2, outer_lr=0.1, whole_rounds=True,
)  # fmt: skip
RECIPES = {"cifar10-cnn": _PAPER} | {
    f"cifar10-cnn-k{workers}": replace(_PAPER, workers=workers) for workers in (8, 16, 32, 64)
}
GRIDS = {
    "cifar10-cnn/K": {"workers": [4, 8, 16, 32, 64]},
    "cifar10-cnn/lr": {"lr": [1e-2, 1e-3, 1e-4], "outer_lr": [1.0, 0.1, 0.01]},
}
# lr and outer_lr have the paper's ranges, p those of its other studies.
SEARCH = {
    "lr": (1e-4, 3e-2),
    "schedule": ["constant", "cosine"],
    "sync_every": [32],
    "outer_lr": (0.01, 1.0),
    "outer_momentum": [0.5, 0.9],
    "mix_prob": [0.05, 0.1],
    "pull": (0.05, 0.6),
    "decay": (0.003, 0.03),
}


class Cifar10(InMemory):
    """CIFAR-10 as a workload's data. Pixels stay bytes until the loss converts those of a batch."""

    source = sources.Cifar10()
    examples = 50_000
    judged_on = "metric"
    held_out = 0.1

    def load(self) -> None:
        folder = self.source.place(self.data)
        self._colours = cifar10.colours(self.device)
        train, test = (self._read(folder, split) for split in cifar10.SPLITS)
        assert train is not None
        self.keep(train, test)

    def _read(self, folder: Path, split: str) -> Batch | None:
        if (self.split, split) == ("choose", "test"):
            return None
        found = cifar10.load_split(folder, split).to(self.device)
        return found.images, found.labels

    def inputs(self, images: Tensor) -> Tensor:
        return self._colours(images)


class Cifar10CNN(Cifar10):
    name = "cifar10-cnn"

    def model(self) -> nn.Module:
        return nn.Sequential(
            nn.Conv2d(3, 32, 5, padding=2), nn.ReLU(), nn.MaxPool2d(2),
            nn.Conv2d(32, 64, 5, padding=2), nn.ReLU(), nn.MaxPool2d(2),
            nn.Flatten(), nn.Linear(4096, 1024), nn.ReLU(), nn.Linear(1024, 10),
        )  # fmt: skip

"""The handwritten digits and a small residual net with BatchNorm: the tiny version of ResNets."""

from torch import Tensor, nn

from palsgd.lab.settings import Settings
from palsgd.lab.workloads.digits import SEARCH as DIGITS
from palsgd.lab.workloads.digits import Digits

RECIPES = {
    "TinyResNet": Settings(
        workload="digits", workers=4, steps=160, batch_size=16, sync_every=8, mix_prob=0.125,
        pull=0.5, inner="nesterov", lr=0.05, outer_lr=0.7, outer_momentum=0.5,
    ),
}  # fmt: skip
SEARCH = {
    "lr": (0.01, 0.3),
    "outer_lr": DIGITS["outer_lr"],
    "outer_momentum": [0.0, 0.5],
    "pull": DIGITS["pull"],
    "decay": (0.003, 0.1),
}


class TinyResNet(Digits):
    name = "TinyResNet"
    judged_on = "metric"

    def inputs(self, images: Tensor) -> Tensor:
        return images.unflatten(-1, (1, 8, 8))

    def model(self) -> nn.Module:
        return nn.Sequential(
            nn.Conv2d(1, 8, 3, padding=1, bias=False), Residual(8), Residual(8),
            nn.AvgPool2d(4), nn.Flatten(), nn.Linear(32, 10),
        )  # fmt: skip


class Residual(nn.Module):
    def __init__(self, width: int):
        super().__init__()
        self.change = nn.Sequential(
            nn.BatchNorm2d(width), nn.ReLU(), nn.Conv2d(width, width, 3, padding=1, bias=False)
        )

    def forward(self, x: Tensor) -> Tensor:
        return x + self.change(x)

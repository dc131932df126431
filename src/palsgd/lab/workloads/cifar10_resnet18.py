"""CIFAR-10 and ResNet-18 for small pictures: Table 1 of SlowMo (Wang, Tantia, Ballas, Rabbat)."""

from torch import nn

from palsgd.lab.settings import Settings
from palsgd.lab.workloads.cifar10_vgg16 import ShiftedCifar10

# The table has 4096 pictures a step in all, H = 12, and a learning rate tuned for each method that
# is divided by 10 at epochs 100, 150 and 175 of 200: shares of the run, so that a shorter one has
# them too. p, pull and the outer step of DiLoCo and PALSGD are ours. docs/paper.md compares every
# setting.
RECIPES = {
    "cifar10-resnet18": Settings(
        workload="cifar10-resnet18", workers=32, epochs=200, batch_size=128, sync_every=12,
        mix_prob=0.1, pull=0.5, inner="nesterov", lr=0.2, weight_decay=1e-4, schedule="step",
        schedule_at="0.5:0.75:0.875", lr_warmup_epochs=5, outer_lr=0.7, outer_momentum=0.5,
        whole_rounds=True,
    ),
}  # fmt: skip
GRIDS: dict[str, dict[str, list]] = {}
# SlowMo's momentum has the range of its paper. Learning rates reach from that of one worker's batch
# to that of the whole one.
SEARCH = {
    "lr": (0.05, 3.2),
    "outer_lr": (0.4, 1.2),
    "outer_momentum": [0.0, 0.3, 0.6],
    "mix_prob": [0.0833, 0.1667],
    "pull": (0.05, 0.6),
    "method.momentum": [0.4, 0.5, 0.6, 0.7, 0.8],
    "decay": (0.003, 0.1),
}


class Cifar10ResNet18(ShiftedCifar10):
    name = "cifar10-resnet18"
    graphs = True
    channels_last = True

    def model(self) -> nn.Module:
        from torchvision.models import resnet18  # type: ignore[import-untyped]

        model = resnet18(num_classes=10)
        # A picture of 32 x 32 keeps its size up to the first block.
        model.conv1 = nn.Conv2d(3, 64, 3, padding=1, bias=False)
        model.maxpool = nn.Identity()
        return model

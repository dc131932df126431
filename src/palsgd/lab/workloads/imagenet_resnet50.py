"""ImageNet-1K, or any photographs in folders by class, and ResNet-50."""

from collections.abc import Iterator

from torch import nn

from palsgd.lab.classification import Batch, Classification, sample_slices
from palsgd.lab.data import sources
from palsgd.lab.data.images import open_folders
from palsgd.lab.data.sharding import Changes
from palsgd.lab.settings import Settings
from palsgd.lab.workload import parts_of

# The paper gives ranges for outer_lr (.1 to .2) and eta (.5 to 16). Momentum, weight decay and the
# schedule are those of its released code, as the paper is silent. docs/paper.md compares every
# setting.
_DECAY = 2**-15  # 3.05e-5
RECIPES = {
    "imagenet-resnet50": Settings(
        workload="imagenet-resnet50", workers=4, epochs=90, batch_size=64, sync_every=64,
        mix_prob=0.05, mix_rate=4.0, warmup_steps=200_000, sharding="fixed", inner="sgd", lr=1e-3,
        momentum=0.875, weight_decay=_DECAY, schedule="cosine", lr_warmup_epochs=3, outer_lr=0.2,
        outer_momentum=0.875, outer_weight_decay=_DECAY, precision="bf16", target=0.75,
        target_on="metric",
        whole_rounds=True,
    ),
}  # fmt: skip
GRIDS = {
    "imagenet-resnet50/eta": {"mix_rate": [0.5, 1.0, 2.0, 4.0, 8.0, 16.0]},
    "imagenet-resnet50/lr": {"outer_lr": [0.1, 0.2]},
}
# outer_lr has the paper's range. lr is 1e-3 there; fewer photographs need more.
SEARCH = {
    "lr": (3e-4, 1e-1),
    "schedule": ["constant", "cosine"],
    "sync_every": [32, 64],
    "outer_lr": (0.1, 0.2),
    "outer_momentum": [0.5, 0.9],
    "mix_prob": [0.05, 0.1],
    "pull": (0.05, 0.6),
    "decay": (0.003, 0.03),
}


class ImageNetResNet50(Classification):
    name = "imagenet-resnet50"
    source = sources.ImageNet()
    examples = 1_281_167
    judged_on = "metric"
    graphs = True
    channels_last = True
    held_out = 0.01
    resolution = 224

    def load(self) -> None:
        folder = self.source.place(self.data)
        self.photographs = open_folders(
            folder, resolution=self.resolution, seed=self.seed, device=self.device,
            sharding=self.sharding,
            held_out=self.held_out if self.split == "choose" else None,
        )  # fmt: skip
        self.examples = len(self.photographs.train)

    def model(self) -> nn.Module:
        from torchvision.models import resnet50  # type: ignore[import-untyped]

        return resnet50(num_classes=len(self.photographs.train.classes))

    def batch(
        self, *, worker: int, workers: int, size: int, index: int, changes: Changes = ()
    ) -> Batch:
        images, labels = self.photographs.batch(
            worker=worker, workers=workers, size=size, index=index, changes=changes
        )
        return self.arranged(images), labels

    def validation(self, part: int, parts: int) -> Iterator[Batch]:
        for own in parts_of(len(self.photographs.val), part, parts, size=256):
            yield self.photographs.plain("val", own)

    def training_sample(self, part: int, parts: int) -> Iterator[Batch]:
        for own in sample_slices(self.examples, part, parts, size=256):
            yield self.photographs.plain("train", own)

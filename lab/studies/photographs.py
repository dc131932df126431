"""ResNet-50 on photographs of 96 x 96, at that size.

The photographs at hand are that small. Enlarged to ImageNet's 224 they would say nothing more, and
a gradient would take five times as long.
"""

from dataclasses import replace

from palsgd.lab.workloads import recipe
from palsgd.lab.workloads.imagenet_resnet50 import SEARCH as IMAGENET
from palsgd.lab.workloads.imagenet_resnet50 import ImageNetResNet50

# A few hundred steps reach no target of ImageNet's, and a learning rate that fits them would make
# the paper's eta overshoot the anchor. A pull of 0.25 is what eta = 4 does in a round at the
# paper's learning rate: 1 - (1 - 0.001 * 4 / 0.05)^(0.05 * 64) = 0.23.
RECIPES = {
    "ResNet50At96": replace(
        recipe("imagenet-resnet50"), epochs=None, steps=768, warmup_steps=320, lr_warmup_epochs=0.0,
        lr_warmup_steps=32, whole_rounds=False, mix_rate=None, pull=0.25, lr=0.1, target=None,
    ),
}  # fmt: skip
SEARCH = IMAGENET


class ResNet50At96(ImageNetResNet50):
    name = "ResNet50At96"
    examples = 9_469
    held_out = 0.1
    resolution = 96

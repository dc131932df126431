"""Random crops of images, and their resizing."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from palsgd.simulator.batches import sent

CHANCES = (11, 4)  # uniform numbers for one crop: ten tries at a box, then mirrored or not


@dataclass(frozen=True)
class Crop:
    top: int
    left: int
    height: int
    width: int
    mirrored: bool


def random_crop(height: int, width: int, chances: np.ndarray) -> Crop:
    """As torchvision's RandomResizedCrop and RandomHorizontalFlip: 8 to 100% of the area, sides in
    a ratio of 3:4 to 4:3; where ten tries do not fit, the middle."""
    mirrored = bool(chances[-1, 0] < 0.5)
    for area, ratio, down, across in chances[:-1]:
        pixels = height * width * (0.08 + 0.92 * area)
        root = math.exp((ratio - 0.5) * math.log(4 / 3))  # of the ratio
        w, h = round(math.sqrt(pixels) * root), round(math.sqrt(pixels) / root)
        if 0 < w <= width and 0 < h <= height:
            top, left = int(down * (height - h + 1)), int(across * (width - w + 1))
            return Crop(top, left, h, w, mirrored)
    w, h = min(width, round(height * 4 / 3)), min(height, round(width * 4 / 3))
    return Crop((height - h) // 2, (width - w) // 2, h, w, mirrored)


def zoomed(images: Tensor, crops: Sequence[Crop], resolution: int) -> Tensor:
    """Each image's crop at `resolution`, all at once on their device. For enlarging: it reads the
    nearest four pixels and would skip others if it shrank."""
    height, width = images.shape[2:]
    # grid_sample counts from -1 to 1 over the whole image
    maps = [
        [
            [(-1 if c.mirrored else 1) * c.width / width, 0, (2 * c.left + c.width) / width - 1],
            [0, c.height / height, (2 * c.top + c.height) / height - 1],
        ]
        for c in crops
    ]
    shape = [len(images), images.shape[1], resolution, resolution]
    grid = torch.nn.functional.affine_grid(
        sent(torch.tensor(maps), images.device), shape, align_corners=False
    )
    return torch.nn.functional.grid_sample(
        images.float(), grid, padding_mode="border", align_corners=False
    )


def shifted(padded: Tensor, which: Tensor, random: np.random.Generator, size: int) -> Tensor:
    """A window of `size` at a random place of each of the images `which`; half of them are
    mirrored."""
    count, room = len(which), padded.shape[-1] - size + 1
    top, left = random.integers(room, size=(2, count, 1))
    pixels = np.arange(size)
    mirrored = random.random((count, 1)) < 0.5
    columns = left + np.where(mirrored, pixels[::-1], pixels)
    rows, columns = (sent(torch.from_numpy(x), padded.device) for x in (top + pixels, columns))
    channels = torch.arange(padded.shape[1], device=padded.device)[:, None, None]
    return padded[
        which[:, None, None, None], channels, rows[:, None, :, None], columns[:, None, None]
    ]


def middle(resolution: int) -> Callable[[Any], Any]:
    """What validation sees: 256/224 of the resolution, of which the middle."""
    from torchvision.transforms import v2  # type: ignore[import-untyped]

    return v2.Compose([v2.Resize(round(resolution * 256 / 224)), v2.CenterCrop(resolution)])

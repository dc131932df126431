"""Photographs in folders: `train` and `val`, each with a folder of files per class.

A training image is a random crop, resized and perhaps mirrored. Which crop is a function of seed,
worker and index, so it does not matter which thread decodes it, or when.
"""

import copy
import os
from abc import ABC, abstractmethod
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from palsgd.lab.data import splits
from palsgd.lab.data.colours import colour_map
from palsgd.lab.data.crops import CHANCES, middle, random_crop, zoomed
from palsgd.lab.data.pictures import opened_picture, read_picture
from palsgd.lab.data.sharding import Changes, Shards, random_stream
from palsgd.simulator.batches import sent

SPLITS = ("train", "val")
AHEAD = 2  # batches of each worker that are decoded before they are asked for
LARGEST_IN_MEMORY = 2**32  # bytes of pixels
_MEAN, _STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


class Photographs(ABC):
    def __init__(
        self,
        train: Any,
        val: Any,
        *,
        resolution: int,
        seed: int,
        device: torch.device,
        sharding: str = "reshuffled",
    ):
        self.train, self.val = train, val
        self._shards = Shards(sharding, len(train), seed=seed, labels=torch.tensor(train.targets))
        self._resolution, self._seed, self._device = resolution, seed, device
        self._colours = colour_map(_MEAN, _STD, device)
        self._pool = ThreadPoolExecutor(min(16, os.cpu_count() or 1))

    @abstractmethod
    def batch(
        self, *, worker: int, workers: int, size: int, index: int, changes: Changes = ()
    ) -> tuple[Tensor, Tensor]:
        """Images and labels for training, on the device."""

    @abstractmethod
    def plain(self, split: str, part: slice) -> tuple[Tensor, Tensor]:
        """The middles of images of `train` or `val`, and their labels, on the device."""

    def _drawn(
        self, worker: int, workers: int, size: int, changes: Changes, index: int
    ) -> tuple[Tensor, np.ndarray]:
        """The images of a batch, and the random numbers for their crops."""
        which = self._shards.batch(
            worker=worker, workers=workers, size=size, index=index, changes=changes
        )
        return which, random_stream(self._seed, worker, index).random((size, *CHANCES))


class FromFiles(Photographs):
    """Photographs that threads decode before they are needed."""

    def __init__(self, train: Any, val: Any, **settings: Any):
        super().__init__(train, val, **settings)
        self._begun: dict[tuple[int, int, int, Changes], dict[int, list[Future]]] = {}

    def batch(
        self, *, worker: int, workers: int, size: int, index: int, changes: Changes = ()
    ) -> tuple[Tensor, Tensor]:
        feed = (worker, workers, size, changes)
        begun = self._begun.get(feed, {})
        wanted = range(index, index + 1 + AHEAD)
        begun = {i: begun.get(i) or self._begin(self._drawn(*feed, i)) for i in wanted}
        self._begun[feed] = begun
        return self._collect(begun.pop(index))

    def plain(self, split: str, part: slice) -> tuple[Tensor, Tensor]:
        view, folder = middle(self._resolution), {"train": self.train, "val": self.val}[split]

        def example(i: int) -> tuple[Any, int]:
            return view(decoded(folder, i)), folder.targets[i]

        return self._collect([self._pool.submit(example, i) for i in range(len(folder))[part]])

    def _begin(self, drawn: tuple[Tensor, np.ndarray]) -> list[Future]:
        which, chances = drawn
        return [
            self._pool.submit(self._example, i, chance)
            for i, chance in zip(which.tolist(), chances, strict=True)
        ]

    def _example(self, i: int, chances: np.ndarray) -> tuple[Any, int]:
        from torchvision.transforms.v2.functional import horizontal_flip, resized_crop  # type: ignore[import-untyped]

        image = decoded(self.train, i)
        crop = random_crop(image.height, image.width, chances)
        size = [self._resolution, self._resolution]
        image = resized_crop(image, crop.top, crop.left, crop.height, crop.width, size)
        return horizontal_flip(image) if crop.mirrored else image, self.train.targets[i]

    def _collect(self, begun: list[Future]) -> tuple[Tensor, Tensor]:
        images, labels = zip(*(each.result() for each in begun), strict=True)
        pixels = sent(_pixels(images), self._device)
        return self._colours(pixels), sent(torch.tensor(labels), self._device)


class InMemory(Photographs):
    """Photographs that are kept whole on the device and cropped there."""

    def __init__(self, train: Any, val: Any, **settings: Any):
        super().__init__(train, val, **settings)
        self._loaded = {"train": self._read(train), "val": self._read(val)}

    def batch(
        self, *, worker: int, workers: int, size: int, index: int, changes: Changes = ()
    ) -> tuple[Tensor, Tensor]:
        which, chances = self._drawn(worker, workers, size, changes, index)
        which = sent(which, self._device)
        images, labels = (each[which] for each in self._loaded["train"])
        height, width = images.shape[2:]
        crops = [random_crop(height, width, chance) for chance in chances]
        return self._colours(zoomed(images, crops, self._resolution)), labels

    def plain(self, split: str, part: slice) -> tuple[Tensor, Tensor]:
        view, (images, labels) = middle(self._resolution), self._loaded[split]
        return self._colours(view(images[part].float())), labels[part]

    def _read(self, folder: Any) -> tuple[Tensor, Tensor]:
        images = list(self._pool.map(lambda i: decoded(folder, i), range(len(folder))))
        return _pixels(images).to(self._device), torch.tensor(folder.targets).to(self._device)


def open_folders(
    root: Path,
    *,
    resolution: int,
    seed: int,
    device: torch.device,
    sharding: str = "reshuffled",
    held_out: float | None = None,
    in_memory: bool | None = None,
) -> Photographs:
    """The photographs in root/train and root/val; with a share that is held out, those in
    root/train alone, in two parts. Those that fit are kept in memory, unless `in_memory` says
    otherwise."""
    train = split_folder(root, "train")
    if held_out is not None:
        parts = splits.held_out(len(train), held_out)
        train, val = (_part(train, part.tolist()) for part in parts)
    else:
        val = split_folder(root, "val")
    if train.classes != val.classes:
        odd = sorted(set(train.classes) ^ set(val.classes))
        raise ValueError(f"the class {odd[0]} is not in both {root}/train and val; copy it again")
    if in_memory is None:
        in_memory = _can_be_held(train, val, resolution)
    kind = InMemory if in_memory else FromFiles
    return kind(train, val, resolution=resolution, seed=seed, device=device, sharding=sharding)


def split_folder(root: Path, name: str) -> Any:
    from torchvision.datasets import ImageFolder  # type: ignore[import-untyped]

    try:
        return ImageFolder(str(root / name))
    except FileNotFoundError as error:
        raise _nothing_in(root, str(error)) from error


def _part(folder: Any, which: list[int]) -> Any:
    """Some photographs of a folder, with the classes of all."""
    part = copy.copy(folder)
    part.samples = [folder.samples[i] for i in which]
    part.targets = [folder.targets[i] for i in which]
    return part


def require(root: Path) -> None:
    """Raise a ValueError unless there are folders for both splits."""
    for name in SPLITS:
        if not (root / name).is_dir():
            raise _nothing_in(root, f"there is no folder {root / name}")


def _nothing_in(root: Path, found: str) -> ValueError:
    return ValueError(
        f"no photographs in {root}: looked for train/CLASS/*.JPEG and val/CLASS/*.JPEG "
        f"({found}); get ImageNet-1K from https://image-net.org and unpack it there, or use "
        "the workload digits, which needs no files"
    )


def decoded(folder: Any, i: int) -> Any:
    return read_picture(folder.samples[i][0])


def _can_be_held(train: Any, val: Any, resolution: int) -> bool:
    """Do all photographs have one size, which is not above the resolution, and do they fit into
    memory?"""
    sizes = (_size(folder, i) for folder in (train, val) for i in range(len(folder)))
    width, height = first = next(sizes)
    pixels = 3 * width * height * (len(train) + len(val))
    fit = max(first) <= resolution and pixels <= LARGEST_IN_MEMORY
    return fit and all(size == first for size in sizes)


def _size(folder: Any, i: int) -> tuple[int, int]:
    with opened_picture(folder.samples[i][0]) as image:
        return image.size


def _pixels(images: Any) -> Tensor:
    """Uint8, N x 3 x height x width."""
    stacked = np.stack([np.asarray(image) for image in images])
    return torch.from_numpy(stacked).permute(0, 3, 1, 2).contiguous()

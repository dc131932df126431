"""CIFAR-10 from disk, as tensors that live on the training device."""

import hashlib
import lzma
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from palsgd.checks import check_int
from palsgd.json_files import read_json_object
from palsgd.lab.data.colours import ColourMap, colour_map
from palsgd.lab.data.pickled_batches import read_batch
from palsgd.lab.data.pictures import read_picture

SPLITS = ("train", "test")
_BATCHES = [f"data_batch_{i}" for i in range(1, 6)] + ["test_batch"]
_MOST_BYTES = 2**23  # of unpacked labels and names; there are 60,000
_MEAN, _STD = (0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)


@dataclass(frozen=True)
class Split:
    images: Tensor  # uint8, N x 3 x 32 x 32
    labels: Tensor

    def __post_init__(self) -> None:
        if len(self.images) != len(self.labels) or not len(self.labels):
            raise ValueError(
                f"there are {len(self.images)} images and {len(self.labels)} labels of CIFAR-10, "
                "not equally many; copy them again"
            )

    def to(self, device: Any) -> "Split":
        return Split(self.images.to(device), self.labels.to(device))

    def __len__(self) -> int:
        return len(self.labels)


def load(folder: str | Path) -> tuple[Split, Split]:
    """The training and the test split."""
    train, test = (load_split(folder, split) for split in SPLITS)
    return train, test


def load_split(folder: str | Path, split: str) -> Split:
    """`train` or `test`, from any of three forms: the original Python batches, those as lossless
    WebP sprites, or a sprite per split with `labels.json`. Images of the other split are not
    read."""
    root = Path(folder)
    require(root)
    for place in (root, root / "cifar-10-batches-py"):
        if (place / "data_batch_1").exists():
            return _join([_original(place, name) for name in _batches(split)])
    if (root / "data_batch_1.webp").exists():
        return _compact(root, split)
    return Split(_sprite(root / f"{split}.webp"), _labels_of(root / "labels.json", split))


def require(root: Path) -> None:
    """Raise a ValueError unless the folder has one of the forms."""
    names = ("data_batch_1", "cifar-10-batches-py/data_batch_1", "data_batch_1.webp", "labels.json")
    if not any((root / name).exists() for name in names):
        raise ValueError(
            f"no CIFAR-10 in {root}: looked for data_batch_1 (there or in cifar-10-batches-py), "
            "data_batch_1.webp and labels.json; get cifar-10-python.tar.gz from "
            "https://www.cs.toronto.edu/~kriz/cifar.html and unpack it there, or use the workload "
            "digits, which needs no files"
        )


def check_published(root: Path) -> int:
    """Compare the original batches with the checksums that were published with them; how many there
    are."""
    from torchvision.datasets import CIFAR10  # type: ignore[import-untyped]

    found = [
        (path, digest)
        for name, digest in CIFAR10.train_list + CIFAR10.test_list
        for path in (root / name, root / "cifar-10-batches-py" / name)
        if path.exists()
    ]
    for path, digest in found:
        if hashlib.md5(path.read_bytes()).hexdigest() != digest:
            raise ValueError(f"{path} has not the published MD5 {digest}; unpack it again")
    return len(found)


def download(folder: Path) -> None:
    from torchvision.datasets import CIFAR10  # type: ignore[import-untyped]

    try:
        CIFAR10(str(folder), download=True)
    except (OSError, RuntimeError) as error:
        with suppress(OSError):
            folder.rmdir()  # that torchvision has made; one with files in it stays
        raise ValueError(
            f"could not download CIFAR-10 ({error}); fetch cifar-10-python.tar.gz by hand from "
            f"https://www.cs.toronto.edu/~kriz/cifar.html and unpack it into {folder}"
        ) from error


def colours(device: torch.device | str) -> ColourMap:
    return colour_map(_MEAN, _STD, device)


def _original(place: Path, name: str) -> Split:
    try:
        images, labels = read_batch(place / name)
        return Split(torch.from_numpy(images).view(-1, 3, 32, 32), torch.tensor(labels))
    except (OSError, ValueError) as error:
        raise ValueError(
            f"{place / name} is missing or corrupt ({error}); unpack it again"
        ) from error


def _compact(root: Path, split: str) -> Split:
    """The labels of all batches are in one file, in the order of the batches, the test's last."""
    labels = _packed_labels(root / "labels_filenames.tsv.xz")
    images = torch.cat([_sprite(root / f"{name}.webp") for name in _batches(split)])
    own = labels[: len(images)] if split == "train" else labels[-len(images) :]
    return Split(images, own)


def _packed_labels(path: Path) -> Tensor:
    """The first word of each row. No more is unpacked than such a file has."""
    try:
        with lzma.open(path) as file:
            rows = file.read(_MOST_BYTES).decode().splitlines()
        return _labels(int(row.split("\t")[0]) for row in rows)
    except (OSError, EOFError, lzma.LZMAError, ValueError) as error:
        raise ValueError(f"{path} is missing or corrupt ({error}); copy it again") from error


def _labels_of(path: Path, split: str) -> Tensor:
    fix = 'copy it again, or write {"train": {"labels": [...]}, "test": {"labels": [...]}}'
    found = read_json_object(path, fix=fix)
    try:
        return _labels(found[split]["labels"])
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{path} has no labels of {split} ({error}); {fix}") from None


def _labels(found: Iterable[Any]) -> Tensor:
    """Whole numbers from 0 to 9 as a tensor."""
    labels = [check_int("label", each) for each in found]
    if max(labels, default=0) > 9:
        raise ValueError(f"label={max(labels)} must be a whole number from 0 to 9")
    return torch.tensor(labels)


def _batches(split: str) -> list[str]:
    return _BATCHES[:-1] if split == "train" else _BATCHES[-1:]


def _join(parts: list[Split]) -> Split:
    images = torch.cat([part.images for part in parts])
    return Split(images, torch.cat([part.labels for part in parts]))


def _sprite(path: Path) -> Tensor:
    """Tiles of 32 x 32 pixels, row by row."""
    pixels = np.asarray(read_picture(path))
    if pixels.shape[0] % 32 or pixels.shape[1] % 32:
        raise ValueError(
            f"{path} has {pixels.shape[1]} x {pixels.shape[0]} pixels, not tiles of 32 x 32; copy "
            "it again"
        )
    rows, columns = pixels.shape[0] // 32, pixels.shape[1] // 32
    tiles = pixels.reshape(rows, 32, columns, 32, 3).transpose(0, 2, 4, 1, 3)
    return torch.from_numpy(np.ascontiguousarray(tiles).reshape(-1, 3, 32, 32))

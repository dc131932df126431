"""The data sets that workloads read: where they are, where they come from, how they are checked."""

import hashlib
import os
from abc import ABC, abstractmethod
from collections.abc import Iterator
from pathlib import Path
from typing import ClassVar

import numpy as np

from palsgd.json_files import read_text
from palsgd.lab.data import cifar10, images, tokens
from palsgd.lab.data.download import Data, Progress, place_of

SUMS = "SHA256SUMS"  # a file of checksums, in the folder of the data or above it


class Source(ABC):
    name: ClassVar[str]  # on the command line, and of the folder inside --data
    licence: ClassVar[str]

    def place(self, data: Data) -> Path:
        return place_of(data, self.name)

    def own_folder(self, data: Data) -> Path:
        """Where files are fetched to, so that those of different sources are never mixed."""
        return Path("data" if data is None else data) / self.name

    def size(self, data: Data) -> int:
        """Bytes of the files that are there."""
        return sum(path.stat().st_size for path in self.place(data).rglob("*") if path.is_file())

    @abstractmethod
    def require(self, data: Data) -> None:
        """Raise a ValueError that says what is missing and how to get it. Reads no data."""

    @abstractmethod
    def download(self, data: Data, progress: Progress | None = None) -> None:
        """Fetch what is missing."""

    @abstractmethod
    def facts(self, data: Data) -> Iterator[str]:
        """Read all of it; what was found right, a line each. Raises a ValueError for what is
        wrong."""

    def check(self, data: Data) -> list[str]:
        """Everything that can be verified without training."""
        self.require(data)
        return [*self.facts(data), *_checksums(self.place(data))]


class Cifar10(Source):
    name = "cifar10"
    licence = "none stated; by Krizhevsky (2009)"

    def require(self, data: Data) -> None:
        cifar10.require(self.place(data))

    def download(self, data: Data, progress: Progress | None = None) -> None:
        cifar10.download(self.own_folder(data))

    def facts(self, data: Data) -> Iterator[str]:
        place = self.place(data)
        for name, split in zip(("train", "test"), cifar10.load(place), strict=True):
            labels, counts = np.unique(split.labels.numpy(), return_counts=True)
            shape = tuple(split.images.shape[1:])
            if len(split.images) != len(split) or shape != (3, 32, 32) or labels.max() > 9:
                raise ValueError(
                    f"{name} of {place} has {len(split.images)} images of {shape} and "
                    f"{len(split)} labels up to {labels.max()}, not pairs of (3, 32, 32) and 0 to "
                    "9; unpack it again"
                )
            yield (
                f"{name}: {len(split):,} images of 3 x 32 x 32, {counts.min():,} to "
                f"{counts.max():,} of each of {len(labels)} labels"
            )
        if right := cifar10.check_published(place):
            yield f"the published checksums of {right} files"


class TinyStories(Source):
    name = "tinystories"
    licence = "CDLA-Sharing-1.0"

    def tokenizer(self, data: Data) -> Path:
        """The folder of GPT-2's tokenizer: one of its own, or that of the texts."""
        beside = place_of(data, "gpt2-tokenizer")
        return beside if (beside / "vocab.json").exists() else self.place(data)

    def require(self, data: Data) -> None:
        tokens.require(self.place(data), self.tokenizer(data))

    def download(self, data: Data, progress: Progress | None = None) -> None:
        folder, beside = self.own_folder(data), self.tokenizer(data)
        tokenizer = beside if (beside / "vocab.json").exists() else folder
        tokens.download(folder, tokenizer, progress)

    def facts(self, data: Data) -> Iterator[str]:
        place = self.place(data)
        for split in tokens.SPLITS:
            if not tokens.is_prepared(place):
                stories = tokens.count_stories(place, split)
                yield f"{split}: {stories:,} stories as text, encoded when they are first used"
            else:
                yield f"{split}: {self._encoded(place, split)}"

    def _encoded(self, place: Path, split: str) -> str:
        found = tokens.read(place, split).view(np.uint16)
        record = tokens.read_record(place, split)
        stories = int((found == tokens.END).sum()) - 1
        whole = found[0] == found[-1] == tokens.END and found.max() <= tokens.END
        if not whole or stories != record["stories"]:
            raise ValueError(
                f"{place}/{split}.bin has {stories} stories and tokens up to {found.max()}, not "
                f"{record['stories']} and {tokens.END}; prepare it again"
            )
        for source in record["sources"]:
            path = place / Path(source["name"]).name
            if path.exists():
                _compare(path, source["sha256"])
        return f"{stories:,} stories, {len(found):,} tokens"


class ImageNet(Source):
    name = "imagenet"
    licence = "ImageNet's terms: research, not commercial"

    def require(self, data: Data) -> None:
        images.require(self.place(data))

    def download(self, data: Data, progress: Progress | None = None) -> None:
        raise ValueError(
            "ImageNet-1K is given to registered users only; get it from https://image-net.org and "
            f"unpack it into {self.own_folder(data)}: train/CLASS/*.JPEG and val/CLASS/*.JPEG"
        )

    def facts(self, data: Data) -> Iterator[str]:
        for name in images.SPLITS:
            folder = images.split_folder(self.place(data), name)
            firsts = [folder.targets.index(label) for label in range(len(folder.classes))]
            for i in firsts:
                images.decoded(folder, i)
            yield f"{name}: {len(folder):,} photographs of {len(folder.classes)} classes"
        yield "a photograph of each class can be read"


SOURCES: dict[str, Source] = {each.name: each for each in (Cifar10(), TinyStories(), ImageNet())}


def _checksums(place: Path) -> list[str]:
    """Compare files with the checksums that came with them, if any did."""
    right = 0
    for folder in (place, place.parent):
        if not (folder / SUMS).is_file():
            continue
        for line in read_text(folder / SUMS, fix="get it again").splitlines():
            digest, _, name = line.partition(" ")
            path = Path(os.path.normpath(folder / name.strip().removeprefix("*")))
            if path.is_relative_to(os.path.normpath(place)):
                _compare(path, digest)
                right += 1
    return [f"the {SUMS} of {right} files"] if right else []


def _compare(path: Path, digest: str) -> None:
    if not path.is_file():
        raise ValueError(f"{path} is missing; get it again")
    with open(path, "rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if found != digest:
        raise ValueError(
            f"{path} has the SHA-256 {found[:12]}..., not {digest[:12]}...; get it again"
        )

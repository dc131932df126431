"""Small folders of pictures, in the forms that data sets come in."""

import pickle

import numpy as np
import pytest

from palsgd.lab.data import cifar10


def write_original(folder, rows=4):
    """The original batches in small, as Python 2 pickled them."""
    rng = np.random.default_rng(0)
    folder.mkdir(parents=True, exist_ok=True)
    for name in cifar10._BATCHES:
        data = rng.integers(0, 256, size=(rows, 3072), dtype=np.uint8)
        labels = rng.integers(0, 10, size=rows).tolist()
        (folder / name).write_bytes(pickle.dumps({b"data": data, b"labels": labels}, protocol=2))


def write_photographs(root, sizes=((40, 30),), count=4):
    image = pytest.importorskip("PIL.Image")
    rng = np.random.default_rng(0)
    for split in ("train", "val"):
        for label in ("cat", "dog"):
            (root / split / label).mkdir(parents=True)
            for i in range(count):
                width, height = sizes[i % len(sizes)]
                pixels = rng.integers(0, 256, (height, width, 3), dtype=np.uint8)
                image.fromarray(pixels).save(root / split / label / f"{i}.png")
    return root

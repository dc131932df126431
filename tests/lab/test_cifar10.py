"""CIFAR-10 from disk, and the study that runs on it."""

import json
import pickle

import pytest
import torch

from palsgd.lab.data import cifar10
from support.commands import apart, records
from support.pictures import write_original
from support.places import SHARED

MINI = SHARED / "cifar10-mini"
needs_mini = pytest.mark.skipif(not MINI.exists(), reason="no ../shared/data/cifar10-mini here")


def test_the_original_batches_are_read_in_order(tmp_path):
    write_original(tmp_path / "cifar-10-batches-py")
    train, test = cifar10.load(tmp_path)
    assert train.images.shape == (20, 3, 32, 32)
    assert len(test) == 4
    raw = pickle.loads((tmp_path / "cifar-10-batches-py" / "data_batch_2").read_bytes())
    assert torch.equal(train.images[4:8].reshape(4, -1), torch.from_numpy(raw[b"data"]))
    assert train.labels[4:8].tolist() == raw[b"labels"]


def test_sprites_hold_the_tiles_row_by_row(tmp_path):
    image = pytest.importorskip("PIL.Image")
    tiles = torch.randint(256, (6, 3, 32, 32), dtype=torch.uint8)
    grid = tiles.numpy().reshape(2, 3, 3, 32, 32).transpose(0, 3, 1, 4, 2).reshape(64, 96, 3)
    for name in ("train", "test"):
        image.fromarray(grid).save(tmp_path / f"{name}.webp", lossless=True)
    labels = {name: {"labels": list(range(6))} for name in ("train", "test")}
    (tmp_path / "labels.json").write_text(json.dumps(labels))
    train, test = cifar10.load(tmp_path)
    assert torch.equal(train.images, tiles)
    assert test.labels.tolist() == list(range(6))


def test_a_missing_folder_says_what_was_looked_for(tmp_path):
    with pytest.raises(ValueError, match=r"looked for data_batch_1 .* labels\.json"):
        cifar10.load(tmp_path / "nowhere")


def test_a_corrupt_file_is_named(tmp_path):
    write_original(tmp_path)
    (tmp_path / "data_batch_3").write_bytes(b"not a pickle")
    with pytest.raises(ValueError, match="data_batch_3 is missing or corrupt"):
        cifar10.load(tmp_path)


def study(*arguments):
    return apart("sweep", "cifar10-cnn", *arguments, "--simulate", timeout=200)


@pytest.mark.slow
@needs_mini
def test_the_small_cnn_study_starts_with_one_command(tmp_path):
    said = study(
        "workers=2,4", "method=ddp,palsgd", "epochs=1", "batch_size=100", "evaluate_every=100",
        "sync_every=4", "--data", MINI, "--device", "cpu", "--no-report",
        "--out", tmp_path / "study",
    )  # fmt: skip
    assert said.code == 0, said.err
    rows = records(tmp_path / "study")
    assert len(rows) == 4
    assert [rows[f"workers={k},method=palsgd"]["steps"] for k in (2, 4)] == [10, 5]
    assert all(0 <= row["final_metric"] <= 1 for row in rows.values())


@pytest.mark.slow
def test_the_study_says_in_one_line_that_data_is_missing(tmp_path):
    said = study("workers=2", "--data", tmp_path, "--out", tmp_path / "study")
    assert said.code == 2
    assert "no CIFAR-10 in" in said.err.splitlines()[-1]

"""`palsgd data`: what is there, where it would be fetched from, and whether it is right."""

import json
import lzma
import pickle
import urllib.error
import urllib.request

import numpy as np
import pytest
from torchvision.datasets import CIFAR10

from palsgd.lab import workloads
from palsgd.lab.data import sources, tokens
from support.commands import palsgd


@pytest.fixture
def cifar(tmp_path):
    """A small CIFAR-10 in the original form, in a data folder."""
    folder = tmp_path / "data" / "cifar10"
    folder.mkdir(parents=True)
    random = np.random.default_rng(0)
    for name in [f"data_batch_{i}" for i in range(1, 6)] + ["test_batch"]:
        batch = {
            b"data": random.integers(0, 256, (20, 3072), dtype=np.uint8),
            b"labels": [i % 10 for i in range(20)],
        }
        (folder / name).write_bytes(pickle.dumps(batch))
    return folder


@pytest.fixture
def published(cifar, monkeypatch):
    """The checksums of these files as if they had been published."""
    import hashlib

    def sums(names):
        return [[name, hashlib.md5((cifar / name).read_bytes()).hexdigest()] for name in names]

    monkeypatch.setattr(CIFAR10, "train_list", sums([f"data_batch_{i}" for i in range(1, 6)]))
    monkeypatch.setattr(CIFAR10, "test_list", sums(["test_batch"]))


@pytest.fixture
def stories(tmp_path):
    """Encoded stories: two to train on, one to validate."""
    folder = tmp_path / "data" / "tinystories"
    folder.mkdir(parents=True)
    for split, words in {"train": [7, 8, tokens.END, 9], "valid": [5]}.items():
        found = np.array([tokens.END, *words, tokens.END], dtype=np.uint16)
        (folder / f"{split}.bin").write_bytes(found.tobytes())
        record = {"tokens": len(found), "stories": words.count(tokens.END) + 1, "sources": []}
        (folder / f"{split}.json").write_text(json.dumps(record))
    return folder


def rows(out: str) -> dict[str, str]:
    return {line.split()[0]: line for line in out.splitlines()[1:] if line.strip()}


def test_list_says_for_every_workload_with_files_where_they_are(cifar):
    said = palsgd("data", "list", "--data", cifar.parent)
    assert said.code == 0, said.err
    found = rows(said.out)
    assert set(found) == set(sources.SOURCES)
    assert all(word in found["cifar10"] for word in (str(cifar), " yes ", "kB", "cifar10-vgg16"))
    assert " no " in found["imagenet"]
    assert "CDLA" in found["tinystories"]
    needing = [name for name in workloads.names() if workloads.kind(name).source is not None]
    assert len(needing) == 6
    assert all(name in said.out for name in needing)


def test_check_counts_what_is_there_and_compares_checksums(cifar, stories, published):
    said = palsgd("data", "check", "--data", cifar.parent)
    assert said.code == 0, said.err
    assert "train: 100 images of 3 x 32 x 32, 10 to 10 of each of 10 labels" in said.out
    assert "test: 20 images" in said.out
    assert "the published checksums of 6 files" in said.out
    assert "train: 2 stories, 6 tokens" in said.out
    assert "valid: 1 stories, 3 tokens" in said.out
    assert "imagenet: not in" in said.out


def test_check_reads_texts_that_are_not_yet_encoded(tmp_path):
    folder = tmp_path / "tinystories"
    folder.mkdir()
    text = "Once.<|endoftext|>\nTwice.<|endoftext|>\n"
    (folder / "train.txt").write_text(text)
    (folder / "valid.txt.xz").write_bytes(lzma.compress(text.encode()))
    for name in ("vocab.json", "merges.txt"):
        (folder / name).write_text("")
    said = palsgd("data", "check", "tinystories", "--data", tmp_path)
    assert said.code == 0, said.err
    assert said.out.count(": 2 stories as text") == 2


def break_pickle(folder):
    (folder / "data_batch_2").write_bytes(b"no pickle")


def break_sum(folder):
    path = folder / "data_batch_3"
    path.write_bytes(path.read_bytes() + b" ")


@pytest.mark.parametrize(
    ("harm", "said"), [(break_pickle, "data_batch_2"), (break_sum, "data_batch_3 has not the")]
)
def test_check_names_the_file_that_is_wrong(cifar, published, harm, said):
    harm(cifar)
    answer = palsgd("data", "check", "cifar10", "--data", cifar.parent)
    assert answer.code == 2
    assert said in answer.line


def test_check_names_tokens_that_are_cut_or_changed(stories):
    path = stories / "train.bin"
    whole = path.read_bytes()
    path.write_bytes(whole[:-2])
    assert "has 5 tokens, not 6" in palsgd("data", "check", "--data", stories.parent).line
    path.write_bytes(whole.replace(np.uint16(9).tobytes(), np.uint16(60000).tobytes()))
    answer = palsgd("data", "check", "tinystories-gptneo-8m", "--data", stories.parent)
    assert answer.code == 2
    assert "tokens up to 60000" in answer.line


def test_check_compares_the_checksums_that_came_with_the_data(cifar, published):
    right = "36a9e7f1c95b82ffb99743e0c5c4ce95d83c9a430aac59f84ef3cbfab6145068"  # of a space
    (cifar / "note.txt").write_text(" ")
    (cifar.parent / "SHA256SUMS").write_text(f"{right}  cifar10/note.txt\n{right}  other/file\n")
    said = palsgd("data", "check", "cifar10", "--data", cifar.parent)
    assert "the SHA256SUMS of 1 files" in said.out, said.err
    (cifar / "note.txt").write_text("?")
    assert "note.txt has the SHA-256" in palsgd("data", "check", "--data", cifar.parent).line


@pytest.mark.parametrize("name", ["cifar10", "cifar10-cnn", "tinystories", "imagenet"])
def test_fetch_without_a_network_is_one_line_and_leaves_nothing(tmp_path, monkeypatch, name):
    def refuse(*_, **__):
        raise urllib.error.URLError("no network")

    monkeypatch.setattr(urllib.request, "urlopen", refuse)
    answer = palsgd("data", "fetch", name, "--data", tmp_path / "data")
    assert answer.code == 2
    assert "https://" in answer.line
    assert list(tmp_path.rglob("*")) in ([], [tmp_path / "data"])


def test_fetch_leaves_alone_what_is_there(cifar, monkeypatch):
    monkeypatch.setattr(urllib.request, "urlopen", None)
    said = palsgd("data", "fetch", "cifar10", "--data", cifar.parent)
    assert said.code == 0
    assert f"cifar10 is in {cifar} already" in said.out


def test_fetch_gives_each_data_set_a_folder_of_its_own(tmp_path, monkeypatch):
    served = []

    def serve(url, path, progress):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("Once.<|endoftext|>")
        served.append(path)

    monkeypatch.setattr(tokens, "fetch", serve)
    said = palsgd("data", "fetch", "tinystories", "--data", tmp_path)
    assert said.code == 0, said.err
    assert {path.parent for path in served} == {tmp_path / "tinystories"}
    assert f"tinystories: {tmp_path / 'tinystories'}" in said.out


@pytest.mark.parametrize(
    ("name", "said"),
    [("digits", "'digits' needs no files"), ("cifar100", "'cifar100' is unknown; use one of")],
)
def test_a_name_without_files_is_refused_with_those_that_have_some(name, said):
    for command in ("fetch", "check"):
        answer = palsgd("data", command, name)
        assert answer.code == 2
        assert said in answer.line

"""Data files that somebody prepared: nothing in them is executed, and what is wrong is one line."""

import io
import json
import lzma
import os
import pickle
import struct
import zlib

import numpy as np
import pytest
import torch

from palsgd.lab.data import cifar10, images, sources, tokens
from support.pictures import write_original, write_photographs

ROWS = 4


def refusal(call):
    with pytest.raises(ValueError, match=";") as caught:
        call()
    assert caught.type is ValueError
    assert "\n" not in str(caught.value)
    return str(caught.value)


# -- pickles of CIFAR-10 ---------------------------------------------------------------------------


def text_2(text):
    """A short string of Python 2, which has one type for texts and bytes."""
    return b"U" + bytes([len(text)]) + text


def by_python_2(data, labels):
    """A batch as Python 2 wrote it: protocol 2, NumPy's old names, strings for bytes."""
    raw = data.tobytes()
    array = b"cnumpy.core.multiarray\n_reconstruct\nq\x04cnumpy\nndarray\nq\x05K\x00\x85" + text_2(
        b"b"
    )
    array += b"\x87Rq\x06(K\x01K" + bytes([len(data)]) + b"M" + struct.pack("<H", 3072) + b"\x86"
    array += b"cnumpy\ndtype\nq\x07" + text_2(b"u1") + b"K\x00K\x01\x87Rq\x08(K\x03"
    array += text_2(b"|") + b"NNNJ\xff\xff\xff\xffJ\xff\xff\xff\xffK\x00tb\x89"
    array += b"T" + struct.pack("<I", len(raw)) + raw + b"tb"
    numbers = b"]q\x03(" + b"".join(b"K" + bytes([each]) for each in labels) + b"e"
    fields = text_2(b"batch_label") + text_2(b"testing batch 1 of 1")
    fields += text_2(b"labels") + numbers + text_2(b"data") + array
    fields += text_2(b"filenames") + b"](" + text_2(b"a.png") + b"e"
    return b"\x80\x02}q\x01(" + fields + b"u."


def batch():
    rng = np.random.default_rng(3)
    data = rng.integers(0, 256, size=(ROWS, 3072), dtype=np.uint8)
    return data, rng.integers(0, 10, size=ROWS).tolist()


def read(folder, content):
    write_original(folder, rows=ROWS)
    (folder / "test_batch").write_bytes(content)
    return cifar10.load_split(folder, "test")


def test_a_batch_of_python_2_is_what_pickle_reads(tmp_path):
    data, labels = batch()
    content = by_python_2(data, labels)
    trusted = pickle.loads(content, encoding="bytes")
    assert np.array_equal(trusted[b"data"], data)
    found = read(tmp_path, content)
    assert torch.equal(found.images.view(ROWS, -1), torch.from_numpy(data))
    assert found.labels.tolist() == labels


@pytest.mark.parametrize("protocol", [0, 1, 2, 3, 4])
def test_batches_of_python_3_are_read_too(tmp_path, protocol):
    data, labels = batch()
    found = read(tmp_path, pickle.dumps({b"data": data, b"labels": labels}, protocol=protocol))
    assert torch.equal(found.images.view(ROWS, -1), torch.from_numpy(data))
    assert found.labels.tolist() == labels


class Evil:
    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (str(self.path),)


@pytest.mark.parametrize("protocol", [0, 2, 4])
@pytest.mark.parametrize("where", ["whole", "data", "labels", "beside"])
def test_a_prepared_batch_runs_nothing(tmp_path, where, protocol):
    data, labels = batch()
    evil = Evil(tmp_path / "ran")
    good = {b"data": data, b"labels": labels}
    found = {
        "whole": evil,
        "data": good | {b"data": evil},
        "labels": good | {b"labels": [evil] * ROWS},
        "beside": good | {b"more": evil},
    }[where]
    content = pickle.dumps(found, protocol=protocol)
    said = refusal(lambda: read(tmp_path, content))
    assert "test_batch is missing or corrupt (it names 'posix.mkdir', which no batch has)" in said
    assert not (tmp_path / "ran").exists()
    pickle.loads(content)  # which is what it would have done
    assert (tmp_path / "ran").exists()


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"data": b"x", "labels": []}, "no 'data'"),
        ({"labels": [0] * 5}, "4 images and 5 labels"),
        ({"labels": [0, 1, 2, 10]}, "no whole numbers from 0 to 9"),
        ({"labels": [0, 1, 2, "3"]}, "no whole numbers from 0 to 9"),
        ({"data": np.zeros((4, 3072), np.float32)}, "3072 f4, not of 3072 u1"),
        ({"data": np.zeros((4, 3073), np.uint8)}, "rows of 3073"),
        ({"data": np.zeros((4, 3072), object)}, "a list where a text belongs"),
        ({"data": np.asfortranarray(np.zeros((4, 3072), np.uint8))}, "not one of rows of bytes"),
    ],
)
def test_a_batch_of_something_else_is_refused(tmp_path, values, said):
    data, labels = batch()
    whole = {"data": data, "labels": labels} | values
    assert said in refusal(lambda: read(tmp_path, pickle.dumps(whole)))


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", "exhausted"),
        (pickle.dumps({}), "no 'data'"),
        (pickle.dumps([1]), "no 'data'"),
        (b"\x80\x04" + b"]" * 2_000_000 + b".", "more than 1,000,000 operations"),
        (b"\x80\x04]r\xff\xff\xff\x7f.", "no 'data'"),  # put aside at two billion
        (b"\x80\x04\x8e" + b"\xff" * 7 + b"\x3f.", "expected 4611686018427387903 bytes"),
        (b"\x80\x02u.", "takes more from its stack"),
        (b"\x80\x02h\x07.", "never put aside"),
        (b"\x80\x04\x8c\x02os\x8c\x06system\x93.", "it names 'os.system'"),
        (b"\x80\x02]Q.", "the operation BINPERSID"),
    ],
)
def test_a_program_that_is_no_batch_is_refused_in_one_line(tmp_path, content, said):
    assert said in refusal(lambda: read(tmp_path, content))


# -- pictures and labels ---------------------------------------------------------------------------


def sprites(folder, size=(64, 64), labels=4):
    image = pytest.importorskip("PIL.Image")
    found = {name: {"labels": [0] * labels} for name in ("train", "test")}
    (folder / "labels.json").write_text(json.dumps(found))
    for name in ("train", "test"):
        image.new("RGB", size).save(folder / f"{name}.webp", lossless=True)
    return folder


@pytest.mark.parametrize(
    ("labels", "said"),
    [
        ("[]", "is not an object"),
        ("{}", "has no labels of test"),
        ('{"test": 3}', "has no labels of test"),
        ('{"test": {"labels": [0, 1, 2, 10]}}', "must be a whole number from 0 to 9"),
        ('{"test": {"labels": [0, 1, 2, -1]}}', "must be a whole number >= 0"),
        ('{"test": {"labels": [[0], 1, 2, 3]}}', "must be a whole number"),
        ('{"test": {"labels": [1]}}', "4 images and 1 labels"),
    ],
)
def test_labels_that_are_none_are_refused_in_one_line(tmp_path, labels, said):
    sprites(tmp_path)
    (tmp_path / "labels.json").write_text(labels)
    assert said in refusal(lambda: cifar10.load_split(tmp_path, "test"))


def test_sprites_that_are_no_tiles_are_refused(tmp_path):
    said = refusal(lambda: cifar10.load(sprites(tmp_path, size=(65, 64))))
    assert "train.webp has 65 x 64 pixels, not tiles of 32 x 32" in said


PAGE = b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 32 32\n%%EndComments\n(x) run\nshowpage\n"


def test_a_picture_that_another_program_would_have_to_draw_is_none(tmp_path):
    image = pytest.importorskip("PIL.Image")
    assert image.open(io.BytesIO(PAGE)).format == "EPS"  # which Pillow gives to Ghostscript
    (sprites(tmp_path) / "test.webp").write_bytes(PAGE)
    assert "not an image" in refusal(lambda: cifar10.load_split(tmp_path, "test"))
    root = write_photographs(tmp_path / "photographs")
    (root / "val" / "cat" / "0.png").write_bytes(PAGE)
    folder = images.split_folder(root, "val")
    assert "not an image" in refusal(lambda: images.decoded(folder, 0))


def png_of(width, height):
    """The head of a picture, which says how large it is."""
    head = b"IHDR" + struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return (
        b"\x89PNG\r\n\x1a\n" + struct.pack(">I", 13) + head + struct.pack(">I", zlib.crc32(head))
        + struct.pack(">I", 0) + b"IEND" + struct.pack(">I", zlib.crc32(b"IEND"))
    )  # fmt: skip


@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("side", [9_000, 11_000, 60_000])
def test_a_picture_that_unpacks_to_gigabytes_is_refused_before_it_is_unpacked(tmp_path, side):
    pytest.importorskip("PIL.Image")
    (sprites(tmp_path) / "test.webp").write_bytes(png_of(side, side))
    assert "pixels" in refusal(lambda: cifar10.load_split(tmp_path, "test"))


def test_labels_that_unpack_to_gigabytes_are_not_unpacked(tmp_path):
    for name in cifar10._BATCHES:
        sprites(tmp_path)
        (tmp_path / "test.webp").rename(tmp_path / f"{name}.webp")
    (tmp_path / "labels_filenames.tsv.xz").write_bytes(lzma.compress(b"0" * 2**26))
    refusal(lambda: cifar10.load_split(tmp_path, "test"))


# -- texts and tokens ------------------------------------------------------------------------------


def prepared(folder, record, words=(tokens.END, 5, tokens.END)):
    folder.mkdir(exist_ok=True)
    for split in tokens.SPLITS:
        (folder / f"{split}.bin").write_bytes(np.array(words, np.uint16).tobytes())
        (folder / f"{split}.json").write_text(record)
    return folder


RECORDS = {
    "[]": "is not an object",
    "{}": "is no record of tokens (tokens=None must be a whole number >= 1)",
    '{"tokens": "3"}': "tokens='3' must be",
    '{"tokens": true}': "tokens=True must be",
    '{"tokens": 3, "stories": -1}': "stories=-1 must be",
    '{"tokens": 3, "sources": [1]}': "is no record of tokens",
    '{"tokens": 3, "sources": [{"name": 1, "sha256": ""}]}': "name=1 must be text",
}


@pytest.mark.parametrize("record", RECORDS)
def test_a_record_of_tokens_that_is_none_is_refused_in_one_line(tmp_path, record):
    folder = prepared(tmp_path, record)
    assert RECORDS[record] in refusal(lambda: tokens.read(folder, "train"))
    refusal(lambda: sources.SOURCES["tinystories"].check(folder))


def test_no_file_outside_of_the_data_is_read_because_a_list_names_it(tmp_path):
    secret = tmp_path / "secret"
    secret.write_text("x")
    named = [{"name": str(secret), "sha256": "0"}, {"name": "../secret", "sha256": "0"}]
    record = {"tokens": 3, "stories": 1, "sources": named}
    data = prepared(tmp_path / "data", json.dumps(record))
    (data / sources.SUMS).write_text(f"0  ../secret\n0  {secret}\n")
    found = sources.SOURCES["tinystories"].check(data)
    assert found == ["train: 1 stories, 3 tokens", "valid: 1 stories, 3 tokens"]


@pytest.mark.parametrize("block", [b"a" * 2**20, b"a\n" * 2**19])
def test_texts_that_unpack_to_gigabytes_are_not_unpacked(tmp_path, block):
    path = tmp_path / "TinyStories-train.txt.xz"
    with lzma.open(path, "wb", preset=0) as file:
        for _ in range(40):
            file.write(block)
    said = refusal(lambda: tokens.count_stories(tmp_path, "train"))
    assert "it unpacks to more than 100 times its size" in said or "a line of more" in said

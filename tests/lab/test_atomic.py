"""Files that are written whole or not at all."""

import errno
import os

import pytest

from palsgd.lab.atomic import atomic_path, atomic_write
from palsgd.lab.run_folder import RunFolder


def test_an_interrupted_file_leaves_the_old_one(tmp_path):
    path = tmp_path / "tokens.bin"
    path.write_bytes(b"old")

    def interrupted():
        with atomic_path(path) as part, open(part, "wb") as file:
            file.write(b"new")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert [p.name for p in tmp_path.iterdir()] == ["tokens.bin"]
    assert path.read_bytes() == b"old"


def test_what_could_not_take_its_name_leaves_the_old_file_and_nothing_beside_it(
    tmp_path, monkeypatch
):
    path = tmp_path / "summary.json"
    atomic_write(path, "old")

    def full(*args):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
    with pytest.raises(OSError, match=r"No space left on device: '.*summary\.json'"):
        atomic_write(path, "new")
    assert [p.name for p in tmp_path.iterdir()] == ["summary.json"]
    assert path.read_text() == "old"


def test_text_is_written_as_utf8_and_bytes_as_they_are_into_folders_that_are_made(tmp_path):
    atomic_write(tmp_path / "a" / "text", "\N{GREEK SMALL LETTER ETA}")
    atomic_write(tmp_path / "a" / "bytes", b"\xff")
    assert (tmp_path / "a" / "text").read_bytes() == b"\xce\xb7"
    assert (tmp_path / "a" / "bytes").read_bytes() == b"\xff"


def test_starting_over_removes_what_a_killed_process_left_half_written(tmp_path):
    (tmp_path / "best.safetensors.12345.part").write_bytes(b"half")
    (tmp_path / "best.safetensors.of-mine").write_bytes(b"kept")
    RunFolder(tmp_path).clear()
    assert [p.name for p in tmp_path.iterdir()] == ["best.safetensors.of-mine"]

"""Files of YAML and JSON: what is read, and what is refused in one line whoever wrote it."""

import os
import time

import pytest

from palsgd.json_files import json_value, read_json, read_text
from palsgd.lab.yaml_files import read_yaml, yaml_text
from support.patience import patient

BOMB = "a0: &a0 [x,x,x,x,x,x,x,x,x]\n" + "".join(
    f"a{i}: &a{i} [{','.join([f'*a{i - 1}'] * 9)}]\n" for i in range(1, 12)
)


def file(folder, content, name="some.yaml"):
    path = folder / name
    path.write_bytes(content if isinstance(content, bytes) else content.encode("utf-8"))
    return path


def refusal(read, path):
    """The one line that a reader says of a file, which names it, in a moment."""
    began = time.monotonic()
    with pytest.raises(ValueError, match=r"give another$") as caught:
        read(path, fix="give another")
    assert time.monotonic() - began < patient(2)
    said = str(caught.value)
    assert caught.type is ValueError
    assert "\n" not in said
    assert len(said) < 400
    assert str(path) in said
    return said


YAML = {
    "an alias bomb": (BOMB, "an anchor"),
    "an alias": ("a: *b", "an alias"),
    "a recursive list": ("a: &a [*a]", "an anchor"),
    "a Python object": ("a: !!python/object/apply:os.system ['true']", "a tag"),
    "a tag of YAML's own": ("a: !!set {x, y}", "a tag"),
    "lists in lists": ("[" * 100_000, "more than 32 lists"),
    "mappings in mappings": ("{a: " * 20_000, "more than 32 lists"),
    "dashes": ("- " * 50_000 + "a", "more than 32 lists"),
    "question marks": ("? " * 50_000 + "a", "more than 32 lists"),
    "indents": ("".join(" " * i + "a:\n" for i in range(400)), "more than 32 lists"),
    "a long whole number": (f"a: {'9' * 400}", "a number of 400 digits"),
    "a whole number beyond 64 bits": ("a: 9223372036854775808", "a whole number beyond"),
    "a long number in base sixty": ("a: 1" + ":59" * 300 + ".5", "a number of"),
    "a number without digits": ("a: 0x_", "invalid literal"),
    "a name twice": ("a: 1\nb: 2\na: 3", "'a' is there twice, line 3"),
    "a name that is no text": ("1.5: a", "the name 1.5 is no text"),
    "a list as a name": ("? [a]\n: b", "is no text"),
    "two documents": ("a: 1\n---\nb: 2", "but found another document"),
    "no YAML": ("a: [1", "line 1"),
    "tabs": ("a:\n\t- 1", "cannot start any token"),
    "a number as the name of a field": ("1: a", "has no fields"),
    "a list": ("- 1", "has no fields"),
    "nothing": ("", "has no fields"),
    "a word": ("digits", "has no fields"),
    "Latin-1": ("a: Größe".encode("latin-1"), "is not UTF-8"),
    "UTF-16": ("a: 1".encode("utf-16"), "is not UTF-8"),
    "a control character": ("a: \x07", "special characters"),
    "NUL by an escape": ('a: "\\0"', "no text"),
    "half a character by an escape": ('a: "\\ud800"', "no text"),
    "too long": ("a: " + "b" * 2**18, "has more than 262,144 bytes"),
}


@pytest.mark.parametrize("kind", YAML)
def test_yaml_that_could_do_harm_is_refused_in_one_line(tmp_path, kind):
    content, reason = YAML[kind]
    assert reason in refusal(read_yaml, file(tmp_path, content))


JSON = {
    "lists in lists": ("[" * 100_000, "more than 32 lists"),
    "lists in lists that end": ("[" * 40 + "]" * 40, "more than 32 lists"),
    "a long whole number": (f"[{'9' * 400}]", "a whole number beyond"),
    "a very long whole number": (f"[-{'9' * 9000}]", "a whole number beyond"),
    "a name twice": ('{"a": 1, "a": 2}', "'a' is there twice"),
    "half a character": ('["\\ud800"]', "no text"),
    "NUL": ('{"\\u0000": 1}', "no text"),
    "no JSON": ("{", "line 1"),
    "nothing": ("", "line 1"),
    "UTF-16": ("[]".encode("utf-16"), "is not UTF-8"),
}


@pytest.mark.parametrize("kind", JSON)
def test_json_that_could_do_harm_is_refused_in_one_line(tmp_path, kind):
    content, reason = JSON[kind]
    assert reason in refusal(read_json, file(tmp_path, content, "some.json"))


def test_a_pipe_or_a_folder_in_place_of_a_file_is_refused_and_nobody_waits(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    assert "is not a file" in refusal(read_text, tmp_path / "pipe")
    assert "is not a file" in refusal(read_text, tmp_path)
    assert "there is no file" in refusal(read_text, tmp_path / "pipe" / "below")


@pytest.mark.parametrize("name", ["a\0b", "a\ud800b"])
def test_a_name_that_no_file_can_have_is_refused(name):
    with pytest.raises(ValueError, match="characters that are no text"):
        read_text(name, fix="give another")


def test_what_is_written_is_read_again_with_its_kinds(tmp_path):
    shared = ["palsgd", "train"]
    values = {
        "numbers": [0, -3, 2**62, 1e-05, 0.1, 1e300],
        "texts": ["", "none", "0:16,1000:8", "12:30", "2026-11-15", "1e-5", "ä", "=", "<<", "*a"],
        "flags": [True, False, None],
        "command": shared,
        "again": {"command": shared},
        "by seed": {2023: 0.5, 2024: 0.25},
    }
    assert read_yaml(file(tmp_path, yaml_text(values)), fix="") == values


def test_files_of_editors_that_begin_with_a_byte_order_mark_are_read(tmp_path):
    assert read_yaml(file(tmp_path, b"\xef\xbb\xbfrate: 1mbit"), fix="") == {"rate": "1mbit"}


def test_numbers_that_are_not_finite_are_read_from_json_as_none():
    assert json_value('[NaN, -Infinity, 1e999, 1.5, "NaN"]') == [None, None, None, 1.5, "NaN"]

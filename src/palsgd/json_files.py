"""Text and JSON files, read so that none can do harm, whoever wrote it.

A file that is too long, is no UTF-8, nests too deeply, says a name twice or holds numbers and texts
that no program of ours writes is refused in one line with its name. Files of YAML have the same
bounds (lab/yaml_files.py).
"""

import json
import math
import os
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NoReturn

from palsgd.checks import LARGEST, check_text, in_error

MOST_BYTES = 64 * 2**20
MOST_DEPTH = 32  # lists and objects inside each other; files of ours have six


def read_text(path: str | Path, *, fix: str, most: int = MOST_BYTES, errors: str = "strict") -> str:
    """The text of a file. `fix` ends the error, a ValueError, for a file that is none or is too
    long. `errors`, as Python's own: what becomes of bytes that are no UTF-8.

    Example:
        >>> from palsgd.json_files import read_text
        >>> read_text("no/such/file", fix="give another")
        Traceback (most recent call last):
        ValueError: there is no file no/such/file; give another
    """
    name = check_text("the name of a file", os.fspath(path))
    try:
        found = os.stat(name)
    except (FileNotFoundError, NotADirectoryError):
        raise ValueError(f"there is no file {name}; {fix}") from None
    if not stat.S_ISREG(found.st_mode):  # opening a pipe would wait for ever
        raise ValueError(f"{name} is not a file; {fix}")
    with open(name, "rb") as file:
        content = file.read(most + 1)
    if len(content) > most:
        raise ValueError(f"{name} has more than {most:,} bytes, the most that is read; {fix}")
    try:
        return content.decode("utf-8-sig", errors)
    except UnicodeDecodeError as error:
        raise ValueError(f"{name} is not UTF-8 (byte {error.start:,}); {fix}") from None


def read_json(path: str | Path, *, fix: str) -> Any:
    """The value of a JSON file; see `json_value`. `fix` ends the error for a file that is none.

    Example:
        >>> import tempfile
        >>> from pathlib import Path
        >>> from palsgd.json_files import read_json
        >>> path = Path(tempfile.mkdtemp()) / "summary.json"
        >>> _ = path.write_text('{"steps": 100, "loss": NaN}')
        >>> read_json(path, fix="run it again")
        {'steps': 100, 'loss': None}
    """
    text = read_text(path, fix=fix)
    try:
        return json_value(text)
    except ValueError as error:
        raise ValueError(f"{path} is not JSON ({error}); {fix}") from None


def read_json_object(path: str | Path, *, fix: str) -> dict[str, Any]:
    """The object of a JSON file whose value must be one."""
    found = read_json(path, fix=fix)
    if not isinstance(found, dict):
        raise ValueError(f"{path} is not an object; {fix}")
    return found


def json_value(text: str) -> Any:
    """The value of a JSON text, with None for numbers that are not finite: they are no JSON, but
    others write them. Anything else that is no JSON, or beyond the bounds, is a ValueError."""
    try:
        found = json.loads(
            text,
            parse_int=_whole,
            parse_float=_finite,
            parse_constant=lambda _: None,
            object_pairs_hook=_object,
        )
    except RecursionError:
        _refuse_depth()
    if "\\u" in text or not text.isascii() or text.count("[") + text.count("{") > MOST_DEPTH:
        for each in _texts(found, MOST_DEPTH):
            check_text("a text", each)
    return found


def whole_number(number: int) -> int:
    """The number, unless it is larger than any count."""
    if abs(number) > LARGEST:
        raise ValueError(f"a whole number beyond {LARGEST:,}")
    return number


def _whole(text: str) -> int:
    """Python itself refuses numbers of thousands of digits, with advice for programmers."""
    return whole_number(int(text[:40]))


def _finite(text: str) -> float | None:
    number = float(text)
    return number if math.isfinite(number) else None


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"the name {in_error(twice)} is there twice")
    return found


def _texts(value: Any, levels: int) -> Iterator[str]:
    """All texts in a value that may have so many levels."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict | list) and not levels:
        _refuse_depth()
    elif isinstance(value, dict):
        yield from value
        for each in value.values():
            yield from _texts(each, levels - 1)
    elif isinstance(value, list):
        for each in value:
            yield from _texts(each, levels - 1)


def _refuse_depth() -> NoReturn:
    raise ValueError(f"more than {MOST_DEPTH} lists and objects inside each other")

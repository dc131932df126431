"""CIFAR-10's batches, which are pickles, read without Python's pickle.

A pickle is a program for a machine with a stack, and Python's machine imports and calls whatever
the program names. The machine here knows what those files hold, written by Python 2 or 3: numbers,
texts, lists, tuples, dicts, and arrays of bytes. It imports and calls nothing, and refuses a file
that names anything but the three names by which NumPy writes an array.
"""

import io
import pickletools
from collections.abc import Callable
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from palsgd.checks import in_error

PIXELS = 3 * 32 * 32  # of an image
MOST_BYTES = 2**26  # a batch of 10,000 images has half of it
MOST_OPERATIONS = 10**6  # the same batch has some 50,000
_NAMES = {
    **dict.fromkeys(
        ("numpy.core.multiarray _reconstruct", "numpy._core.multiarray _reconstruct"), "array"
    ),
    "numpy ndarray": "its class",
    "numpy dtype": "dtype",
    "_codecs encode": "bytes",  # as Python 3 writes bytes for Python 2
}


def read_batch(path: Path) -> tuple[np.ndarray, list[int]]:
    """The images of a batch, bytes of a row each, and their labels. Raises a ValueError, which
    says why, for anything else."""
    with open(path, "rb") as file:
        content = file.read(MOST_BYTES + 1)
    if len(content) > MOST_BYTES:
        raise ValueError(f"it has more than {MOST_BYTES:,} bytes")
    found = _Machine().run(content)
    batch = found if type(found) is dict else {}
    data, labels = batch.get("data"), batch.get("labels")
    if not isinstance(data, _Array) or not isinstance(labels, list):
        raise ValueError("it has no 'data' that is an array, or no 'labels' that are a list")
    images = data.images()
    if len(images) != len(labels):
        raise ValueError(f"it has {len(images)} images and {len(labels)} labels")
    if not all(type(each) is int and 0 <= each <= 9 for each in labels):
        raise ValueError("it has labels that are no whole numbers from 0 to 9")
    return images, labels


class _Array:
    """An array of NumPy's, as far as it has been read."""

    state: Any = None

    def images(self) -> np.ndarray:
        match self.state:
            case (int(), (int() as rows, int() as columns), _Kind() as kind, False, raw):
                content = _bytes(raw)
            case _:
                raise ValueError("its array is not one of rows of bytes")
        if kind.name not in ("u1", "uint8") or columns != PIXELS:
            raise ValueError(f"its array has rows of {columns} {kind.name}, not of {PIXELS} u1")
        if len(content) != rows * columns:
            raise ValueError(f"its array of {rows} rows has {len(content):,} bytes")
        return np.frombuffer(content, np.uint8).reshape(rows, columns).copy()


class _Kind:
    """A dtype of NumPy's."""

    def __init__(self, name: str):
        self.name = name


class _Name:
    """One of the names that a file may use."""

    def __init__(self, name: str):
        if name not in _NAMES:
            raise ValueError(f"it names {in_error(name.replace(' ', '.'))}, which no batch has")
        self.meaning = _NAMES[name]


_MARK = object()


class _Machine:
    """The stack of a pickle, and what it has put aside."""

    def __init__(self) -> None:
        self.stack: list[Any] = []
        self.memo: dict[int, Any] = {}

    def run(self, content: bytes) -> Any:
        try:
            operations = pickletools.genops(io.BytesIO(content))
            for opcode, argument, _ in islice(operations, MOST_OPERATIONS):
                self._do(opcode.name, argument)
            if next(operations, None) is not None:
                raise ValueError(f"it has more than {MOST_OPERATIONS:,} operations")
            return self.stack.pop()
        except IndexError:
            raise ValueError("it takes more from its stack than there is") from None

    def _do(self, name: str, argument: Any) -> None:
        if name in _LITERALS:
            self.stack.append(argument)
        elif name in _EMPTY:
            self.stack.append(_EMPTY[name]())
        elif name in _ACTIONS:
            _ACTIONS[name](self, argument)
        elif name not in ("PROTO", "FRAME", "STOP"):
            raise ValueError(f"it has the operation {name}, which no batch has")

    def pop_mark(self) -> list[Any]:
        """What lies above the last mark."""
        found: list[Any] = []
        while (value := self.stack.pop()) is not _MARK:
            found.append(value)
        return found[::-1]

    def pop_many(self, count: int) -> list[Any]:
        return [self.stack.pop() for _ in range(count)][::-1]

    def extend(self, values: list[Any]) -> None:
        self._top(list).extend(values)

    def update(self, values: list[Any]) -> None:
        if len(values) % 2:
            raise ValueError("it has a key without a value")
        names = map(_text, values[::2])
        self._top(dict).update(zip(names, values[1::2], strict=True))

    def pop_dict(self) -> None:
        values = self.pop_mark()
        self.stack.append({})
        self.update(values)

    def call(self) -> None:
        name, arguments = self.pop_many(2)
        meaning = name.meaning if isinstance(name, _Name) else None
        match meaning, arguments:
            case "array", (_Name(), *_):
                self.stack.append(_Array())
            case "dtype", (str() as kind, *_):
                self.stack.append(_Kind(kind))
            case "bytes", (str() as text, "latin1"):
                self.stack.append(_bytes(text))
            case _:
                raise ValueError("it makes something that is no array")

    def build(self) -> None:
        """What an array is told of itself; a dtype of bytes has nothing more to be told."""
        state = self.stack.pop()
        if isinstance(self.stack[-1], _Array):
            self.stack[-1].state = state
        elif not isinstance(self.stack[-1], _Kind):
            raise ValueError("it changes something that is no array")

    def get(self, index: int) -> None:
        if index not in self.memo:
            raise ValueError("it takes up what it never put aside")
        self.stack.append(self.memo[index])

    def put(self, index: int) -> None:
        self.memo[index] = self.stack[-1]

    def _top(self, kind: type) -> Any:
        if type(self.stack[-1]) is not kind:
            raise ValueError(f"it adds to something that is no {kind.__name__}")
        return self.stack[-1]


_TEXTS = ("STRING", "BINSTRING", "SHORT_BINSTRING", "UNICODE", "BINUNICODE", "SHORT_BINUNICODE")
_BYTES = ("SHORT_BINBYTES", "BINBYTES", "BINBYTES8")
_WHOLE = ("INT", "BININT", "BININT1", "BININT2", "LONG", "LONG1", "LONG4")
_LITERALS = {*_TEXTS, *_BYTES, *_WHOLE}
_EMPTY: dict[str, Callable[[], Any]] = {
    "NONE": lambda: None,
    "NEWTRUE": lambda: True,
    "NEWFALSE": lambda: False,
    "MARK": lambda: _MARK,
    "EMPTY_DICT": dict,
    "EMPTY_LIST": list,
    "EMPTY_TUPLE": tuple,
}
_ACTIONS: dict[str, Callable[[_Machine, Any], Any]] = {
    "APPEND": lambda m, _: m.extend(m.pop_many(1)),
    "APPENDS": lambda m, _: m.extend(m.pop_mark()),
    "SETITEM": lambda m, _: m.update(m.pop_many(2)),
    "SETITEMS": lambda m, _: m.update(m.pop_mark()),
    "LIST": lambda m, _: m.stack.append(m.pop_mark()),
    "DICT": lambda m, _: m.pop_dict(),
    "TUPLE": lambda m, _: m.stack.append(tuple(m.pop_mark())),
    "TUPLE1": lambda m, _: m.stack.append(tuple(m.pop_many(1))),
    "TUPLE2": lambda m, _: m.stack.append(tuple(m.pop_many(2))),
    "TUPLE3": lambda m, _: m.stack.append(tuple(m.pop_many(3))),
    **dict.fromkeys(("PUT", "BINPUT", "LONG_BINPUT"), lambda m, index: m.put(index)),
    **dict.fromkeys(("GET", "BINGET", "LONG_BINGET"), lambda m, index: m.get(index)),
    "MEMOIZE": lambda m, _: m.put(len(m.memo)),
    "GLOBAL": lambda m, name: m.stack.append(_Name(name)),
    "STACK_GLOBAL": lambda m, _: m.stack.append(_Name(" ".join(map(_text, m.pop_many(2))))),
    "REDUCE": lambda m, _: m.call(),
    "BUILD": lambda m, _: m.build(),
}


def _text(value: Any) -> str:
    """A text; Python 2 has the same type for texts and bytes."""
    if isinstance(value, bytes):
        return value.decode("latin-1")
    if not isinstance(value, str):
        raise ValueError(f"it has a {type(value).__name__} where a text belongs")
    return value


def _bytes(value: Any) -> bytes:
    return value if isinstance(value, bytes) else _text(value).encode("latin-1")

"""Values that nobody expects, and changes to what was right."""

import random
from collections.abc import Callable
from decimal import Decimal
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import torch


class Unprintable:
    def __repr__(self) -> str:
        raise RuntimeError("no repr")


class ManyLines:
    def __repr__(self) -> str:
        return "several\nlines"


PLAIN: list[Any] = [
    None, True, False, 0, 1, -1, 2, 3, 7, 64, 2**31, 2**62, 2**63, 10**30, 10**400, -(10**400),
    0.0, -0.0, 0.5, 1.0, 1.5, -0.1, 1e-300, 5e-324, 1e300, 1e308,
    float("nan"), float("inf"), -float("inf"),
]  # fmt: skip
TEXTS = [
    "", " ", "abc", "none", "auto", "true", "0", "-1", "1.5", "nan", "inf", "1e400", "9" * 400,
    "9" * 5000, "a" * 5000, "0:16,10:8", "0:16,10:", "cosine:0.5..0", "cosine:", "linear:1..x",
    "qsr:16:0.05", "qsr::", "dirichlet:0.3", "topk:0.03", "topk:x", "topk:1e400", "int8", "ddp",
    "palsgd", "digits", "a\0b", "a\ud800b", "ä", "[/bold]", "{0}", "%s", "a\nb", "../..", "/",
    "x.py:Y", ":", "::", ".py", "100mbit,20ms,step=50ms", "100mbit", "1e308gbit,1e308h", "=",
    ",", "step=", "rate=100mbit,rate=1mbit", "١٢", "1_000", "0x10", "--", "-", "$(x)", "nested..",
]  # fmt: skip
OBJECTS: list[Callable[[], Any]] = [
    lambda: b"bytes",
    tuple,
    list,
    dict,
    set,
    lambda: [1],
    lambda: (1, 2),
    lambda: {"a": 1},
    lambda: {1: 2},
    lambda: [[[]]],
    object,
    Unprintable,
    ManyLines,
    lambda: lambda: None,
    lambda: lambda *_: None,
    lambda: np.int64(3),
    lambda: np.int32(-3),
    lambda: np.float32(0.5),
    lambda: np.float64("nan"),
    lambda: np.bool_(True),
    lambda: np.array([1, 2]),
    lambda: np.array(3),
    lambda: np.array("text"),
    lambda: torch.tensor(1.0),
    lambda: torch.tensor([1.0, 2.0]),
    lambda: torch.zeros(0),
    lambda: Decimal("1.5"),
    lambda: Fraction(1, 3),
    lambda: 1j,
    lambda: range(3),
    lambda: Path("x"),
    lambda: iter([1, 2]),
    lambda: torch.device("cpu"),
    lambda: random,
]


def any_value(rng: random.Random) -> Any:
    kind = rng.random()
    if kind < 0.4:
        return rng.choice(PLAIN)
    return rng.choice(TEXTS) if kind < 0.65 else rng.choice(OBJECTS)()


def text_value(rng: random.Random) -> str:
    """A text that may be on a command line, which has no NUL."""
    chosen = str(rng.choice(PLAIN)) if rng.random() < 0.3 else rng.choice(TEXTS)
    return chosen.replace("\0", "0")


def shown(value: Any) -> str:
    try:
        return repr(value)[:60]
    except Exception:
        return f"<{type(value).__name__}>"


def changed_tree(tree: Any, rng: random.Random) -> Any:
    """A JSON or YAML value with one of its parts replaced, removed or doubled."""
    if isinstance(tree, dict) and tree and rng.random() < 0.85:
        key = rng.choice(list(tree))
        kind = rng.random()
        if kind < 0.1:
            return {name: value for name, value in tree.items() if name != key}
        if kind < 0.15:
            return tree | {text_value(rng): tree[key]}
        return tree | {key: changed_tree(tree[key], rng)}
    if isinstance(tree, list) and tree and rng.random() < 0.85:
        place = rng.randrange(len(tree))
        if rng.random() < 0.1:
            return tree[:place] + tree[place + 1 :]
        return [*tree[:place], changed_tree(tree[place], rng), *tree[place + 1 :]]
    return plain_value(rng)


def plain_value(rng: random.Random) -> Any:
    kind = rng.random()
    if kind < 0.5:
        return rng.choice(PLAIN)
    if kind < 0.8:
        return rng.choice(TEXTS)
    return rng.choice([[], {}, [1], [[]], {"a": {}}, [[1, 2], [3]], {"a": [1]}, ["x"], [None]])


def changed_bytes(content: bytes, rng: random.Random) -> bytes:
    """Some bytes of a file flipped, cut, put in, doubled or zeroed."""
    data = bytearray(content)
    for _ in range(rng.choice((1, 1, 2, 5))):
        at = rng.randrange(len(data) + 1)
        length = min(rng.choice((1, 4, 64, 1000)), len(data) - at)
        kind = rng.randrange(6)
        if kind == 0 and at < len(data):
            data[at] ^= 1 << rng.randrange(8)
        elif kind == 1:
            del data[at:]
        elif kind == 2:
            data[at:at] = rng.choice((b"[", b"{", b"\0", b"\xff\xfe", b"- " * 300, b"\n", b"!!x "))
        elif kind == 3:
            data[at:at] = data[at : at + length]
        elif kind == 4:
            data[at : at + length] = bytes(length)
        else:
            data[at : at + length] = rng.randbytes(length)
    return bytes(data)

"""Numbers, texts and lists as one tensor of bytes, which travels wherever tensors travel.

torch's helpers for distributed checkpoints carry tensors, and drop or refuse most other values.
"""

import json
import zlib
from collections import Counter
from typing import Any

import numpy as np
import torch
from torch import Tensor

# A checkpoint is read into tensors of the sizes that a new optimizer's state has. Texts of all
# usual lengths therefore take the same number of bytes, which hold the lines of 10000 syncs.
_LEAST = 1 << 20
_TAG = "palsgd type"  # the key of a dict that stands for a value that JSON does not know


def encode(tree: Any, device: torch.device) -> Tensor:
    """The tree as bytes: the length of the text, the compressed text, and zeros."""
    text = zlib.compress(json.dumps(plain(tree)).encode())
    size = _LEAST
    while size < len(text) + 8:
        size *= 2
    filled = np.zeros(size, dtype=np.uint8)
    filled[: len(text) + 8] = np.frombuffer(len(text).to_bytes(8, "little") + text, dtype=np.uint8)
    return torch.from_numpy(filled).to(device)


def without_room(encoded: Tensor) -> Tensor:
    """The bytes without the zeros behind the text. `decode` reads them too."""
    length = int.from_bytes(encoded[:8].cpu().numpy().tobytes(), "little")
    return encoded[: 8 + length].clone()


def decode(encoded: Tensor) -> Any:
    filled = encoded.detach().cpu().to(torch.uint8).numpy().tobytes()
    length = int.from_bytes(filled[:8], "little")
    return restored(json.loads(zlib.decompress(filled[8 : 8 + length])))


def plain(value: Any) -> Any:
    """`value` in the types of JSON, from which `restored` makes it again."""
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, list):
        return [plain(each) for each in value]
    if isinstance(value, dict):
        as_object = _TAG not in value and all(isinstance(key, str) for key in value)
        if as_object and not isinstance(value, Counter):
            return {key: plain(each) for key, each in value.items()}
        pairs = [[plain(key), plain(each)] for key, each in value.items()]
        return {_TAG: "counter" if isinstance(value, Counter) else "dict", "items": pairs}
    if isinstance(value, (tuple, set)):
        return {_TAG: type(value).__name__, "items": [plain(each) for each in value]}
    if isinstance(value, np.generic):
        return plain(value.item())
    if isinstance(value, Tensor):
        kind = str(value.dtype).removeprefix("torch.")
        return {_TAG: "tensor", "dtype": kind, "items": value.detach().cpu().tolist()}
    if isinstance(value, torch.dtype):
        return {_TAG: "dtype", "items": str(value).removeprefix("torch.")}
    raise ValueError(
        f"the state has a {type(value).__name__}, which cannot be saved; use numbers, texts, lists "
        "and tensors in the groups of the outer optimizer, in the scheduler's state and in extra"
    )


def restored(value: Any) -> Any:
    if isinstance(value, list):
        return [restored(each) for each in value]
    if not isinstance(value, dict):
        return value
    if _TAG not in value:
        return {key: restored(each) for key, each in value.items()}
    kind, items = value[_TAG], value["items"]
    if kind == "tensor":
        return torch.tensor(items, dtype=getattr(torch, value["dtype"]))
    if kind == "dtype":
        return getattr(torch, items)
    make: Any = {"dict": dict, "counter": _counter, "tuple": tuple, "set": set}[kind]
    return make(restored(items))


def _counter(pairs: list[Any]) -> Counter:
    return Counter(dict(pairs))

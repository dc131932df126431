"""Tensors as a file in the layout of safetensors, which many programs read.

A file is eight bytes with the length of the header, the header as JSON, and the bytes of the
tensors. Nothing in it can be run. The header names the dtype, the shape and the place of every
tensor, and has texts beside them.
"""

import hashlib
import json
import os
from collections.abc import Mapping
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from palsgd.sharding import is_sharded

SUFFIX = ".safetensors"
_ALIGNED = 64  # the tensors begin at a multiple of it, so that each can be viewed in its own dtype
_PIECE = 1 << 24  # bytes that are read and hashed at a time
_LONGEST_HEADER = 100_000_000  # readers of safetensors refuse longer ones
_NAMES = {
    "F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16",
    "F8_E4M3": "float8_e4m3fn", "F8_E5M2": "float8_e5m2", "C64": "complex64",
    "I64": "int64", "I32": "int32", "I16": "int16", "I8": "int8",
    "U64": "uint64", "U32": "uint32", "U16": "uint16", "U8": "uint8", "BOOL": "bool",
}  # fmt: skip
_DTYPES: dict[str, torch.dtype] = {
    short: getattr(torch, name) for short, name in _NAMES.items() if hasattr(torch, name)
}
_SHORT = {dtype: short for short, dtype in _DTYPES.items()}


class Written(NamedTuple):
    """By which a file is recognised later."""

    size: int
    sha256: str


def write(path: Path, tensors: Mapping[str, Tensor], texts: Mapping[str, str]) -> Written:
    """Write a file and force it onto the disk. The widest dtypes come first, so that every tensor
    begins at a multiple of its own width."""
    kinds = {name: _short(name, tensor) for name, tensor in tensors.items()}
    ordered = sorted(tensors.items(), key=lambda pair: -pair[1].itemsize)
    header: dict[str, Any] = {"__metadata__": dict(texts)}
    end = 0
    for name, tensor in ordered:
        start, end = end, end + tensor.nbytes
        header[name] = {
            "dtype": kinds[name], "shape": list(tensor.shape), "data_offsets": [start, end]
        }  # fmt: skip
    head = json.dumps(header).encode()
    head += b" " * (-(8 + len(head)) % _ALIGNED)
    if len(head) > _LONGEST_HEADER:
        raise ValueError(f"the names and numbers for {path} take {len(head)} bytes; save fewer")
    head = len(head).to_bytes(8, "little") + head
    digest = hashlib.sha256()
    with open(path, "wb") as file:
        for content in chain((memoryview(head),), (_bytes_of(tensor) for _, tensor in ordered)):
            file.write(content)
            digest.update(content)
        file.flush()
        os.fsync(file.fileno())
    return Written(len(head) + end, digest.hexdigest())


def _short(name: str, tensor: Tensor) -> str:
    plain = tensor.layout is torch.strided and not tensor.is_quantized and not is_sharded(tensor)
    if tensor.dtype not in _SHORT or not plain:
        raise ValueError(
            f"{name} is a tensor of {tensor.dtype} and {tensor.layout}, which cannot be saved; "
            f"use a dense one of {', '.join(sorted(_NAMES.values()))}"
        )
    return _SHORT[tensor.dtype]


def _bytes_of(tensor: Tensor) -> memoryview:
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    return flat.view(torch.uint8).numpy().data


def read(path: Path, written: Written) -> Tensor:
    """The bytes of a file, as they were written. They are compared before anybody parses them.

    Raises:
        ValueError: the file is missing, or has other bytes than were written.
        OSError: the disk refuses.
    """
    try:
        file = open(path, "rb")  # noqa: SIM115
    except FileNotFoundError:
        raise ValueError(f"{path} is missing") from None
    with file:
        size = os.fstat(file.fileno()).st_size
        if size != written.size:
            raise ValueError(f"{path} has {size} bytes instead of {written.size}")
        data, digest = torch.empty(size, dtype=torch.uint8), hashlib.sha256()
        view, done = data.numpy().data, 0
        while done < size and (count := file.readinto(view[done : done + _PIECE])):
            digest.update(view[done : done + count])
            done += count
    if digest.hexdigest() != written.sha256:
        raise ValueError(f"{path} has other bytes than were written: its checksum differs")
    return data


def parsed(data: Tensor, name: str) -> tuple[dict[str, Tensor], dict[str, str]]:
    """The tensors and texts in the bytes of a file. `name` is that of the file, for
    errors. Each tensor has memory of its own: one that lay in `data` would keep all of it, and
    torch reads beside the end of some such views."""
    try:
        length = int.from_bytes(data[:8].numpy().tobytes(), "little")
        if 8 + length > len(data):
            raise ValueError(f"a header of {length} bytes in a file of {len(data)}")
        header = json.loads(data[8 : 8 + length].numpy().tobytes())
        texts = header.pop("__metadata__", {})
        body = data[8 + length :]
        return {key: _tensor(body, entry) for key, entry in header.items()}, texts
    except (ValueError, KeyError, TypeError, AttributeError, RuntimeError, RecursionError) as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise ValueError(f"{name} is not laid out as safetensors ({reason})") from None


def _tensor(body: Tensor, entry: dict[str, Any]) -> Tensor:
    start, end = entry["data_offsets"]
    if not 0 <= start <= end <= len(body):
        raise ValueError(f"a tensor at bytes {start} to {end} of {len(body)}")
    return body[start:end].view(_DTYPES[entry["dtype"]]).view(entry["shape"]).clone()

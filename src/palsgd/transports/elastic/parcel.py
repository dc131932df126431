"""A tree of tensors, numbers and texts, from one worker of a group to all others."""

from typing import Any

import torch
from torch import Tensor

from palsgd.scalars import decode, encode, without_room
from palsgd.transports.elastic.generation import Generation

_PLACE = "tensor of the parcel"  # the key of a dict that stands for a tensor


def send(tree: Any, group: Generation) -> None:
    """Send a tree to all other workers of the group."""
    tensors: list[Tensor] = []
    contents = {"tree": _without(tree, tensors), "tensors": [_kind(t) for t in tensors]}
    text = without_room(encode(contents, torch.device("cpu")))
    group.broadcast(torch.tensor([len(text)]), group.worker)
    group.broadcast(text, group.worker)
    for tensor in tensors:
        group.broadcast(tensor, group.worker)


def receive(group: Generation, source: int) -> Any:
    """The tree that the worker at the place `source` sends, with tensors in the memory of the
    host."""
    size = torch.zeros(1, dtype=torch.int64)
    group.broadcast(size, source)
    text = torch.zeros(int(size), dtype=torch.uint8)
    group.broadcast(text, source)
    contents = decode(text)
    tensors = [_empty(*kind) for kind in contents["tensors"]]
    for tensor in tensors:
        group.broadcast(tensor, source)
    return _with(contents["tree"], tensors)


def _kind(tensor: Tensor) -> list[Any]:
    return [str(tensor.dtype).removeprefix("torch."), list(tensor.shape)]


def _empty(dtype: str, shape: list[int]) -> Tensor:
    return torch.empty(shape, dtype=getattr(torch, dtype))


def _without(value: Any, tensors: list[Tensor]) -> Any:
    """`value` with a dict in place of each tensor, which is added to `tensors`. A number in a
    tensor stays, as it is kept among the numbers."""
    if isinstance(value, Tensor) and value.dim() > 0:
        tensors.append(value.detach().to("cpu").contiguous())
        return {_PLACE: len(tensors) - 1}
    if isinstance(value, dict):
        return {key: _without(each, tensors) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        found = [_without(each, tensors) for each in value]
        return found if isinstance(value, list) else tuple(found)
    return value


def _with(value: Any, tensors: list[Tensor]) -> Any:
    if isinstance(value, dict) and _PLACE in value:
        return tensors[value[_PLACE]]
    if isinstance(value, dict):
        return {key: _with(each, tensors) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(_with(each, tensors) for each in value)
    return value

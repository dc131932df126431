"""Dicts and lists with tensors in them, as named tensors and one text."""

import json
from collections import Counter
from typing import Any

import torch
from torch import Tensor

from palsgd.scalars import plain, restored
from palsgd.sharding import is_sharded

_STORED = "palsgd stored"  # the key of a dict that stands for a tensor


def taken_apart(tree: Any) -> tuple[dict[str, Tensor], str]:
    """The tensors of `tree` by their paths, and all the rest as a text. Of a sharded tensor it is
    this rank's shard."""
    tensors: dict[str, Tensor] = {}
    return tensors, json.dumps(plain(_without_tensors(tree, "", tensors)))


def put_together(tensors: dict[str, Tensor], text: str, mesh: Any, device: torch.device) -> Any:
    """The inverse of `taken_apart`. Shards are those of tensors over `mesh`, on `device`."""
    return _with_tensors(restored(json.loads(text)), tensors, mesh, device)


def _without_tensors(value: Any, path: str, tensors: dict[str, Tensor]) -> Any:
    if isinstance(value, Tensor):
        name = path
        while name in tensors:  # as the path of {"a/b": ...} is that of {"a": {"b": ...}}
            name += "'"
        tensors[name] = value._local_tensor if is_sharded(value) else value
        return {_STORED: name, "sharded": _layout(value) if is_sharded(value) else None}
    if isinstance(value, dict):
        if _STORED in value:
            raise ValueError(f"{path} has the key {_STORED!r}, which stands for tensors; rename it")
        entries = {k: _without_tensors(v, _joined(path, k), tensors) for k, v in value.items()}
        return Counter(entries) if isinstance(value, Counter) else entries
    if isinstance(value, (list, tuple)):
        found = [_without_tensors(v, _joined(path, i), tensors) for i, v in enumerate(value)]
        return found if isinstance(value, list) else tuple(found)
    return value


def _joined(path: str, key: Any) -> str:
    return f"{path}/{key}" if path else str(key)


def _with_tensors(value: Any, tensors: dict[str, Tensor], mesh: Any, device: torch.device) -> Any:
    if isinstance(value, dict) and _STORED in value:
        local, layout = tensors[value[_STORED]], value["sharded"]
        return local if layout is None else _sharded(local.to(device), layout, mesh)
    if isinstance(value, dict):
        entries = {k: _with_tensors(each, tensors, mesh, device) for k, each in value.items()}
        return Counter(entries) if isinstance(value, Counter) else entries
    if isinstance(value, (list, tuple)):
        found = [_with_tensors(each, tensors, mesh, device) for each in value]
        return found if isinstance(value, list) else tuple(found)
    return value


# -- shards ------------------------------------------------------------------------------------


def _layout(tensor: Any) -> dict[str, Any]:
    places = []
    for placement in tensor.placements:
        if not (placement.is_shard() or placement.is_replicate()):
            raise ValueError(f"a tensor is placed as {placement}, which cannot be saved")
        places.append(placement.dim if placement.is_shard() else None)
    return {"shape": list(tensor.shape), "stride": list(tensor.stride()), "places": places}


def _sharded(local: Tensor, layout: dict[str, Any], mesh: Any) -> Tensor:
    if mesh is None or mesh.ndim != len(layout["places"]):
        raise ValueError(
            "the checkpoint has shards over a device mesh that this model is not on; shard the "
            "model as it was when it was saved"
        )
    from torch.distributed.tensor import DTensor, Replicate, Shard

    places = [Replicate() if dim is None else Shard(dim) for dim in layout["places"]]
    return DTensor.from_local(
        local, mesh, places, shape=torch.Size(layout["shape"]), stride=tuple(layout["stride"])
    )

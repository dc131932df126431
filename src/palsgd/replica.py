"""One worker's copy of the model: the tensors that its inner optimizer trains."""

import zlib
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from palsgd.flat import Layout
from palsgd.sharding import is_sharded, local_tensor


def check_model(model: Any) -> None:
    if not isinstance(model, nn.Module):
        raise ValueError(
            f"model must be a torch.nn.Module, got {type(model).__name__}; give the model itself, "
            "not its parameters: the inner optimizer has those"
        )


class Replica:
    """The tensors an inner optimizer trains, as plain local tensors (shards, if sharded)."""

    def __init__(self, model: nn.Module, inner: Optimizer):
        self._model = unwrapped(model)
        named: dict[Tensor, str] = {p: name for name, p in self._model.named_parameters()}
        _check_ownership(named, inner)
        self.inner = inner
        self.params = trainable(inner)
        self.names = [named[p] for p in self.params]
        _check_tensors(self.params, self.names)
        self.groups = [
            [i for i, p in enumerate(self.params) if any(p is q for q in group["params"])]
            for group in inner.param_groups
        ]
        self.sharded = any(is_sharded(p) for p in self.params)
        local = self.local()
        self.device = local[0].device
        self.dtype = max((_master_dtype(t) for t in local), key=lambda dtype: dtype.itemsize)
        self.layout = Layout(local)
        self._ids = list(map(id, self.params))
        self._kinds = [(p.dtype, p.device) for p in self.params]
        self.initial_rates = [
            float(group.get("initial_lr", group["lr"])) for group in inner.param_groups
        ]

    def local(self) -> list[Tensor]:
        """The local tensors. Shards are looked up at each call, as torch may replace them."""
        return [local_tensor(p) for p in self.params] if self.sharded else list(self.params)

    def check_unchanged(self) -> None:
        """Raise if the inner optimizer trains other tensors than when this was built, or the same
        ones in another precision or on another device."""
        now = trainable(self.inner)
        # `is` by id, as == of two tensors compares their elements
        if list(map(id, now)) != self._ids:
            raise ValueError(
                f"{self._changed(now)} after the optimizer was built; build a new palsgd optimizer "
                "at that point, so that every worker mixes and sends the same ones"
            )
        for name, p, (dtype, device) in zip(self.names, now, self._kinds, strict=True):
            if p.dtype != dtype or p.device != device:
                raise ValueError(
                    f"parameter {name} became {p.dtype} on {p.device} after the optimizer was "
                    f"built, when it was {dtype} on {device}; convert and move the model first, "
                    "then build inner and the palsgd optimizer"
                )

    def check_held(self) -> None:
        """Raise if the model has lost a tensor that the inner optimizer trains. Sharded tensors are
        not looked for, as fully_shard puts others into their places while they are gathered."""
        held = self._ids if self.sharded else set(map(id, self._model.parameters()))
        for name, each in zip(self.names, self._ids, strict=True):
            if each not in held:
                raise ValueError(
                    f"parameter {name} is no longer the model's: it was replaced after the "
                    "optimizer was built, by code or by model.to(device); build inner and the "
                    "palsgd optimizer from the model as it is trained"
                )

    def _changed(self, now: list[Tensor]) -> str:
        """What happened to the tensors that the inner optimizer trains."""
        held, before = set(map(id, now)), set(self._ids)
        gone = [n for n, p in zip(self.names, self.params, strict=True) if id(p) not in held]
        new, found = len(held - before), []
        if gone:
            found.append(f"{len(gone)} parameter(s) were frozen or taken out of inner ({gone[0]})")
        if new:
            found.append(f"{new} parameter(s) were unfrozen or added to inner")
        return " and ".join(found) or "the order of the parameters in inner was changed"

    def grads(self) -> list[Tensor | None]:
        return [None if p.grad is None else local_tensor(p.grad) for p in self.params]

    def flat_grads(self) -> list[Tensor]:
        """The gradients that there are, each in one dimension; of a sparse one its values."""
        found = []
        for i, grad in enumerate(self.grads()):
            if grad is not None and grad.layout is torch.strided:
                found.append(self.layout.flattened(i, grad))
            elif grad is not None:
                found.append(grad.coalesce().values().reshape(-1))
        return found

    def describe(self) -> str:
        """Names, types and unsharded shapes of the tensors: a text that is equal on all ranks that
        exchange with this one."""
        kinds = zip(self.names, self.params, strict=True)
        shapes = [f"{name}:{p.dtype}:{tuple(p.shape)}:{p.stride()}" for name, p in kinds]
        total = sum(p.numel() for p in self.params)
        return f"{len(shapes)} tensors, {total} elements, layout {_checksum(shapes):08x}"


def unwrapped(model: nn.Module) -> nn.Module:
    """The model inside DistributedDataParallel and torch.compile, so that names are the same with
    and without them."""
    model = uncompiled(model)
    return unwrapped(model.module) if isinstance(model, DistributedDataParallel) else model


def uncompiled(model: nn.Module) -> nn.Module:
    inside = getattr(model, "_orig_mod", None)
    return inside if isinstance(inside, nn.Module) else model


def trainable(inner: Optimizer) -> list[Tensor]:
    return [p for group in inner.param_groups for p in group["params"] if p.requires_grad]


def _master_dtype(tensor: Tensor) -> torch.dtype:
    return torch.float64 if tensor.dtype == torch.float64 else torch.float32


def _checksum(lines: list[str]) -> int:
    return zlib.crc32("\n".join(lines).encode())


def _check_ownership(named: dict[Tensor, str], inner: Optimizer) -> None:
    held = {p for group in inner.param_groups for p in group["params"]}
    strangers = [p for p in held if p not in named]
    if strangers:
        shapes = ", ".join(str(tuple(p.shape)) for p in strangers[:3])
        raise ValueError(
            f"the inner optimizer holds {len(strangers)} tensor(s) that are not the model's "
            f"(shapes {shapes}); build it from model.parameters() of the model given here"
        )
    missing = [name for p, name in named.items() if p.requires_grad and p not in held]
    if missing:
        raise ValueError(
            f"the inner optimizer does not hold {len(missing)} trainable parameter(s) of the model "
            f"({', '.join(missing[:3])}); add them to it or freeze them with requires_grad_(False)"
        )


def _check_tensors(params: list[Tensor], names: list[str]) -> None:
    if not params:
        raise ValueError("the inner optimizer holds no trainable parameter; unfreeze at least one")
    devices = {p.device for p in params}
    if len(devices) > 1:
        raise ValueError(
            f"the model lies on several devices ({', '.join(sorted(map(str, devices)))}); "
            "put one worker on one device, or shard it with fully_shard over a 2-D mesh"
        )
    odd = [name for name, p in zip(names, params, strict=True) if not p.is_floating_point()]
    if odd:
        raise ValueError(f"parameter {odd[0]} is not of a real floating-point type; freeze it")

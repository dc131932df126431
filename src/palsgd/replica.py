"""One worker's copy of the model: its trainable tensors and the anchor they are pulled to."""

import zlib

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from palsgd.layout import Bucket, Layout, fragments


class Replica:
    """The tensors an inner optimizer trains, as plain local tensors (shards, if sharded)."""

    def __init__(self, model: nn.Module, inner: Optimizer):
        named: dict[Tensor, str] = {p: name for name, p in unwrapped(model).named_parameters()}
        _check_ownership(named, inner)
        self._inner = inner
        self.params = trainable(inner)
        self.names = [named[p] for p in self.params]
        _check_tensors(self.params, self.names)
        self.groups = [
            [i for i, p in enumerate(self.params) if any(p is q for q in group["params"])]
            for group in inner.param_groups
        ]
        local = self.local()
        self.device = local[0].device
        self.dtype = max((_master_dtype(t) for t in local), key=lambda dtype: dtype.itemsize)
        self.layout = Layout(local)
        self.anchor: Anchor | None = None

    def local(self) -> list[Tensor]:
        return [local_tensor(p) for p in self.params]

    def group(self, index: int) -> tuple[list[Tensor], list[Tensor]]:
        """The local tensors of a parameter group and the anchor's, side by side."""
        assert self.anchor is not None
        members = self.groups[index]
        return (
            [local_tensor(self.params[i]) for i in members],
            [self.anchor.views[i] for i in members],
        )

    def learning_rates(self) -> list[float]:
        return [float(group["lr"]) for group in self._inner.param_groups]

    def check_unchanged(self) -> None:
        now = trainable(self._inner)
        if len(now) != len(self.params) or any(
            p is not q for p, q in zip(now, self.params, strict=True)
        ):
            raise ValueError(
                "parameters were frozen or unfrozen after the optimizer was built; build a new "
                "palsgd optimizer at that point, so that every worker mixes and sends the same ones"
            )

    def grads(self) -> list[Tensor | None]:
        return [None if p.grad is None else local_tensor(p.grad) for p in self.params]

    def describe(self) -> str:
        """The same text on every rank whose tensors go with ours: names, types, whole shapes."""
        kinds = zip(self.names, self.params, strict=True)
        shapes = [f"{name}:{p.dtype}:{tuple(p.shape)}:{p.stride()}" for name, p in kinds]
        total = sum(p.numel() for p in self.params)
        return f"{len(shapes)} tensors, {total} elements, layout {_checksum(shapes):08x}"


class Anchor:
    """The last global model in full precision: one flat buffer, seen tensor by tensor, or in
    `fragments` parts that are synced on their own. The bounds of those may cut a tensor in two."""

    def __init__(self, replica: Replica, count: int = 1):
        self._replica = replica
        layout = replica.layout
        self.flat = torch.zeros(layout.size, dtype=replica.dtype, device=replica.device)
        self.views = layout.views(self.flat)
        self.ranges = fragments(layout.size, count)
        self._fragments = [
            Bucket(layout, r.start, self.flat[r.start : r.stop]) for r in self.ranges
        ]
        # what the outer optimizer moves: of each fragment its tensors, or pieces of them
        self.pieces = [[nn.Parameter(p) for p in each.parts()] for each in self._fragments]
        self.params = [piece for pieces in self.pieces for piece in pieces]

    def take(self) -> None:
        """The local model becomes the global one."""
        torch._foreach_copy_(self.views, self._replica.local())

    @torch.no_grad()
    def give(self) -> None:
        """The global model becomes the local one."""
        torch._foreach_copy_(self._replica.local(), self.views)

    @torch.no_grad()
    def give_fragment(self, fragment: int) -> None:
        self._fragments[fragment].write(self._replica.local())

    def parts(self, fragment: int, tensors: list[Tensor]) -> list[Tensor]:
        """What lies in `tensors` where `pieces` lie in the anchor."""
        return self._fragments[fragment].parts([t.detach() for t in tensors])

    def digest(self, fragment: int | None = None) -> int:
        """32 bits that are equal on two workers whose anchors are equal, bit for bit."""
        if fragment is None:
            return digest(self.flat)
        part = self.ranges[fragment]
        return digest(self.flat[part.start : part.stop])


def digest(flat: Tensor) -> int:
    """32 bits of a flat float32 or float64 tensor: the sum of its 8-byte words, folded."""
    pairs = flat.numel() * flat.itemsize // 8
    total = int(flat[: pairs * 8 // flat.itemsize].view(torch.int64).sum())
    if flat.numel() * flat.itemsize % 8:
        total += int(flat[-1:].view(torch.int32))
    return (total ^ (total >> 32)) & 0xFFFFFFFF


_LARGE = 1 << 20  # elements from which a launch of its own is cheaper than a share of a joint one


def mix_(local: list[Tensor], anchor: list[Tensor], weight: float) -> None:
    """Pull each local tensor towards the anchor: x <- x + weight (anchor - x), in place."""
    small_local, small_anchor = [], []
    for x, a in zip(local, anchor, strict=True):
        if x.dtype != a.dtype:  # a low-precision model meets its anchor in the anchor's precision
            x.copy_(torch.lerp(x.to(a.dtype), a, weight))
        elif x.numel() >= _LARGE:
            x.lerp_(a, weight)
        else:
            small_local.append(x)
            small_anchor.append(a)
    if small_local:
        torch._foreach_lerp_(small_local, small_anchor, weight)


def unwrapped(model: nn.Module) -> nn.Module:
    """Without DistributedDataParallel and torch.compile around it, so that names agree."""
    model = uncompiled(model)
    return unwrapped(model.module) if isinstance(model, DistributedDataParallel) else model


def uncompiled(model: nn.Module) -> nn.Module:
    inside = getattr(model, "_orig_mod", None)
    return inside if isinstance(inside, nn.Module) else model


def local_tensor(tensor: Tensor) -> Tensor:
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


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

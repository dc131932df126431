"""The warm-up phase: plain DDP. Who averages the gradients, and how that is switched off."""

from collections.abc import Iterator
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel

from palsgd.replica import uncompiled
from palsgd.roll_call import Attendance, check_consensus
from palsgd.transport import Message

if TYPE_CHECKING:
    from palsgd.core import Core
    from palsgd.sync import Exchange


class GradientSync(Protocol):
    in_step: bool  # must step() average the gradients, or has backward() done it?

    def switch(self, *, on: bool) -> None: ...


class InStep:
    """A plain module: `step()` averages in buckets, after backward."""

    in_step = True

    def switch(self, *, on: bool) -> None:
        pass


class Wrapped:
    """The user's DistributedDataParallel averages during backward, overlapped with it."""

    in_step = False

    def __init__(self, model: DistributedDataParallel):
        self._model = model

    def switch(self, *, on: bool) -> None:
        # What DDP.no_sync() sets, for good. The second flag stops the broadcast of buffers that
        # the next forward would still do.
        self._model.require_backward_grad_sync = on
        self._model.require_forward_param_sync = on


class Hybrid:
    """HSDP: fully_shard over a 2-D mesh all-reduces over the replica axis during backward."""

    in_step = False

    def __init__(self, model: nn.Module):
        self._meshes = list(_replicated_meshes(model))

    def switch(self, *, on: bool) -> None:
        # set_requires_all_reduce(False) will not do: it holds gradients back for a later
        # all-reduce. A group whose mesh info is that of plain FSDP reduce-scatters inside the
        # replica, divides by the number of shards, and hands the gradient over.
        from torch.distributed.fsdp._fully_shard._fsdp_common import FSDPMeshInfo, HSDPMeshInfo

        for info in self._meshes:
            info.__class__ = HSDPMeshInfo if on else FSDPMeshInfo


def gradient_sync(model: nn.Module) -> GradientSync:
    model = uncompiled(model)
    if isinstance(model, DistributedDataParallel):
        return Wrapped(model)
    if any(isinstance(module, DistributedDataParallel) for module in model.modules()):
        raise ValueError(
            "a part of the model is wrapped in DistributedDataParallel; wrap the whole model, or "
            "nothing of it"
        )
    if any(True for _ in _replicated_meshes(model)):
        return Hybrid(model)
    return InStep()


def _replicated_meshes(model: nn.Module) -> Iterator[object]:
    for module in model.modules():
        if isinstance(module, FSDPModule):
            state = module._get_fsdp_state()
            one = getattr(state, "_fsdp_param_group", None)  # torch <= 2.11 holds one, later a list
            for group in getattr(state, "_fsdp_param_groups", [one] if one else []):
                if group._is_hsdp:
                    yield group.mesh_info


def average_gradients(core: "Core") -> "Exchange":
    """Replace each gradient by its mean. A worker without one counts as zero, as in DDP; a
    parameter without one on any worker keeps none."""
    replica, buckets = core.replica, core.buckets()
    present = core.like.new_tensor([float(p.grad is not None) for p in replica.params])
    # Before the first step, nobody else compares plain modules: the roll call does. Later it
    # travels empty, so that a step costs the same bytes whether training was resumed or not.
    mine = Attendance(0, True, 0.0)
    if not core.started_alike:
        mine = core.attendance(finite=True, model=buckets)
    parts = [present, core.roll_call.encode(core.worker, mine, core.like)]
    if core.buffers.averaged:
        parts.append(core.buffers.encode(core.worker, core.like))
    sizes, extras = [part.numel() for part in parts], torch.cat(parts)
    for number, bucket in enumerate(buckets.ranges):
        bucket.read(_or_zeros(replica.grads(), replica.local()))
        if number == 0:
            message, place = buckets.first_message(extras)
            core.count_message((yield Message(message)))
            extras.copy_(place)
            shares, roll, *buffers = extras.split(sizes)
            check_consensus(core.roll_call.decode(roll), f"the first step (clock {core.clock})")
            core.started_alike = True
            _make_missing(replica.params, shares.tolist())
        else:
            core.count_message((yield Message(bucket.flat)))
        bucket.write(_or_zeros(replica.grads(), replica.local()))
    core.buffers.settle(torch.cat([core.like, *buffers]), core.workers, core.workers)


def _make_missing(params: list[Tensor], shares: list[float]) -> None:
    """A gradient for each parameter that has one on another worker: `shares` of them do."""
    for param, share in zip(params, shares, strict=True):
        if share > 0 and param.grad is None:
            param.grad = torch.zeros_like(param)


def _or_zeros(grads: list[Tensor | None], like: list[Tensor]) -> list[Tensor]:
    return [torch.zeros_like(x) if g is None else g for g, x in zip(grads, like, strict=True)]

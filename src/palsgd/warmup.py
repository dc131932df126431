"""The warm-up phase, which is plain DDP: what averages the gradients, and how it is switched
off."""

import sys
from collections.abc import Callable, Generator, Iterator
from typing import Protocol

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from palsgd.buffers import Buffers
from palsgd.digest import chained, digest
from palsgd.flat import Buckets
from palsgd.guard import Guard, WorkerReport
from palsgd.memory import MessageMemory
from palsgd.meter import Meter
from palsgd.replica import Replica, uncompiled
from palsgd.transports.requests import Request
from palsgd.transports.transport import Message


class GradientSync(Protocol):
    in_step: bool  # must step() average the gradients, or has backward() done it?

    def switch(self, *, on: bool) -> None: ...


class InStep:
    """For a plain module: `step()` averages the gradients in buckets after backward."""

    in_step = True

    def switch(self, *, on: bool) -> None:
        pass


class Wrapped:
    """For a DistributedDataParallel, which averages the gradients during backward."""

    in_step = False

    def __init__(self, model: DistributedDataParallel):
        self._model = model

    def switch(self, *, on: bool) -> None:
        # DDP.no_sync() sets the first flag for a with block; here it stays set. The second flag
        # stops the broadcast of buffers in the next forward.
        self._model.require_backward_grad_sync = on
        self._model.require_forward_param_sync = on


class Hybrid:
    """For HSDP: fully_shard over a 2-D mesh all-reduces over the replica axis during backward."""

    in_step = False

    def __init__(self, model: nn.Module):
        self._meshes = list(_replicated_meshes(model))

    def switch(self, *, on: bool) -> None:
        # set_requires_all_reduce(False) is not enough, as it keeps gradients for a later
        # all-reduce. A group whose mesh info is that of plain FSDP reduce-scatters inside the
        # replica, divides by the number of shards, and sets the gradient.
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
    # A program that has not imported FSDP has no such module, and importing it takes seconds.
    kind = getattr(sys.modules.get("torch.distributed.fsdp"), "FSDPModule", None)
    for module in model.modules():
        if kind is not None and isinstance(module, kind):
            state = module._get_fsdp_state()
            one = getattr(state, "_fsdp_param_group", None)  # torch <= 2.11 holds one, later a list
            for group in getattr(state, "_fsdp_param_groups", [one] if one else []):
                if group._is_hsdp:
                    yield group.mesh_info


class Warmup:
    """Plain DDP: gradients are averaged during backward or, for a plain module, inside `step()`."""

    def __init__(
        self,
        gradient_sync: GradientSync,
        replica: Replica,
        memory: MessageMemory,
        guard: Guard,
        buffers: Buffers,
        meter: Meter,
    ):
        self.gradient_sync = gradient_sync
        self._replica, self.memory, self.guard = replica, memory, guard
        self.buffers, self._meter = buffers, meter
        self.compared = False  # have the workers compared their initial models?

    @property
    def template(self) -> Tensor:
        """An empty tensor of the type and device of all messages."""
        return self.memory.template

    @property
    def in_step(self) -> bool:
        """Must `step()` average the gradients?"""
        return self.gradient_sync.in_step

    def switch(self, *, on: bool) -> None:
        self.gradient_sync.switch(on=on)

    def average(self, clock: int, count: Callable[[int], None]) -> Generator[Request, int, None]:
        """Replace each gradient by its mean. A worker without a gradient counts as zero, as in DDP.
        A parameter that has no gradient on any worker keeps none."""
        replica, like = self._replica, self.memory.template
        buckets = self.memory.buckets(self.memory.model)
        sections = [
            like.new_tensor([float(p.grad is not None) for p in replica.params]),
            self.guard.encode(self._report(clock, buckets), like),
        ]
        if self.buffers.averaged:
            sections.append(self.buffers.encode(self.guard.worker, like))
        sizes, tail = [section.numel() for section in sections], torch.cat(sections)
        for number, bucket in enumerate(buckets.ranges):
            bucket.read(_or_zeros(replica.grads(), replica.local()))
            if number == 0:
                values = self.memory.with_tail(bucket.flat, tail)
                count((yield Message(values)))
                tail.copy_(values[-len(tail) :])
                shares, header, *means = tail.split(sizes)
                self.guard.check_alike(header, f"the first step (clock {clock})")
                self.compared = True
                _make_missing(replica.params, shares.tolist())
            else:
                count((yield Message(bucket.flat)))
            bucket.write(_or_zeros(replica.grads(), replica.local()))
        workers = self.guard.workers
        self.buffers.after_sync(torch.cat([like, *means]), workers, workers)

    def _report(self, clock: int, buckets: Buckets) -> WorkerReport:
        """In the first step the header has a digest of the model, as nothing else compares plain
        modules. Later the digest is 0, so that every step sends the same number of bytes."""
        if self.compared:
            return WorkerReport()
        found = [clock]
        for bucket in buckets.ranges:
            bucket.read(self._replica.local())
            found.append(digest(bucket.flat))
        return self.guard.report(
            chained(found), finite=True, meter=self._meter, device=self._replica.device
        )


def _make_missing(params: list[Tensor], shares: list[float]) -> None:
    """Make a gradient of zeros for each parameter that has one on another worker only. `shares` has
    the share of workers with a gradient, for each parameter."""
    for param, share in zip(params, shares, strict=True):
        if share > 0 and param.grad is None:
            param.grad = torch.zeros_like(param)


def _or_zeros(grads: list[Tensor | None], like: list[Tensor]) -> list[Tensor]:
    return [torch.zeros_like(x) if g is None else g for g, x in zip(grads, like, strict=True)]

"""The warm-up phase, which is plain DDP: what averages the gradients, and how it is switched
off."""

import sys
from collections.abc import Callable, Generator, Iterator
from typing import Protocol

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from palsgd.buffers import Buffers
from palsgd.checks import in_error
from palsgd.digest import chained, digest
from palsgd.finite import all_finite
from palsgd.flat import Buckets
from palsgd.guard import Guard, Verdict, WorkerReport, nonfinite_step
from palsgd.memory import MessageMemory
from palsgd.meter import Meter
from palsgd.payload import wire_bytes
from palsgd.replica import Replica, uncompiled, unwrapped
from palsgd.transports.levels import leaves_workers_apart
from palsgd.transports.requests import Exchange, Request
from palsgd.transports.transport import Message, Transport
from palsgd.untrained import Untrained
from palsgd.wrapped import Wrapped, gradient_bytes


class GradientSync(Protocol):
    in_step: bool  # must step() average the gradients, or has backward() done it?

    def switch(self, *, on: bool) -> None: ...

    @property
    def on(self) -> bool:
        """Would the next backward average, after `switch` has switched that off?"""

    def keep_local(self) -> None:
        """Switch off what is on again; raise if it has averaged."""

    def averaged_bytes(self, grads: list[Tensor | None]) -> int:
        """The bytes that backward has handed over since the last call."""

    def broadcast_bytes(self) -> int:
        """The bytes that worker 0 sends to all others in a forward pass."""


class Unwatched:
    """Nothing outside the optimizer can switch these on again."""

    on = False

    def keep_local(self) -> None:
        pass

    def broadcast_bytes(self) -> int:
        return 0


class InStep(Unwatched):
    """For a plain module, and for a wrapper inside a worker: `step()` averages the gradients over
    the workers, in buckets after backward."""

    in_step = True

    def switch(self, *, on: bool) -> None:
        pass

    def averaged_bytes(self, grads: list[Tensor | None]) -> int:
        return 0


class Hybrid(Unwatched):
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

    def averaged_bytes(self, grads: list[Tensor | None]) -> int:
        return sum(map(gradient_bytes, grads))


def gradient_sync(model: nn.Module, transport: Transport) -> GradientSync:
    """What averages the gradients of this model over the workers in the warm-up."""
    model = uncompiled(model)
    if isinstance(model, DistributedDataParallel) and transport.elastic:
        raise ValueError(
            "a DistributedDataParallel with an ElasticTransport: its own process group does not "
            "survive the loss of a worker; give the model itself"
        )
    if isinstance(model, DistributedDataParallel):
        # A wrapper around the ranks of one worker keeps averaging in all phases.
        return InStep() if leaves_workers_apart(model, transport) else Wrapped(model)
    if any(isinstance(module, DistributedDataParallel) for module in model.modules()):
        raise ValueError(
            "a part of the model is wrapped in DistributedDataParallel; wrap the whole model, or "
            "nothing of it"
        )
    if any(True for _ in _replicated_meshes(model)):
        return Hybrid(model)
    return InStep()


def check_attachable(model: nn.Module, replica: Replica) -> None:
    """Raise unless `model` is made of the parameters that the optimizer trains."""
    if not isinstance(model, nn.Module):
        raise ValueError(
            f"attach() got {in_error(model)}, which is no model; give the wrapped form of the "
            "model that the optimizer was built with"
        )
    if _is_sharded_module(model):
        raise ValueError(
            "attach() is for DistributedDataParallel; a model that FSDP shards needs none, as the "
            "optimizer is built from its shards: remove the call"
        )
    theirs = {p for p in unwrapped(model).parameters() if p.requires_grad}
    if theirs != set(replica.params):
        raise ValueError(
            f"attach() got a {type(model).__name__} with other parameters than the optimizer "
            "trains; give it the wrapped form of the model that the optimizer was built with"
        )


def _is_sharded_module(model: nn.Module) -> bool:
    fsdp = sys.modules.get("torch.distributed.fsdp")
    kinds = [getattr(fsdp, name, None) for name in ("FSDPModule", "FullyShardedDataParallel")]
    known = tuple(kind for kind in kinds if kind is not None)
    return any(isinstance(module, known) for module in model.modules())


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
        untrained: Untrained,
    ):
        self.gradient_sync, self.untrained = gradient_sync, untrained
        self._replica, self.memory, self.guard = replica, memory, guard
        self.buffers, self._meter = buffers, meter
        self.compared = False  # have the workers compared their initial models?
        self.leaving = False  # was some worker asked to leave, by the last message?

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

    def average(self, clock: int, count: Callable[[int], None]) -> Generator[Request, int, bool]:
        """Replace each gradient by its mean. A worker without a gradient counts as zero, as in DDP.
        A parameter that has no gradient on any worker keeps none. A sparse gradient is sent dense,
        and is sparse again afterwards: some inner optimizers take no others. Returns whether the
        step may be taken: False if a gradient is not finite and such steps are skipped."""
        replica, like = self._replica, self.memory.template
        buckets = self.memory.buckets(self.memory.model)
        model = 0 if self.compared else self._model_digest(clock, buckets)
        presence = [_presence(p.grad) for p in replica.params]
        workers, sparse = self.guard.workers, []
        if workers > 1:  # a single worker's gradients stay as they are
            _make_dense(replica.params)
        for number, bucket in enumerate(buckets.ranges):
            bucket.read(_or_zeros(replica.grads(), replica.local()))
            if number == 0:
                sections = self._sections(self._report(model, buckets), presence)
                sizes, tail = [section.numel() for section in sections], torch.cat(sections)
                values = self.memory.with_tail(bucket.flat, tail)
                count((yield Message(values)))
                tail.copy_(values[-len(tail) :])
                shares, header, untrained, *means = tail.split(sizes)
                verdict = self.guard.check_step(header, self._where(clock))
                self.untrained.check(untrained, self._where(clock))
                self.compared, self.leaving = True, verdict.leaving
                self._set_buffers(torch.cat([like, *means]), verdict)
                if verdict.contributors < workers:
                    return False
                found = shares.tolist()
                _make_missing(replica.params, found)
                sparse = [p for p, x in zip(replica.params, found, strict=True) if x > 1]
            else:
                count((yield Message(bucket.flat)))
            if workers > 1:
                bucket.write(_or_zeros(replica.grads(), replica.local()))
        for param in sparse if workers > 1 else []:
            assert param.grad is not None
            param.grad = param.grad.to_sparse(sparse_dim=1)  # without rows that are zero
        return True

    def _where(self, clock: int) -> str:
        return f"{'a step of the warm-up' if self.compared else 'the first step'} (clock {clock})"

    def _sections(self, report: WorkerReport, presence: list[float]) -> list[Tensor]:
        """What is sent behind the first bucket. In the first step that is also what workers compare
        once, as nothing else compares plain modules. Later there are zeros in its place, so that
        every step sends the same number of bytes."""
        like, untrained = self.template, self.untrained
        sections = [
            like.new_tensor(presence),
            self.guard.encode(report, like),
            like.new_zeros(untrained.size) if self.compared else untrained.encode(like),
        ]
        if self.buffers.averaged:
            finite = not report.buffer
            sections.append(self.buffers.encode(self.guard.place, like, finite=finite))
        return sections

    def _set_buffers(self, mean: Tensor, verdict: Verdict) -> None:
        """Set the buffers to the mean over the workers whose own are finite."""
        sound = sum(not line.buffer for line in verdict.reports)
        if sound:
            self.buffers.after_sync(mean, self.guard.workers, sound)

    def _model_digest(self, clock: int, buckets: Buckets) -> int:
        found = [clock]
        for bucket in buckets.ranges:
            bucket.read(self._replica.local())
            found.append(digest(bucket.flat))
        return chained(found)

    def _report(self, model: int, buckets: Buckets) -> WorkerReport:
        """Whether this worker's gradient is finite, and the digest of its model. If the gradient
        fits into one bucket, it is read there, as one tensor is read faster than many."""
        one = len(buckets.ranges) == 1
        gradient = [buckets.ranges[0].flat] if one else self._gradient()
        return self.guard.report(
            model,
            finite=all_finite(gradient),
            meter=self._meter,
            device=self._replica.device,
            buffer=self.buffers.nonfinite(),
        )

    def _gradient(self) -> list[Tensor]:
        return [g for g in self._replica.grads() if g is not None]

    def may_step(self, clock: int) -> bool:
        """May the step be taken with gradients that backward() has averaged? They are the same on
        all workers, so no message is needed."""
        report = self._report_alone(finite=all_finite(self._gradient()))
        if not report.finite and not self.guard.skip_nonfinite:
            raise nonfinite_step("the averaged gradient of all workers", self._where(clock))
        return report.finite

    def count_averaged(self) -> None:
        """Count what the wrapper of the model has sent in forward and backward."""
        workers, ledger = self.guard.workers, self._meter.ledger
        averaged = self.gradient_sync.averaged_bytes(self._replica.grads())
        broadcast = self.gradient_sync.broadcast_bytes() if self.guard.worker == 0 else 0
        if workers > 1:
            ledger.bytes_sent += averaged + broadcast
            ledger.bytes_on_the_wire += wire_bytes(averaged, workers)
            ledger.bytes_on_the_wire += broadcast * (workers - 1)

    def hear_leavers(self) -> Exchange:
        """Ask all workers whether one of them was asked to leave. backward() sends no header that
        could say so. The message is not in the ledger, whose figures are those of the training."""
        values = self.template.new_tensor([float(self._report_alone().leaving)])
        yield Message(values)
        self.leaving = values.item() > 0

    def _report_alone(self, *, finite: bool = True) -> WorkerReport:
        """A report that is not sent to other workers."""
        return self.guard.report(0, finite=finite, meter=self._meter, device=self._replica.device)

    def open_local_phase(
        self, report: WorkerReport, clock: int, count: Callable[[int], None]
    ) -> Generator[Request, int, list[WorkerReport]]:
        """Compare the workers' models before the local phase, and return their reports. Buffers
        that were not averaged with the gradients are averaged now."""
        like, guard = self.template, self.guard
        averages = self.buffers.averaged and not self.in_step and clock > 0
        sections = [guard.encode(report, like), self.untrained.encode(like)]
        if averages:
            sections.append(self.buffers.encode(guard.place, like, finite=report.finite))
        message = Message(torch.cat(sections))
        count((yield message))
        header, untrained, *means = message.values.split([len(each) for each in sections])
        where = f"the start of the local phase (clock {clock})"
        verdict = guard.check(header, where)
        self.untrained.check(untrained, where)
        self.compared = True
        if averages:
            self.buffers.after_sync(means[0], guard.workers, verdict.contributors)
        else:
            self.buffers.set_from_local()
        return verdict.reports


_SPARSE = float(2**20)  # more than all workers' dense gradients can add up to


def _presence(grad: Tensor | None) -> float:
    """How a worker says whether it has a gradient. The mean over the workers is above 1 if some
    worker's gradient is sparse."""
    if grad is None:
        return 0.0
    return _SPARSE if grad.is_sparse else 1.0


def _make_dense(params: list[Tensor]) -> None:
    for param in params:
        if param.grad is not None and param.grad.is_sparse:
            param.grad = param.grad.to_dense()


def _make_missing(params: list[Tensor], shares: list[float]) -> None:
    """Make a gradient of zeros for each parameter that has one on another worker only. `shares` has
    the share of workers with a gradient, for each parameter."""
    for param, share in zip(params, shares, strict=True):
        if share > 0 and param.grad is None:
            param.grad = torch.zeros_like(param)


def _or_zeros(grads: list[Tensor | None], like: list[Tensor]) -> list[Tensor]:
    found = [torch.zeros_like(x) if g is None else g for g, x in zip(grads, like, strict=True)]
    return [g.to_dense() if g.is_sparse else g for g in found]

"""A sync of all workers of one run at once, on stacked tensors.

It does what `palsgd.sync.Syncer` does for one worker, in the same two halves. Plain means are taken
tensor by tensor. Coded means use the exchange in memory of palsgd.transports.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field, fields
from typing import Any, NamedTuple

import torch
from torch import Tensor

from palsgd.codecs.coded_mean import Residue
from palsgd.digest import row_digests
from palsgd.guard import WorkerReport, check_finite, check_own_work
from palsgd.method import Part, Payload
from palsgd.parts import due_parts, unflattened
from palsgd.payload import payload_size
from palsgd.simulator.saved import cloned
from palsgd.simulator.stack import StackedWorkers
from palsgd.simulator.stacked_view import (
    StackedView,
    flat_rows,
    row_norms,
    squared_norms,
    total_squares,
)
from palsgd.sync import Syncer
from palsgd.tensors import Reduced, WorkerTensors, column, mix_
from palsgd.transports.in_memory import average_in_memory
from palsgd.transports.transport import Message
from palsgd.worker import Worker


class StackedMoment(NamedTuple):
    """When a sync is sent, and each worker's steps since the last sync of this fragment."""

    fragment: int
    clock: int
    round: int
    gradient_steps: Tensor  # one entry per worker
    rate_sums: list[Tensor]  # for each parameter group, one entry per worker
    rates: list[float]  # of each parameter group, in the last step before sending


@dataclass
class StackedPending:
    """A fragment that all workers of a run have sent, with its reduced payload."""

    at: StackedMoment
    messages: list[int]  # the bytes of each
    on_the_wire: int
    finite: list[bool]
    distance: list[float]
    models: list[int]  # digests of local models that may be equal, else 0
    parts: dict[str, list[Tensor]]
    gathered: set[str]
    scalars: dict[str, float]
    buffers: dict[str, Tensor] = field(default_factory=dict)
    local_when_sent: list[Tensor] | None = None  # None: the local models have not moved since

    @property
    def contributors(self) -> int:
        return sum(self.finite)

    @property
    def where(self) -> str:
        return f"the sync of round {self.at.round} (clock {self.at.clock})"

    def state(self) -> dict[str, Any]:
        kept = {each.name: getattr(self, each.name) for each in fields(self)}
        return kept | {"at": tuple(self.at), "gathered": sorted(self.gathered)}

    @classmethod
    def loaded(cls, saved: dict[str, Any], device: torch.device) -> "StackedPending":
        at = StackedMoment(*cloned(saved["at"]))  # numbers of workers are on the host
        return cls(**cloned(saved, device) | {"at": at, "gathered": set(saved["gathered"])})


class StackedSyncer:
    """Sends fragments of the stacked local models and applies the means that come back."""

    def __init__(self, worker: Worker, view: StackedView, buffers: dict[str, Tensor]):
        self._worker, self.view, self._buffers = worker, view, buffers
        self._syncer: Syncer = worker.syncer
        self._method, self._anchor = worker.method, view.anchor
        self._layout, self._workers = view.replica.layout, view.workers
        # by fragment and message, for each worker
        self._residues: dict[tuple[int, int], list[Residue | None]] = {}
        self.gradients = [0] * self._workers  # digests that the next sync compares

    @property
    def stack(self) -> StackedWorkers:
        return self.view.stack

    def state(self) -> dict[str, Any]:
        residues = [
            (key, [None if r is None else (r.own, r.mean, r.fresh) for r in kept])
            for key, kept in self._residues.items()
        ]
        return {"residues": residues, "gradients": self.gradients}

    def load(self, saved: dict[str, Any]) -> None:
        self.gradients = list(saved["gradients"])
        self._residues = {
            key: [None if each is None else Residue(*each) for each in kept]
            for key, kept in cloned(saved["residues"], self.stack.device)
        }

    # -- sending -------------------------------------------------------------------------------

    def send(self, at: StackedMoment, *, keeps_local: bool) -> StackedPending:
        """Reduce the payloads of all workers at this clock. The result is applied later."""
        chosen = self.view.everyone(at.fragment)
        w = self._tensors(at, chosen)
        payload = self._method.payload(w)
        parts = due_parts(self._method, payload, at.round, w)
        finite, distance, plain = self._look_at(w, payload, parts)
        weight, size = self._per_worker(payload.weight), payload_size(self._worker, payload)
        pending = StackedPending(
            at=at,
            messages=size.sync(at.fragment, at.round),
            on_the_wire=size.on_the_wire(at.fragment, at.round),
            finite=finite,
            distance=distance,
            models=self._models(at, w, distance, finite),
            parts={},
            gathered={part.name for part in parts if part.reduction == "gather"},
            scalars=self._scalars(payload, finite),
        )
        number = 0
        for part in parts:
            if part.tensors is None and plain is not None:
                pending.parts[part.name], used = plain, 1
            else:
                pending.parts[part.name], used = self._reduced(pending, part, w, weight, number)
            number += used
        if self._syncer.buffers.averaged and self._ends_round(at):
            pending.buffers = self._buffer_means(finite)
        if keeps_local:
            dtype = self._anchor.flat.dtype
            pending.local_when_sent = [x.to(dtype, copy=True) for x in w.local]
        self.view.keep(w, chosen)
        return pending

    def _models(
        self, at: StackedMoment, w: WorkerTensors, distance: list[float], finite: list[bool]
    ) -> list[int]:
        """A digest of each local model, if it may be equal to another: if two are equally far from
        the anchor. 0 for a model that is equal to the anchor in its own precision. With fragments
        whole models are compared, at the end of a round."""
        moved = [far for far, sound in zip(distance, finite, strict=True) if sound and far]
        alike, low = len(set(moved)) < len(moved), w.local[0].dtype != self._anchor.flat.dtype
        if not (alike and self._syncer.guard.compares_models and self._ends_round(at)):
            return [0] * self._workers
        anchor, local = self._anchor.views, self.view.own(self.stack.params)
        found = row_digests((a - x for a, x in zip(anchor, local, strict=True)), self._workers)
        for k in range(self._workers):
            pairs = zip(anchor, local, strict=True)
            if not finite[k] or (low and all(torch.equal(x[k], a.to(x.dtype)) for a, x in pairs)):
                found[k] = 0
        return found

    def _look_at(
        self, w: WorkerTensors, payload: Payload, parts: list[Part]
    ) -> tuple[list[bool], list[float], list[Tensor] | None]:
        """Which workers are finite, the distance of each to the anchor, and, if the displacement is
        a plain mean over all workers, that mean. All come from one pass over the local models."""
        model = next((part for part in parts if part.tensors is None), None)
        averaged = model is not None and model.reduction == "mean"
        averaged = averaged and (self._syncer.outgoing.codec is None or not model.coded)  # type: ignore[union-attr]
        norms, means = [], []
        for away in _displacement(w):
            norms.append(row_norms(away, self._workers))
            if averaged:
                means.append(away.mean(dim=0))
        squares = total_squares(norms, self._workers)
        own = self._own_tensors(w, parts) + self._averaged_buffers()
        if len(self._anchor.ranges) > 1:
            own += self.view.own(self.stack.params)
        health = squares + squared_norms(own, self._workers) if own else squares
        distance, seen = torch.stack([squares.sqrt(), health]).tolist()
        finite = torch.tensor(seen).isfinite().tolist()
        if not all(finite):
            finite = self._finite_rows(own)
        finite = [a and b for a, b in zip(finite, self._finite_numbers(payload), strict=True)]
        return finite, distance, means if averaged and all(finite) else None

    def _finite_numbers(self, payload: Payload) -> list[bool]:
        """Which workers have a finite weight and finite scalars."""
        numbers = [self._per_worker(each) for each in (payload.weight, *payload.scalars.values())]
        return torch.stack(numbers).isfinite().all(dim=0).tolist()

    def _own_tensors(self, w: WorkerTensors, parts: list[Part]) -> list[Tensor]:
        """The tensors that the method sends beside the displacement."""
        return [
            self._stacked(x, piece)
            for part in parts
            if part.tensors is not None
            for x, piece in zip(part.tensors, w.anchor, strict=True)
        ]

    def _finite_rows(self, own: list[Tensor]) -> list[bool]:
        """Which workers are finite, from every element, as norms may overflow on finite values."""
        sound = torch.ones(self._workers, dtype=torch.bool, device=self.stack.device)
        for x in [*self.view.own(self.stack.params), *own]:
            sound &= x.reshape(self._workers, x.numel() // self._workers).isfinite().all(dim=1)
        return sound.tolist()

    def _averaged_buffers(self) -> list[Tensor]:
        """This run's floating-point buffers, if they are sent."""
        if not self._syncer.buffers.averaged:
            return []
        return [b for b in self._sent_buffers().values() if b.is_floating_point()]

    def _sent_buffers(self) -> dict[str, Tensor]:
        """This run's buffers without masks, which are no statistics."""
        masks = {f"model.{name}" for name in self._syncer.buffers.masks}
        return {name: b for name, b in self._own_buffers().items() if name not in masks}

    def _own_buffers(self) -> dict[str, Tensor]:
        names = list(self._buffers)
        if not names:
            return {}
        tensors = self.view.own([self.stack.buffers[name] for name in names])
        return dict(zip(names, tensors, strict=True))

    def _buffer_means(self, finite: list[bool]) -> dict[str, Tensor]:
        """The new buffers: for floats the mean over the workers that take part, for integers worker
        0's."""
        dtype, found = self._anchor.flat.dtype, {}
        for name, buffer in self._sent_buffers().items():
            if buffer.is_floating_point():
                rows = buffer if all(finite) else buffer[torch.tensor(finite)]
                found[name] = rows.to(dtype).mean(dim=0)
            else:
                found[name] = buffer[0].clone()
        return found

    def _scalars(self, payload: Payload, finite: list[bool]) -> dict[str, float]:
        """The means of the method's scalars over the workers that take part."""
        dtype, chosen = self._anchor.flat.dtype, torch.tensor(finite)
        return {
            name: float(self._per_worker(value)[chosen].to(dtype).double().mean())
            for name, value in payload.scalars.items()
        }

    def _per_worker(self, value: Any) -> Tensor:
        """A number of the payload as one entry per worker."""
        return torch.as_tensor(value, dtype=torch.float64).cpu().expand(self._workers)

    # -- reductions ----------------------------------------------------------------------------

    def _reduced(
        self, pending: StackedPending, part: Part, w: WorkerTensors, weight: Tensor, number: int
    ) -> tuple[list[Tensor], int]:
        """The reduced tensors of one part, and the number of its messages."""
        finite = torch.tensor(pending.finite)
        if part.reduction == "gather":
            return [_with_zeros(x, finite) for x in self._values(part, w)], 1
        weighted = part.reduction == "weighted"
        if self._syncer.outgoing.codec is not None and part.coded:
            return self._coded(pending, part, w, weight if weighted else None, number)
        share = torch.where(finite, weight if weighted else torch.ones_like(weight), 0.0)
        share = share / share.sum()
        return [_weighted(x, share) for x in self._values(part, w)], 1

    def _values(self, part: Part, w: WorkerTensors) -> Iterator[Tensor]:
        """The stacked tensors of a part, one after another, in the precision of messages."""
        if part.tensors is None:
            yield from _displacement(w)
            return
        for x, piece in zip(part.tensors, w.anchor, strict=True):
            yield self._stacked(x, piece).to(self._anchor.flat.dtype)

    def _stacked(self, x: Tensor, piece: Tensor) -> Tensor:
        """A tensor of a payload with the worker axis. A tensor that a rule made of common tensors
        has no such axis, and is the same for all workers."""
        return x.expand(self._workers, *x.shape) if x.dim() == piece.dim() else x

    def _coded(
        self,
        pending: StackedPending,
        part: Part,
        w: WorkerTensors,
        weight: Tensor | None,
        number: int,
    ) -> tuple[list[Tensor], int]:
        fragment, finite = pending.at.fragment, torch.tensor(pending.finite)
        rows = self._rows(part, w, fragment)
        if not all(pending.finite):
            rows[~finite.to(rows.device)] = 0
        if weight is not None:
            rows *= column(torch.where(finite, weight, 0.0), rows)
        width = rows.shape[1]
        if part.tensors is None and not self._syncer.outgoing.whole:
            width = min(self._syncer.memory.bucket_size, width)
        width, used = max(1, width), 0
        for low in range(0, max(1, rows.shape[1]), width):
            key = (fragment, number + used)
            self._exchange(rows[:, low : low + width], key)
            used += 1
        # Where no worker is finite the sync is refused when it is applied, in either engine.
        mean = rows[0] * (self._workers / max(1, pending.contributors))
        if weight is not None:
            mean /= float(weight[finite].mean())
        if part.tensors is None:
            return self._syncer.view.pieces_in(fragment, mean), used
        return unflattened(mean, self._anchor.pieces(fragment)), used

    def _rows(self, part: Part, w: WorkerTensors, fragment: int) -> Tensor:
        """A flat row for each worker, in the order in which its elements are sent."""
        values = list(self._values(part, w))
        if part.tensors is not None:
            return torch.cat([x.reshape(self._workers, -1) for x in values if x.numel()], dim=1)
        rows = self._anchor.flat.new_empty(self._workers, len(self._anchor.ranges[fragment]))
        for (tensor, cut, place), x in zip(self._anchor.places(fragment), values, strict=True):
            rows[:, place] = flat_rows(self._layout, tensor, x) if cut is None else x
        return rows

    def _exchange(self, rows: Tensor, key: tuple[int, int]) -> None:
        """Replace the rows by their coded mean, and keep what each worker has left unsent."""
        left = self._residues.get(key) or [None] * self._workers
        messages = [
            Message(row, 0, self._syncer.outgoing.codec, residue)
            for row, residue in zip(rows, left, strict=True)
        ]
        average_in_memory(messages)
        self._residues[key] = [message.residue for message in messages]

    # -- what came back ------------------------------------------------------------------------

    def apply(self, pending: StackedPending) -> None:
        """Change the anchor, the local models and the buffers."""
        guard = self._syncer.guard
        numbers = zip(pending.finite, self.gradients, pending.models, strict=True)
        reports = [
            WorkerReport(worker=k, finite=f, gradient=g, model=m)
            for k, (f, g, m) in enumerate(numbers)
        ]
        check_finite(reports, pending.where, guard.skip_nonfinite)
        if guard.compares_work:
            check_own_work(reports, pending.where)
        self.gradients = [0] * self._workers  # they are compared once
        self._global_step(pending)
        self._restart(pending)
        self._set_buffers(pending)

    def _global_step(self, pending: StackedPending) -> None:
        """Change the anchor. Only this fragment's pieces have a gradient, so the outer step changes
        only them."""
        at = pending.at
        params = self._anchor.outer_params[at.fragment]
        if "model" in pending.parts and "model" not in pending.gathered:
            for param, mean in zip(params, pending.parts["model"], strict=True):
                param.grad = _in_memory_order(mean, param)
        chosen = self.view.everyone(at.fragment)
        w = self._tensors(at, chosen, pending.local_when_sent)
        reduced = Reduced(pending.parts, pending.scalars, pending.contributors)
        try:
            self._method.apply(w, reduced, self._syncer.changes.outer)
        finally:
            for param in params:
                param.grad = None
        self.view.keep(w, chosen)

    def _restart(self, pending: StackedPending) -> None:
        """Set the local models after the anchor has changed."""
        going = [k for k, finite in enumerate(pending.finite) if finite]
        if self._method.overrides("restart"):
            chosen = self.view.select(going, pending.at.fragment)
            w = self._tensors(pending.at, chosen)
            self._method.restart(w)
            self.view.keep(w, chosen)
        else:
            self._move_on(pending)
        for k, finite in enumerate(pending.finite):
            if not finite:
                self._start_over(k, pending.at.round)

    def _move_on(self, pending: StackedPending) -> None:
        """Set each local model to the anchor plus its change since it was sent, or blend it with
        the anchor."""
        fragment = pending.at.fragment
        chosen = self.view.everyone(fragment)
        local = chosen.take(self.view.own(self.stack.params))
        anchor = self._anchor.pieces(fragment)
        blend = self._syncer.changes.blend
        if blend is not None:
            mix_(local, anchor, torch.full((self._workers,), 1.0 - blend).double())
        elif pending.local_when_sent is None:
            for x, a in zip(local, anchor, strict=True):
                x.copy_(a)
        else:
            for x, a, before in zip(local, anchor, pending.local_when_sent, strict=True):
                x.add_(a - before)
        chosen.put_back()

    def _start_over(self, worker: int, round: int) -> None:
        """Set all fragments of the local model of a worker that was not finite to the global
        model."""
        for x, a in zip(self.view.own(self.stack.params), self._anchor.views, strict=True):
            x[worker] = a.to(x.dtype)
        self.view.reset_local(worker)
        chosen = self.view.select([worker])
        w = self.view.whole(chosen, round=round)
        self._method.join(w)
        self.view.keep(w, chosen)
        self.stack.forget_nonfinite(self.view.number_of(worker))

    def _set_buffers(self, pending: StackedPending) -> None:
        """Set every worker's buffers, and the global model's, to the means."""
        own = self._own_buffers() if pending.buffers else {}
        for name, mean in pending.buffers.items():
            own[name].copy_(mean.to(own[name].dtype))
            self._buffers[name].copy_(mean)
        if pending.buffers:
            self._syncer.buffers.set_from_local()
        elif self._ends_round(pending.at) and self._syncer.buffers.policy == "recompute":
            self._syncer.buffers.current = False

    def _ends_round(self, at: StackedMoment) -> bool:
        return at.fragment == len(self._anchor.ranges) - 1

    def _tensors(
        self, at: StackedMoment, chosen: Any, local: list[Tensor] | None = None
    ) -> WorkerTensors:
        index = torch.tensor(list(chosen.workers))
        return self.view.fragment(
            chosen,
            at.fragment,
            [sums[index] for sums in at.rate_sums],
            local,
            rates=at.rates,
            round=at.round,
            gradient_steps=at.gradient_steps[index],
        )


def _displacement(w: WorkerTensors) -> Iterator[Tensor]:
    """The anchor minus the local models, tensor by tensor."""
    for a, x in zip(w.anchor, w.local, strict=True):
        yield a - x


def _weighted(x: Tensor, share: Tensor) -> Tensor:
    """The sum over the workers, each times its share. Workers with share 0 are left out of the sum,
    as zero times inf or nan is nan."""
    chosen = share.nonzero().flatten()
    if len(chosen) < len(share):
        x, share = x[chosen.to(x.device)], share[chosen]
    return (x * column(share, x)).sum(dim=0)


def _with_zeros(x: Tensor, finite: Tensor) -> Tensor:
    """All workers' values, with zeros for one that was left out."""
    found = x.clone()
    if not bool(finite.all()):
        found[~finite.to(x.device)] = 0
    return found


def _in_memory_order(mean: Tensor, param: Tensor) -> Tensor:
    """`mean` with the strides of the parameter, as fused optimizers need equal strides."""
    if mean.stride() == param.stride() and mean.dtype == param.dtype:
        return mean
    return torch.empty_like(param).copy_(mean)

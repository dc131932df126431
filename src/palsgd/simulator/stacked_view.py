"""Makes the `w` through which the rules of a method see the tensors of stacked workers."""

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from palsgd.flat import FlatModel, Layout, Place
from palsgd.method import Rate
from palsgd.simulator.stack import StackedWorkers
from palsgd.sync import Syncer
from palsgd.tensors import WorkerTensors, mix_


class Selection:
    """Some workers of a run, with all of their tensors or the tensors of one fragment.

    `take` returns views if the memory layout allows them, else copies, which `put_back` writes
    back.
    """

    def __init__(
        self,
        workers: Sequence[int],
        layout: Layout,
        device: torch.device,
        places: list[Place] | None = None,
    ):
        self.workers, self._layout, self._device, self._places = workers, layout, device, places
        low, high = workers[0], workers[-1] + 1
        self._rows = slice(low, high) if high - low == len(workers) else None
        self._index: Tensor | None = None
        self._writes: list[Callable[[], Any]] = []

    @property
    def index(self) -> Tensor:
        """The workers' numbers, on the device."""
        if self._index is None:
            self._index = torch.tensor(self.workers, device=self._device)
        return self._index

    def take(self, stacked: list[Tensor]) -> list[Tensor]:
        """The rows of these workers in tensors that are stacked over all workers of the run."""
        rows = [self._chosen(x) for x in stacked]
        if self._places is None:
            return rows
        return [self._piece(place, rows[place.tensor]) for place in self._places]

    def put_back(self) -> None:
        for write in reversed(self._writes):
            write()
        self._writes.clear()

    def _chosen(self, x: Tensor) -> Tensor:
        if self._rows is not None:
            return x if len(x) == len(self.workers) else x[self._rows]
        copy = x.index_select(0, self.index)
        self._writes.append(lambda: x.index_copy_(0, self.index, copy))
        return copy

    def _piece(self, place: Place, x: Tensor) -> Tensor:
        if place.part is None:
            return x
        flat = flat_rows(self._layout, place.tensor, x)
        if flat.data_ptr() != x.data_ptr():
            self._writes.append(lambda: x.copy_(shaped_rows(self._layout, place.tensor, flat)))
        return flat[:, place.part]


def flat_rows(layout: Layout, i: int, stacked: Tensor) -> Tensor:
    """Tensor `i` of stacked workers, a flat row for each in the layout's memory order: a view
    wherever strides allow one."""
    strides = layout.strides[i]
    order = sorted(range(len(strides)), key=lambda axis: -strides[axis])
    turned = stacked.permute(0, *(1 + axis for axis in order))
    return turned.reshape(len(stacked), layout.sizes[i])


def shaped_rows(layout: Layout, i: int, flat: Tensor) -> Tensor:
    """The inverse of `flat_rows`, as a view."""
    shape = (len(flat), *layout.shapes[i])
    return flat.contiguous().as_strided(shape, (layout.sizes[i], *layout.strides[i]))


class StackedView:
    """Makes the `w` of a method's slots for some workers of one run.

    The anchor and the global states are those of the run's one optimizer. The local models are in
    the stack. The stacked local states are in this object.
    """

    def __init__(self, syncer: Syncer, stack: StackedWorkers, first: int):
        self.anchor, self.states, self.replica = syncer.anchor, syncer.states, syncer.replica
        self.stack, self.workers = stack, stack.workers
        self._own = slice(first, first + self.workers)  # this run's rows of the stack
        self.local_states = {name: self._zeros() for name in self.states.local}
        self.local_scalars = {
            name: torch.full((self.workers,), value, dtype=torch.float64)
            for name, value in self.states.local_scalars.items()
        }
        dtype = self.anchor.flat.dtype
        self._one_dtype = all(p.dtype == dtype for p in self.replica.params)
        groups = self.replica.groups
        self._group_of = [
            next(g for g, members in enumerate(groups) if i in members)
            for i in range(len(self.replica.params))
        ]

    def _zeros(self) -> list[Tensor]:
        layout, anchor = self.replica.layout, self.anchor.flat
        return [
            shaped_rows(layout, i, anchor.new_zeros(self.workers, size))
            for i, size in enumerate(layout.sizes)
        ]

    def state(self) -> dict[str, Any]:
        """The states of the workers, not copied."""
        return {"tensors": self.local_states, "numbers": self.local_scalars}

    def load(self, saved: dict[str, Any]) -> None:
        for name, tensors in self.local_states.items():
            for x, kept in zip(tensors, saved["tensors"][name], strict=True):
                x.copy_(kept)
        for name, numbers in self.local_scalars.items():
            numbers.copy_(saved["numbers"][name])

    # -- choosing ------------------------------------------------------------------------------

    def select(self, workers: Sequence[int], fragment: int | None = None) -> Selection:
        places = None if fragment is None else self.anchor.places(fragment)
        return Selection(workers, self.replica.layout, self.stack.device, places)

    def everyone(self, fragment: int | None = None) -> Selection:
        return self.select(range(self.workers), fragment)

    def number_of(self, worker: int) -> int:
        """A worker's number in the stack."""
        return self._own.start + worker

    def own(self, stacked: list[Tensor]) -> list[Tensor]:
        """This run's rows of tensors that are stacked over all runs."""
        if len(stacked[0]) == self.workers:
            return stacked
        return [x[self._own] for x in stacked]

    # -- w -------------------------------------------------------------------------------------

    def whole(self, chosen: Selection, **known: Any) -> WorkerTensors:
        """All tensors of the model."""
        w = self._made(chosen, None, self.replica.groups, {}, known)
        vars(w)["_mix_rows"] = partial(self._mix, chosen.workers)
        return w

    def _mix(self, workers: Sequence[int], group: int, weight: Rate) -> None:
        """Pull the local models of some workers towards the anchor; workers of equal weight share a
        kernel."""
        stacked = self.own(self.stack.params)
        members = self.replica.groups[group]
        if not members:  # all tensors of the group are frozen
            return
        for each, rows in _by_weight(workers, weight).items():
            if len(rows) == self.workers:
                local = [stacked[i] for i in members]
                mix_(local, [self.anchor.views[i] for i in members], each)
                continue
            # Rows of the same shape as the anchor share one kernel, and need no copies.
            local = [stacked[i][k] for i in members for k in rows]
            anchors = [self.anchor.views[i] for i in members for _ in rows]
            if self._one_dtype:  # then the types of many small tensors need not be compared
                torch._foreach_lerp_(local, anchors, each)
            else:
                mix_(local, anchors, each)

    def with_gradients(
        self, chosen: Selection, grads: Callable[[], list[Tensor]], **known: Any
    ) -> WorkerTensors:
        return self._made(chosen, None, self.replica.groups, {"grad": grads}, known)

    def fragment(
        self,
        chosen: Selection,
        fragment: int,
        rate_sums: list[Tensor],
        local: list[Tensor] | None = None,
        *,
        rates: Sequence[float],
        **known: Any,
    ) -> WorkerTensors:
        """The tensors of a fragment. `local` are the local models as they were sent, if they have
        changed since. `rate_sums` has, for each parameter group, one entry per worker. `rates` has,
        for each group, one number for all workers."""
        owners = self.anchor.owners(fragment)
        group_of = [self._group_of[i] for i in owners]
        groups = [
            [i for i, group in enumerate(group_of) if group == g]
            for g in range(len(self.replica.groups))
        ]
        more: dict[str, Callable[[], Any]] = {
            "rates": lambda: [rates[g] for g in group_of],
            "rate_sums": lambda: self._rate_sums(fragment, group_of, rate_sums),
        }
        if local is not None:
            more["local"] = lambda: local
        return self._made(chosen, fragment, groups, more, known)

    def keep(self, w: WorkerTensors, chosen: Selection) -> None:
        """After a rule, write the copies that it changed back into the stack, and keep its
        numbers."""
        chosen.put_back()
        for name, kept in self.local_scalars.items():
            kept[list(chosen.workers)] = torch.as_tensor(getattr(w, name), dtype=torch.float64)
        for name in self.states.common_scalars:
            self.states.common_scalars[name] = _common_number(name, getattr(w, name))

    def reset_local(self, worker: int) -> None:
        """Reset the local states of a worker."""
        for tensors in self.local_states.values():
            for x in tensors:
                x[worker] = 0
        for name, value in self.states.initial_scalars.items():
            self.local_scalars[name][worker] = value

    def _made(
        self,
        chosen: Selection,
        fragment: int | None,
        groups: list[list[int]],
        more: dict[str, Callable[[], Any]],
        known: dict[str, Any],
    ) -> WorkerTensors:
        sources: dict[str, Callable[[], Any]] = {
            "local": lambda: chosen.take(self.own(self.stack.params)),
            "anchor": partial(_common, self.anchor, fragment),
            "inner": lambda: StackedInnerState(self, chosen),
            "worker": lambda: torch.tensor(list(chosen.workers)),
        }
        for name, tensors in self.local_states.items():
            sources[name] = partial(chosen.take, tensors)
        for name, kept in self.states.common.items():
            sources[name] = partial(_common, kept, fragment)
        for name, scalar in self.local_scalars.items():
            sources[name] = partial(scalar.__getitem__, list(chosen.workers))
        w = WorkerTensors(
            sources | more,
            workers=self.workers,
            initial_rates=self.replica.initial_rates,
            groups=groups,
            **self.states.common_scalars,
            **known,
        )
        vars(w)["_norm"] = lambda tensors: self._norm(w, tensors, len(chosen.workers))
        return w

    def _rate_sums(self, fragment: int, group_of: list[int], sums: list[Tensor]) -> list[Tensor]:
        anchor = self.anchor.flat
        moved = [each.to(anchor.device, anchor.dtype) for each in sums]
        return [
            moved[group].view(-1, *[1] * piece.dim())
            for group, piece in zip(group_of, self.anchor.pieces(fragment), strict=True)
        ]

    def _norm(self, w: WorkerTensors, tensors: Iterable[Tensor], workers: int) -> Any:
        """The norm, with one entry per worker; for tensors that all workers share, one number."""
        found = list(tensors)
        lists = [w.anchor, *(getattr(w, name) for name in self.states.common)]
        common = {id(x) for each in lists for x in each}
        if found and all(id(x) in common for x in found):
            return float(sum(x.double().square().sum() for x in found).sqrt())  # type: ignore[union-attr]
        return squared_norms(found, workers).sqrt().cpu()


def _common_number(name: str, value: Any) -> float:
    if isinstance(value, Tensor) and value.numel() > 1:
        raise ValueError(
            f"the global state {name!r} was given {value.tolist()}, one number for each worker; "
            "give a number that all workers have, or make it a local state"
        )
    return float(value)


def _by_weight(workers: Sequence[int], weight: Rate) -> dict[float, Sequence[int]]:
    if not isinstance(weight, Tensor):
        return {weight: workers}
    found: dict[float, list[int]] = {}
    for worker, each in zip(workers, weight.tolist(), strict=True):
        found.setdefault(each, []).append(worker)
    return dict(found)


def _common(kept: FlatModel, fragment: int | None) -> list[Tensor]:
    """Tensors that all workers share, of the whole model or of a fragment."""
    return kept.views if fragment is None else kept.pieces(fragment)


def squared_norms(tensors: Iterable[Tensor], workers: int) -> Tensor:
    """The squared norm of all elements of each stacked worker, in double precision."""
    return total_squares([row_norms(x, workers) for x in tensors], workers)


def row_norms(x: Tensor, workers: int) -> Tensor:
    """The norm of each stacked worker's part of a tensor."""
    rows = x.reshape(workers, x.numel() // workers)
    wide = torch.promote_types(x.dtype, torch.float32)
    return torch.linalg.vector_norm(rows, dim=1, dtype=wide)


def total_squares(norms: list[Tensor], workers: int) -> Tensor:
    if not norms:
        return torch.zeros(workers, dtype=torch.float64)
    return torch.stack(norms).double().square_().sum(dim=0)


class StackedInnerState:
    """The stacked inner optimizer's tensors by torch's names for them."""

    def __init__(self, view: StackedView, chosen: Selection):
        self._view, self._chosen = view, chosen

    def __contains__(self, name: str) -> bool:
        return self._view.stack.has_state(name)

    def __getitem__(self, name: str) -> list[Tensor]:
        """One tensor per parameter; an empty list if the inner optimizer has none of that name."""
        if name not in self:
            return []
        return self._chosen.take(self._view.own(self._view.stack.state_named(name)))

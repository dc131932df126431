"""All that a sync changes when its means are there: the anchor, the local model, and the states of
the outer optimizer and of the method."""

from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from palsgd.averaged_state import AveragedState
from palsgd.flat import Bucket
from palsgd.guard import Guard
from palsgd.inner import forget_nonfinite
from palsgd.method import Method
from palsgd.method_view import MethodView
from palsgd.offload import OuterPieces, Window
from palsgd.parts import check_weights, unflattened, weighted_sum
from palsgd.passes import divided_step
from palsgd.pending_sync import Moment, PendingSync, SentPart
from palsgd.sync_tail import WEIGHT
from palsgd.tensors import Reduced, WorkerTensors, mix_


class SyncChanges:
    def __init__(
        self,
        *,
        method: Method,
        view: MethodView,
        guard: Guard,
        inner: Optimizer,
        outer: Optimizer,
        outer_scheduler: Any,
        averaged: AveragedState | None,
        blend: float | None,
    ):
        self._method, self._view, self._guard, self._inner = method, view, guard, inner
        self._replica, self._anchor = view.replica, view.anchor
        self.outer, self.outer_scheduler = outer, outer_scheduler  # stepped once per round
        self.averaged, self.blend = averaged, blend
        self._first_outer = {
            param: {name: _copy(value) for name, value in entry.items()}
            for param, entry in outer.state.items()
        }
        self._outer_pieces = OuterPieces(outer, view.replica.layout)

    def make(self, pending: PendingSync, scalars: dict[str, float], contributors: int) -> None:
        """Change the anchor, then the local model."""
        self._global_step(pending, scalars, contributors)
        if pending.finite:
            self._restart(pending)
        else:
            self.start_again(pending.at.round)

    def drop(self, pending: PendingSync) -> None:
        """Leave all as it is, as no worker has taken a step. The local model is equal to the
        anchor, unless it holds parked means, or was rounded when a delayed sync was applied."""
        if not self._method.overrides("restart"):
            self._anchor.copy_to_local(pending.at.fragment)

    # -- the global model ----------------------------------------------------------------------

    def _global_step(
        self, pending: PendingSync, scalars: dict[str, float], contributors: int
    ) -> None:
        """Change the anchor. Only this fragment's pieces have a gradient, so the outer step changes
        only them."""
        if self._anchor.home.offloaded:
            self._step_in_windows(pending, scalars, contributors)
            return
        at, parts = pending.at, self._reduced(pending, scalars.get(WEIGHT, 1.0), contributors)
        params = self._anchor.outer_params[at.fragment]
        if any(p.name == "model" and p.reduction != "gather" for p in pending.parts):
            for param, mean in zip(params, parts["model"], strict=True):
                param.grad = mean
        w = self._tensors(at, lambda: self._pieces_as_sent(pending))
        means = {} if self.averaged is None else self.averaged.take(parts)
        try:
            with divided_step(self.outer, pending.messages[0].divisor):
                self._method.apply(w, Reduced(parts, scalars, contributors), self.outer)
        finally:
            for param in params:
                param.grad = None
        if "inner" in vars(w):  # the method has used it
            w.inner.put_back()
        if self.averaged is not None:
            self.averaged.apply(at.fragment, means, w, self.blend)
        self._view.states.keep_scalars(w)

    def _step_in_windows(
        self, pending: PendingSync, scalars: dict[str, float], contributors: int
    ) -> None:
        """Change an anchor that is kept in host memory, window by window."""
        at, anchor = pending.at, self._anchor
        start, params = anchor.ranges[at.fragment].start, anchor.outer_params[at.fragment]
        places, sent = anchor.places(at.fragment), pending.local_when_sent
        self._outer_pieces.begin()
        for window in self._view.windows(at.fragment):
            here = window.copy(anchor.flat, writes=True)
            mean = window.copy(pending.messages[0].values, start=start)
            local = None
            if sent is not None:
                local = partial(_parts_of, window, sent, start)
            with (
                self._view.in_window(window, here, local=local, **at.known) as w,
                self._outer_pieces.on_device(params, places, here, mean),
            ):
                reduced = Reduced({"model": mean.parts()}, scalars, contributors)
                self._method.apply(w, reduced, self.outer)

    def _pieces_as_sent(self, pending: PendingSync) -> list[Tensor]:
        fragment = pending.at.fragment
        if pending.local_when_sent is None:
            return self._view.local_pieces(fragment)
        return self._view.pieces_in(fragment, pending.local_when_sent)

    def _reduced(
        self, pending: PendingSync, weight: float, contributors: int
    ) -> dict[str, list[Tensor]]:
        """The reduced parts by name, as tensors of the fragment's shapes."""
        if pending.parked:
            return {pending.parts[0].name: self._view.local_pieces(pending.at.fragment)}
        found: dict[str, list[Tensor]] = {}
        for number, (part, message) in enumerate(zip(pending.parts, pending.messages, strict=True)):
            tail = pending.tail if number == 0 else 0
            values = message.values[: len(message.values) - tail]
            if message.gather:
                assert message.rows is not None
                rows = message.rows[:, : message.rows.shape[1] - tail]
                values = self._from_rows(rows, part, pending.at, contributors)
            if part.reduction == "weighted":
                values = values.div_(weight)
            found[part.name] = self._shaped(pending.at.fragment, part, values)
        return found

    def _from_rows(self, rows: Tensor, part: SentPart, at: Moment, contributors: int) -> Tensor:
        """All workers' values, or this worker's own mean over some of them."""
        if part.reduction == "gather":
            return rows
        weights = self._method.weights(self._guard.worker, at.round)
        if weights is None:
            return rows.mean(0) * (self._guard.workers / contributors)
        where = f"for worker {self._guard.worker} in round {at.round}"
        return weighted_sum(rows, check_weights(self._method, weights, len(rows), where))

    def _shaped(self, fragment: int, part: SentPart, values: Tensor) -> list[Tensor]:
        """Flat values, or a row of them for each worker, as tensors of the fragment's shapes."""
        if part.displacement and values.dim() > 1:
            rows = [self._view.pieces_in(fragment, row) for row in values]
            return [torch.stack(each) for each in zip(*rows, strict=True)]
        if part.displacement:
            return self._view.pieces_in(fragment, values)
        return unflattened(values, self._anchor.pieces(fragment))

    # -- the local model -----------------------------------------------------------------------

    def _restart(self, pending: PendingSync) -> None:
        """Set the local model after the anchor has changed."""
        fragment = pending.at.fragment
        if self._method.overrides("restart"):
            w = self._tensors(pending.at, lambda: self._view.local_pieces(fragment))
            self._method.restart(w)
            self._anchor.put_back(fragment, w.local, [t.detach() for t in self._replica.local()])
            self._view.states.keep_scalars(w)
        elif self.blend is not None:
            self._blend(fragment, self.blend)
        elif pending.local_when_sent is None:
            self._anchor.copy_to_local(fragment)
        else:
            self._keep_local_progress(fragment, pending.local_when_sent)

    def _blend(self, fragment: int, share: float) -> None:
        """x_k <- share x_k + (1 - share) x."""
        if self._anchor.home.offloaded:
            for window in self._view.windows(fragment):
                with self._view.in_window(window, window.copy(self._anchor.flat)) as w:
                    mix_(w.local, w.anchor, 1.0 - share)
            return
        local = self._view.local_pieces(fragment)
        mix_(local, self._anchor.pieces(fragment), 1.0 - share)
        self._anchor.put_back(fragment, local, [t.detach() for t in self._replica.local()])

    def _keep_local_progress(self, fragment: int, when_sent: Tensor) -> None:
        """x_k <- x + (x_k - x_k when it was sent)."""
        if self._anchor.home.offloaded:
            start = self._anchor.ranges[fragment].start
            for window in self._view.windows(fragment):
                here = window.copy(self._anchor.flat)
                here.flat.sub_(window.copy(when_sent, start=start).flat)
                here.add(self._replica.local())
            return
        shift = torch.sub(self._anchor.part(fragment), when_sent, out=when_sent)
        low = self._anchor.ranges[fragment].start
        Bucket(self._replica.layout, low, shift).add(self._replica.local())

    def join(self, round: int) -> None:
        """Set all fragments of the local model to the global model, and the method's local states
        to those of a newcomer."""
        self._anchor.copy_to_local()
        self._view.states.reset_local()
        w = self._view.whole(round=round)
        self._method.join(w)
        self._view.states.keep_scalars(w)

    def start_again(self, round: int) -> None:
        """Have a worker that was not finite or was left out, or has come, go on from the global
        model, with the moments that it has as far as they are finite."""
        self.join(round)
        forget_nonfinite(self._inner)
        if self.averaged is not None:
            self.averaged.copy_to_local()

    # -- the state beside the models -----------------------------------------------------------

    def round_ended(self) -> None:
        """All fragments of a round have been applied."""
        if self.outer_scheduler is not None:
            self.outer_scheduler.step()
        if self.averaged is not None:
            self.averaged.round_ended()

    def reset_outer(self) -> None:
        """Give the outer optimizer the state with which it was built, which most do without."""
        self.outer.state.clear()
        for param, entry in self._first_outer.items():
            self.outer.state[param] = {name: _copy(value) for name, value in entry.items()}

    def _tensors(self, at: Moment, local: Any) -> WorkerTensors:
        return self._view.fragment(at.fragment, local, **at.known)


def _parts_of(window: Window, kept: Tensor, start: int) -> list[Tensor]:
    return window.copy(kept, start=start).parts()


def _copy(value: Any) -> Any:
    return value.clone() if isinstance(value, Tensor) else value

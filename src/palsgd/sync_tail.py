"""What travels behind the first message of a sync: the header, the buffers and the scalars."""

import math

import torch
from torch import Tensor

from palsgd.buffers import Buffers
from palsgd.digest import chained
from palsgd.finite import all_finite
from palsgd.guard import Guard, WorkerReport
from palsgd.meter import Meter
from palsgd.method import Part, Payload
from palsgd.method_view import MethodView
from palsgd.passes import Displaced
from palsgd.pending_sync import Kept, Moment, PendingSync

WEIGHT = "weight of this worker"  # the scalar by whose mean weighted parts are divided


class SyncTail:
    def __init__(
        self,
        view: MethodView,
        buffers: Buffers,
        guard: Guard,
        meter: Meter,
        *,
        like: Tensor,
        low: bool,
        delayed: bool,
    ):
        self._view, self._buffers, self._guard, self._meter = view, buffers, guard, meter
        self._like, self._low, self._delayed = like, low, delayed
        self._moved: dict[int, int] = {}  # 32 bits of each fragment's displacement in this round

    def report(
        self,
        pending: PendingSync,
        payload: Payload,
        parts: list[Part],
        found: Displaced | None,
        *,
        alone: bool,
    ) -> WorkerReport:
        """This worker's part of the header, and whether the worker is finite. `found` is the
        displacement in the first message. If the whole model is in it alone, its norm shows whether
        the model is finite; otherwise every tensor is read."""
        at, view = pending.at, self._view
        seen = alone and found is not None and bool(found.squares.isfinite())
        own = [t for part in parts if part.tensors is not None for t in part.tensors]
        finite = (seen or all_finite(view.replica.local())) and all_finite(own)
        numbers = [payload.weight, *payload.scalars.values()]
        finite = finite and all(math.isfinite(float(each)) for each in numbers)
        # A learning rate of 0 leaves what a delayed sync has rounded, alike on all workers.
        moved = found.moved if found is not None and any(at.rate_sums) else 0
        model = self._model_digest(at.fragment, moved or 0)
        digest = None if found is None else found.digest
        report = self._guard.report(
            chained(
                [
                    view.anchor.digest(at.fragment) if digest is None else digest,
                    view.states.digest(at.fragment),
                ]
            ),
            finite=finite,
            meter=self._meter,
            # A worker without steps has nothing of its own to compare. Its model may differ from
            # the anchor by the rounding of a delayed sync, as another worker's may.
            model=0 if at.idle else model,
            steps=at.taken,
            idle=at.idle,
            device=view.replica.device,
            step_s=at.step_s,
            buffer=self._buffers.nonfinite(),
        )
        pending.finite = report.finite
        return report

    def numbers(self, pending: PendingSync, payload: Payload, report: WorkerReport) -> Tensor:
        """The numbers that all workers need before anything is applied: the header, and the numbers
        behind it."""
        header = self._guard.encode(report, self._like)
        first, other = (self._behind(pending, payload, report, place) for place in (0, 1))
        if self._guard.elastic and self._delayed:
            pending.kept = Kept(self._guard.members, report, [], (first, other), {})
        return torch.cat([header, other if self._guard.place else first])

    def again(self, kept: Kept) -> Tensor:
        """The same numbers, for the workers that are left."""
        header = self._guard.encode(kept.report, self._like)
        return torch.cat([header, kept.numbers[min(self._guard.place, 1)]])

    def _behind(
        self, pending: PendingSync, payload: Payload, report: WorkerReport, place: int
    ) -> Tensor:
        """The buffers (with the last fragment only), and the method's scalars."""
        like = self._like
        sections = [like]
        if self._buffers.averaged and self.ends_round(pending.at):
            sections.append(self._buffers.encode(place, like, finite=report.finite))
        scalars = dict(payload.scalars)
        if any(part.reduction == "weighted" for part in payload.parts):
            scalars[WEIGHT] = payload.weight
        if scalars:
            pending.scalars = list(scalars)
            kept = [float(v) if report.finite else 0.0 for v in scalars.values()]  # nan * 0 is nan
            sections.append(like.new_tensor(kept))
        return torch.cat(sections)

    def ends_round(self, at: Moment) -> bool:
        return at.fragment == len(self._view.anchor.ranges) - 1

    def _model_digest(self, fragment: int, moved: int) -> int:
        """A digest that is equal on two workers whose local models are equal, from the 32 bits of
        the displacement, as all anchors are equal. With fragments it is that of a whole round, sent
        with the last fragment: two workers may well have the same fragment, if no gradient of
        theirs reaches it. 0 if there is nothing to compare."""
        if moved and self._low and self._equals_anchor(fragment):
            moved = 0
        if fragment == 0:
            self._moved = {}
        self._moved[fragment] = moved
        if len(self._moved) < len(self._view.anchor.ranges):
            return 0
        return self._moved[0] if fragment == 0 else chained(self._moved.values())

    def _equals_anchor(self, fragment: int) -> bool:
        """Is the local model equal to the anchor in the model's own, low precision?"""
        if not self._view.anchor.home.offloaded:
            return _equal(self._view.local_pieces(fragment), self._view.anchor.pieces(fragment))
        for window in self._view.windows(fragment):
            with self._view.in_window(window, window.copy(self._view.anchor.flat)) as w:
                if not _equal(w.local, w.anchor):
                    return False
        return True


def _equal(local: list[Tensor], anchor: list[Tensor]) -> bool:
    return all(torch.equal(x, a.to(x.dtype)) for x, a in zip(local, anchor, strict=True))

"""The timeline of a worker, step by step: some rounds of the local phase, or, where every step
averages gradients, some steps."""

import math
import time
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

import palsgd
from palsgd.events import Synced

ROUNDS = 3
AVERAGED_STEPS = 48

Span = dict[str, Any]


class Timeline:
    """Spans in training seconds, of the first rounds or steps that an optimizer takes from here on.
    All workers leave the barrier after an evaluation at the same instant, and there their training
    seconds are set to the same value."""

    def __init__(self, opt: palsgd.LocalOptimizer):
        self._opt, self._past, self._zero = opt, 0.0, time.perf_counter()
        self._spans: list[Span] = []
        self._free = 0.0  # when the last step ended
        self._before, self._in_step = (0.0, 0.0, 0), False
        self._synced: dict[str, Any] | None = None  # the ledger's line of this step's last sync
        self._arrived = self._averaged = 0.0  # own gradient computed; the mean of all is there
        self._averages = math.isinf(opt.schedule.warmup)
        self._last_step, self._last_round = opt.clock + AVERAGED_STEPS, opt.rounds + ROUNDS
        self._hooks = [
            parameter.register_post_accumulate_grad_hook(self._note_gradient)
            for group in opt.param_groups
            for parameter in group["params"]
            if self._averages and parameter.requires_grad
        ]
        opt.on(Synced, self._note_sync)

    def _note_sync(self, event: Synced) -> None:
        self._synced = self._opt.ledger.history[-1]

    def _note_gradient(self, parameter: Tensor) -> None:
        """A worker's own part of a backward pass ends with the last of its gradients. What follows
        until backward() returns is the wait for the mean."""
        if parameter.is_cuda:
            torch.cuda.current_stream().synchronize()
        self._arrived = self._now()

    def pause(self) -> None:
        self._past = self._now()

    def go_on(self, at: float | None = None) -> None:
        """`at`: where a resumed run's training seconds stand."""
        self._zero = time.perf_counter()
        self._past = self._past if at is None else at
        if not self._in_step:
            self._free = self._past

    def before_step(self) -> None:
        self._in_step, self._synced = True, None
        self._wait_for_gpu()
        self._averaged = self._now()
        ledger = self._opt.ledger
        self._before = (ledger.mixing_s, ledger.sync_s + ledger.waiting_s, self._opt.rounds)

    def after_step(self) -> None:
        self._wait_for_gpu()
        end = self._now()
        self._add_step(end)
        self._free, self._in_step = end, False

    def _add_step(self, end: float) -> None:
        if self._averages:
            self._add_averaged_step(end)
        elif self._before[2] < self._last_round and self._in_local_phase():
            self._add_local_step(end)

    def _add_local_step(self, end: float) -> None:
        """One step was, in this order, a gradient, perhaps mixing, perhaps a sync."""
        ledger, (mixing_before, sync_before, _) = self._opt.ledger, self._before
        mixing = ledger.mixing_s - mixing_before
        sync = ledger.sync_s + ledger.waiting_s - sync_before if self._synced else 0.0
        self._add("gradient", self._free, end - sync - mixing)
        self._add("mixing", end - sync - mixing, end - sync)
        self._add("sync", end - sync, end)
        if sync and self._spans:
            self._spans[-1]["entry"] = self._synced  # will say how much was waiting

    def _add_averaged_step(self, end: float) -> None:
        """One step was a gradient, what its mean took beyond the backward pass, and the update."""
        if not self._recording():
            while self._hooks:
                self._hooks.pop().remove()
            return
        self._add("gradient", self._free, self._arrived)
        self._add("sync", self._arrived, self._averaged, step=self._opt.clock)
        self._add("gradient", self._averaged, end)

    def _wait_for_gpu(self) -> None:
        """Wait for the GPU while spans are recorded, so that a span has the seconds of its own
        work. Before and after that the host runs ahead as usual."""
        if self._recording() and torch.cuda.is_initialized():
            torch.cuda.synchronize()

    def _recording(self) -> bool:
        if self._averages:
            return self._opt.clock <= self._last_step
        return self._opt.rounds < self._last_round and self._in_local_phase()

    def _in_local_phase(self) -> bool:
        return not self._opt.schedule.warms_up(self._opt.clock - 1)

    def _now(self) -> float:
        return self._past + time.perf_counter() - self._zero

    def _add(self, kind: str, start: float, end: float, **more: Any) -> None:
        if end > start:
            worker = self._opt.transport.worker
            span = {"worker": worker, "kind": kind, "start_s": start, "end_s": end}
            self._spans.append(span | more)

    def restore(self, spans: list[Span]) -> None:
        """What was recorded before a checkpoint."""
        self._spans = [dict(span) for span in spans]

    def spans_to_save(self) -> list[Span]:
        """The spans, with those of the step under way: a checkpoint is saved at the sync that ends
        a step, and the run goes on behind it."""
        count = len(self._spans)
        if self._in_step:
            self._add_step(self._past)
        found = self.spans()
        del self._spans[count:]
        return found

    def spans(self) -> list[Span]:
        """The spans, with waiting as spans of its own. The seconds of waiting are known one sync
        later."""
        found = []
        for span in self._spans:
            span = dict(span)
            waited = span.pop("entry", {}).get("waiting_s", 0.0)
            found += _parted(span, waited if math.isfinite(waited) else 0.0)
        return found


def joined(everyone: Iterable[Sequence[Span]]) -> list[Span]:
    """The spans of all workers. In a step that averages gradients each worker waits until the last
    one has computed its own, which is known when all spans are together."""
    spans = [dict(span) for each in everyone for span in each]
    last: dict[int, float] = {}
    for span in spans:
        if "step" in span:
            last[span["step"]] = max(last.get(span["step"], 0.0), span["start_s"])
    found = []
    for span in spans:
        step = span.pop("step", None)
        waited = 0.0 if step is None else last[step] - span["start_s"]
        found += _parted(span, waited)
    return found


def _parted(span: Span, waited: float) -> list[Span]:
    """The span, the first seconds of which were waiting."""
    middle = min(span["end_s"], span["start_s"] + waited)
    parts = [span | {"kind": "wait", "end_s": middle}, span | {"start_s": middle}]
    return [part for part in parts if part["end_s"] > part["start_s"]]

"""The timeline of a worker, step by step, for the first rounds of the local phase."""

import math
import time
from typing import Any

import torch

import palsgd
from palsgd.events import Synced

ROUNDS = 3


class Timeline:
    """Spans in training seconds. All workers leave the barrier after an evaluation at the same
    instant, and there their training seconds are set to the same value."""

    def __init__(self, opt: palsgd.LocalOptimizer):
        self._opt, self._past, self._zero = opt, 0.0, time.perf_counter()
        self._spans: list[dict[str, Any]] = []
        self._free = 0.0  # when the last step ended
        self._before, self._in_step = (0.0, 0.0, 0), False
        self._synced: dict[str, Any] | None = None  # the ledger's line of this step's last sync
        opt.on(Synced, self._note_sync)

    def _note_sync(self, event: Synced) -> None:
        self._synced = self._opt.ledger.history[-1]

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
        ledger = self._opt.ledger
        self._before = (ledger.mixing_s, ledger.sync_s + ledger.waiting_s, self._opt.rounds)

    def after_step(self) -> None:
        """One step was, in this order, a gradient, perhaps mixing, perhaps a sync."""
        self._wait_for_gpu()
        end, ledger = self._now(), self._opt.ledger
        mixing_before, sync_before, rounds = self._before
        if rounds < ROUNDS and self._in_local_phase():
            mixing = ledger.mixing_s - mixing_before
            sync = ledger.sync_s + ledger.waiting_s - sync_before if self._synced else 0.0
            self._add("gradient", self._free, end - sync - mixing)
            self._add("mixing", end - sync - mixing, end - sync)
            self._add("sync", end - sync, end)
            if sync and self._spans:
                self._spans[-1]["entry"] = self._synced  # will say how much was waiting
        self._free, self._in_step = end, False

    def _wait_for_gpu(self) -> None:
        """Wait for the GPU while spans are recorded, so that a span has the seconds of its own
        work. Before and after that the host runs ahead as usual."""
        recording = self._opt.rounds < ROUNDS and self._in_local_phase()
        if recording and torch.cuda.is_initialized():
            torch.cuda.synchronize()

    def _in_local_phase(self) -> bool:
        return not self._opt.schedule.warms_up(self._opt.clock - 1)

    def _now(self) -> float:
        return self._past + time.perf_counter() - self._zero

    def _add(self, kind: str, start: float, end: float) -> None:
        if end > start:
            worker = self._opt.transport.worker
            self._spans.append({"worker": worker, "kind": kind, "start_s": start, "end_s": end})

    def restore(self, spans: list[dict[str, Any]]) -> None:
        """What was recorded before a checkpoint."""
        self._spans = [dict(span) for span in spans]

    def spans(self) -> list[dict[str, Any]]:
        """The spans, with waiting as spans of its own. The seconds of waiting are known one sync
        later."""
        found = []
        for span in self._spans:
            span = dict(span)
            waited = span.pop("entry", {}).get("waiting_s", 0.0)
            if waited > 0 and math.isfinite(waited):
                middle = min(span["end_s"], span["start_s"] + waited)
                found.append(span | {"kind": "wait", "end_s": middle})
                span["start_s"] = middle
            found.append(span)
        return found

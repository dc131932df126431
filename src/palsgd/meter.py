"""Measures a worker's seconds and adds them to its ledger."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from palsgd.ledger import Ledger


class Stopwatch:
    """Adds elapsed seconds to the fields of a ledger.

    On a GPU the host runs ahead of the device, so an instant is a CUDA event. Two events become
    seconds once the device has passed both; the device never waits for this.
    """

    def __init__(self, ledger: Ledger, device: torch.device):
        self._ledger, self._cuda = ledger, device.type == "cuda"
        self._pending: list[tuple[str, Any, Any]] = []

    def now(self) -> Any:
        if not self._cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def add(self, name: str, start: Any, end: Any) -> None:
        if not self._cuda:
            self._book(name, end - start)
            return
        self._pending.append((name, start, end))
        self.catch_up()

    def catch_up(self) -> None:
        """Add the seconds between events that the device has passed by now."""
        while self._pending and self._pending[0][2].query():
            name, start, end = self._pending.pop(0)
            self._book(name, start.elapsed_time(end) / 1e3)

    @contextmanager
    def timing(self, name: str) -> Iterator[None]:
        start = self.now()
        yield
        self.add(name, start, self.now())

    def _book(self, name: str, seconds: float) -> None:
        setattr(self._ledger, name, getattr(self._ledger, name) + seconds)


class Meter:
    """Divides a worker's time into gradient steps, mixing steps and syncs. The instant that ends
    one of them begins the next."""

    def __init__(self, ledger: Ledger, device: torch.device):
        self.ledger, self.watch = ledger, Stopwatch(ledger, device)
        self.exchange_s = 0.0  # how long the last exchange took, waiting included
        self.sync_s = 0.0  # how long the last sync took, that exchange included
        self._cuda = device.type == "cuda"
        self._left_step: Any = None  # the instant at which the last step ended

    def gradient_done(self) -> None:
        """Add the seconds since the last step (data, forward, backward and the inner step)."""
        now = self.watch.now()
        if self._left_step is not None:
            self.watch.add("gradient_s", self._left_step, now)
        self._left_step = now

    def mixing_done(self) -> None:
        now = self.watch.now()
        if self._left_step is not None:
            self.watch.add("mixing_s", self._left_step, now)
        self._left_step = now

    def leave_step(self) -> None:
        self._left_step = self.watch.now()

    def skip(self) -> None:
        """Leave out the seconds since the last step, which were not for a gradient but, for
        example, for an evaluation."""
        if self._left_step is not None:
            self._left_step = self.watch.now()

    def step_seconds(self, gradient_steps: int, *, since: float) -> float:
        """Seconds of one gradient step: the mean over the `gradient_steps` since the last sync.
        `since` is the ledger's `gradient_s` at that sync."""
        self.watch.catch_up()
        spent = self.ledger.gradient_s - since
        return spent / gradient_steps if gradient_steps else 0.0

    @contextmanager
    def whole_sync(self, *, exactly: bool) -> Iterator[None]:
        """Measure a sync. With `exactly`, which is set while H is being chosen, the device's work
        is included."""
        self._wait_for_device(exactly)
        began = time.perf_counter()
        yield
        self._wait_for_device(exactly)
        self.sync_s = time.perf_counter() - began

    def _wait_for_device(self, exactly: bool) -> None:
        if exactly and self._cuda:
            torch.cuda.synchronize()

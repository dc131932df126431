"""Applies the rules of a method whose workers share one anchor to all workers at once."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from palsgd.events import Mixed, Sent, Synced
from palsgd.method import Rate, Rates
from palsgd.payload import payload_size, wire_bytes
from palsgd.simulator.run import Run
from palsgd.simulator.saved import cloned
from palsgd.simulator.stack import StackedWorkers
from palsgd.simulator.stacked_sync import StackedMoment, StackedPending, StackedSyncer
from palsgd.simulator.stacked_view import StackedView
from palsgd.simulator.stretch import (
    GradientSlot,
    RunStretch,
    mixing_rates,
    pull_powers,
    rates_at,
)


class StackedRules:
    def __init__(self, run: Run, stack: StackedWorkers, first: int):
        self._run, self._stack, self._first = run, stack, first
        self._worker, self._method = run.worker, run.method
        self._view = StackedView(run.worker.syncer, stack, first)
        self._syncer = StackedSyncer(run.worker, self._view, run.buffers)
        self._pending: StackedPending | None = None
        self._size = payload_size(run.worker)
        # Counts by worker since the local phase began, and the same counts at each fragment's last
        # sync.
        self._steps = [0] * run.workers
        self._sums = [[0.0] * run.workers for _ in run.replica.groups]
        self._marks = [self._mark()] * self._worker.at.fragments

    def open_local_phase(self) -> None:
        syncer, at = self._worker.syncer, self._worker.at
        for view, x in zip(syncer.anchor.views, self._stack.params, strict=True):
            view.copy_(x[self._first])
        self._run.show_buffers(self._stack, self._first)
        syncer.buffers.set_from_local()
        sizes = self._size.start()
        self._run.count_messages(sizes, sum(wire_bytes(n, self._run.workers) for n in sizes))
        at.has_anchor = True
        self._worker.course.extend()

    # -- steps ---------------------------------------------------------------------------------

    def run_head(self, steps: RunStretch) -> None:
        if not (self._worker.leads and self._method.overrides("after_gradient")):
            return
        for length, workers in _by_length([len(s.head) for s in steps.stretches]).items():
            if length:
                own = [steps.stretches[k] for k in workers]
                heads = [stretch.head for stretch in own]
                clocks, powers = [steps.start + length] * len(workers), pull_powers(heads, own)
                mixing = mixing_rates(heads, steps.rates)
                self._after_gradient(workers, None, mixing, clocks, powers)

    def saw_gradients(self, digests: dict[int, int]) -> None:
        self._syncer.gradients = [digests.get(k, 0) for k in range(self._run.workers)]

    def before_gradient(
        self, steps: RunStretch, slots: dict[int, GradientSlot], grads: list[Tensor]
    ) -> None:
        chosen = self._view.select(list(slots))
        round = self._worker.schedule.round_of(steps.start)
        clocks = [steps.start + slot.tick for slot in slots.values()]
        length = self._worker.schedule.length(steps.start)
        w = self._view.with_gradients(
            chosen, lambda: grads, round=round, length=length, clock=_common_clock(clocks)
        )
        self._method.before_gradient(w)
        self._view.keep(w, chosen)

    def after_gradient(self, steps: RunStretch, slots: dict[int, GradientSlot]) -> None:
        everyone, each = list(slots), list(slots.values())
        for places in _by_length([len(slot.mixing) for slot in each]).values():
            chosen = [each[i] for i in places]
            if not self._method.acts_after_gradient(chosen[0].mixing):
                continue
            workers, mixing = [everyone[i] for i in places], [slot.mixing for slot in chosen]
            self._after_gradient(
                workers,
                rates_at([slot.tick for slot in chosen], steps.rates),
                mixing_rates(mixing, steps.rates),
                [steps.start + slot.end for slot in chosen],
                pull_powers(mixing, [steps.stretches[k] for k in workers]),
            )

    def _after_gradient(
        self,
        workers: list[int],
        rate: Rates | None,
        mixing: list[Rates],
        clocks: list[int],
        powers: list[Rate],
    ) -> None:
        chosen = self._view.select(workers)
        schedule, last = self._worker.schedule, clocks[0] - 1
        w = self._view.whole(
            chosen,
            round=schedule.round_of(last),
            length=schedule.length(last),
            clock=_common_clock(clocks),
            pull_powers=powers,
        )
        weights = self._method.after_gradient(w, rate, mixing)
        self._view.keep(w, chosen)
        if weights is None:
            return
        low, high = (_per_worker(each, len(workers)) for each in weights)
        for place, k in enumerate(workers):
            self._run.ledgers[k].saw_betas(low[place], high[place])
        if self._worker.books.listeners.wanted(Mixed):
            for place, k in enumerate(workers):
                self._tell(
                    Mixed, k, clocks[place],
                    steps=len(mixing), weight_min=low[place], weight_max=high[place],
                )  # fmt: skip

    def passed(self, steps: RunStretch) -> None:
        at = self._worker.at
        at.clock, at.synced, at.rates = steps.end, False, list(steps.rates[-1])
        at.gradient_steps += len(steps.stretches[0].slots)
        pairs = zip(steps.stretches, self._run.ledgers, strict=True)
        for k, (stretch, ledger) in enumerate(pairs):
            ledger.gradient_steps += len(stretch.slots)
            ledger.mixing_steps += stretch.mixing_steps
            self._steps[k] += len(stretch.slots)
            for slot in stretch.slots:
                for group, rate in enumerate(steps.rates[slot.tick]):
                    self._sums[group][k] += rate / slot.share

    # -- syncs ---------------------------------------------------------------------------------

    def run_due(self) -> bool:
        clock, through = self._worker.at.clock, []
        for kind, fragment in self._worker.schedule.due(clock):
            if kind == "apply":
                assert self._pending is not None
                found, self._pending = self._pending, None
            else:
                found = self._syncer.send(self._moment(fragment), keeps_local=kind == "send")
                self._marks[fragment] = self._mark()
            if kind == "send":
                self._pending = found
                self._tell_all(Sent, round=found.at.round, fragment=fragment)
                continue
            self._syncer.apply(found)
            through.append(found)
            self._synced(found)
        for number, found in enumerate(through):
            self._tell_synced(found, completes=number == len(through) - 1)
        return bool(through)

    def _mark(self) -> tuple[list[int], list[list[float]]]:
        return list(self._steps), [list(group) for group in self._sums]

    def _moment(self, fragment: int) -> StackedMoment:
        clock, (steps, sums) = self._worker.at.clock, self._marks[fragment]
        round = self._worker.schedule.round_of(clock - 1)
        pairs = zip(self._sums, sums, strict=True)
        return StackedMoment(
            fragment=fragment,
            clock=clock,
            round=round,
            gradient_steps=_difference(self._steps, steps),
            rate_sums=[_difference(now, then) for now, then in pairs],
            rates=self._worker.at.rates,
        )

    def _synced(self, found: StackedPending) -> None:
        at = self._worker.at
        at.synced, at.scalars = True, dict(found.scalars)
        self._run.count_messages(found.messages, found.on_the_wire)
        for ledger, distance in zip(self._run.ledgers, found.distance, strict=True):
            ledger.syncs += 1
            ledger.distance = distance
        if found.at.fragment == at.fragments - 1:
            at.rounds += 1
            self._worker.syncer.changes.round_ended()
            self._worker.course.extend()

    def show(self) -> None:
        syncer = self._worker.syncer
        syncer.anchor.copy_to_local()
        self._run.show_buffers(self._stack, self._first)
        syncer.buffers.copy_to_local()

    # -- states --------------------------------------------------------------------------------

    def state(self) -> dict[str, Any]:
        return {
            "steps": self._steps,
            "sums": self._sums,
            "marks": self._marks,
            "pending": None if self._pending is None else self._pending.state(),
            "sync": self._syncer.state(),
            "view": self._view.state(),
        }

    def load(self, saved: dict[str, Any]) -> None:
        self._view.load(saved["view"])
        self._syncer.load(saved["sync"])
        self._steps, self._sums = list(saved["steps"]), cloned(saved["sums"])
        self._marks = cloned(saved["marks"])
        found, device = saved["pending"], self._stack.device
        self._pending = None if found is None else StackedPending.loaded(found, device)

    # -- events --------------------------------------------------------------------------------

    def _tell_synced(self, found: StackedPending, *, completes: bool) -> None:
        sent = sum(found.messages)
        for k, distance in enumerate(found.distance):
            self._tell(
                Synced,
                k,
                self._worker.at.clock,
                round=found.at.round,
                fragment=found.at.fragment,
                bytes_sent=sent,
                distance=distance,
                contributors=found.contributors,
                completes=completes,
            )

    def _tell_all(self, kind: type, **what: Any) -> None:
        for k in range(self._run.workers):
            self._tell(kind, k, self._worker.at.clock, **what)

    def _tell(self, kind: type, worker: int, clock: int, **what: Any) -> None:
        listeners = self._worker.books.listeners
        if listeners.wanted(kind):
            listeners.tell(kind(worker=worker, clock=clock, **what))


def _by_length(lengths: list[int]) -> dict[int, list[int]]:
    """The indices of the entries of each length."""
    found: dict[int, list[int]] = {}
    for place, length in enumerate(lengths):
        found.setdefault(length, []).append(place)
    return found


def _common_clock(clocks: list[int]) -> Any:
    """One number if all workers have the same clock, else one entry per worker."""
    return clocks[0] if len(set(clocks)) == 1 else torch.tensor(clocks)


def _per_worker(value: Rate, workers: int) -> list[float]:
    return value.tolist() if isinstance(value, Tensor) else [float(value)] * workers


def _difference(now: Sequence[float], then: Sequence[float]) -> Tensor:
    """One entry per worker."""
    return torch.tensor(now, dtype=torch.float64) - torch.tensor(then, dtype=torch.float64)

"""Warm-ups that several runs have in common.

In the warm-up every method is DDP. Runs of one seed with the same data, learning rates and inner
optimizer compute the same until it ends, whatever they do after it. One of them computes it, and
the others start where it ended. This is the stacked engine's form of it, beside that of workers
which train one after another (workers_warm_start.py).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from palsgd.simulator.exact import Randomness, rng_state
from palsgd.simulator.run import Run
from palsgd.simulator.stack import StackedWorkers
from palsgd.simulator.workers_warm_start import WorkersWarmUp, check_rates


@dataclass(frozen=True, kw_only=True)
class WarmUp:
    """What a run has after its warm-up."""

    steps: int
    params: list[Tensor]  # the one model that its workers have
    state: list[list[Tensor]]  # of the inner optimizer, for each parameter
    buffers: dict[str, Tensor]  # a row for each worker
    batches: list[Any]  # the place of each worker in its data
    history: dict[str, Any]
    rates: list[float]  # of the next step
    seconds: float
    rng: Randomness

    @classmethod
    def of(cls, run: Run, number: int, stack: StackedWorkers) -> "WarmUp":
        """Of the run with that number in the stack."""
        own = slice(number * run.workers, (number + 1) * run.workers)
        return cls(
            steps=run.worker.at.clock,
            params=[x[number].clone() for x in stack.params],
            state=[[s[number].clone() for s in kept] for kept in stack.state],
            buffers={name: b[own].clone() for name, b in stack.buffers.items()},
            batches=[source.state() for source in run.batches],
            history=run.recorder.state(),
            rates=run.worker.inner.rates(),
            seconds=run.recorder.watch.seconds(),
            rng=rng_state(stack.device),
        )

    @torch.no_grad()
    def give(self, run: Run, number: int, stack: StackedWorkers) -> None:
        """Let a run that has not begun start here. What it has sent until then is its own: a header
        may be longer than that of the run which computed the warm-up."""
        sent = {}
        for clock in range(self.steps):
            run.tick(clock)
            run.warmed_up(clock + 1, skipped=False)
            sent[clock + 1] = run.ledgers[0].bytes_sent
        check_rates(run.worker.inner.rates(), self.rates)
        for x, row in zip(stack.params, self.params, strict=True):
            x[number] = row
        for kept, rows in zip(stack.state, self.state, strict=True):
            for s, row in zip(kept, rows, strict=True):
                s[number] = row
        own = slice(number * run.workers, (number + 1) * run.workers)
        for name, each in self.buffers.items():
            stack.buffers[name][own] = each
        for source, place in zip(run.batches, self.batches, strict=True):
            source.load(place)
        run.recorder.load(self.history)
        for entry in run.recorder.history:
            entry["bytes_sent"] = sent[entry["clock"]]


Found = WarmUp | WorkersWarmUp  # an engine starts from its own form alone


class CommonWarmUp(Protocol):
    """A warm-up that several runs have in common."""

    @property
    def steps(self) -> int: ...

    @property
    def found(self) -> Found | None:
        """What a run has left; None: nobody has computed it yet."""

    def leave(self, found: Found) -> None:
        """Keep it for the runs that begin later."""


class SharedWarmUp:
    """One of so many steps. The first run that ends it well leaves it here."""

    def __init__(self, steps: int):
        self.steps = steps
        self.found: Found | None = None

    def leave(self, found: Found) -> None:
        self.found = found


def is_wanted(common: CommonWarmUp, run: Run, clock: int) -> bool:
    """Has the run just ended a warm-up that nobody has left yet? One with a skipped step is not
    passed on, as how many were skipped is part of what a run has done."""
    whole = clock == common.steps and run.error is None and not run.ledgers[0].skipped_steps
    return whole and common.found is None


def known_warmups(shared: Sequence[CommonWarmUp | None]) -> list[WarmUp]:
    """Those of all runs of a program, which start together; none if one of them is not known."""
    found = [each.found for each in shared
             if each is not None and isinstance(each.found, WarmUp)]  # fmt: skip
    return found if len(found) == len(shared) else []

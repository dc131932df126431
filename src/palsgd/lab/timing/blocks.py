"""Blocks of steps whose seconds are measured. Every process of the group takes each of them."""

import itertools
import os
import time
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator

import torch
import torch.distributed as dist

from palsgd.events import Synced
from palsgd.lab.device import wait_for
from palsgd.lab.settings import Settings
from palsgd.lab.timeline import ROUNDS, Span, Timeline, joined
from palsgd.lab.worker_loop import WorkerLoop
from palsgd.lab.workload import Workload
from palsgd.transports.json_exchange import gathered
from palsgd.transports.waiting import barrier, waiting_for

BLOCK_S = 0.2  # about what a block of single steps takes
LEAST, MOST = 4, 64  # steps of such a block
ROUND_S = 2.0  # a round that computes for longer is cut short
HEAD_START_S = 0.5  # in which all processes learn when a recording begins


class Block(ABC):
    """Some steps of one program. The program goes on from block to block."""

    def __init__(self, settings: Settings, workload: Workload):
        self.loop = WorkerLoop(settings, workload, own_group=True)
        self._batches = self.loop.batches()

    @abstractmethod
    def take(self) -> dict[str, float]:
        """Take the block, and tell its seconds in this process."""

    @abstractmethod
    def record(self) -> list[Span]:
        """Take some more steps, and tell what every process did when. They are not timed: recording
        takes time itself."""

    def _recorded(self, steps: Iterable[None]) -> list[Span]:
        """What all processes did in these steps."""
        timeline = Timeline(self.loop.opt)
        timeline.go_on(at=_begin_together())
        for _ in steps:
            self._step(timeline)
        everyone = gathered(timeline.spans())
        return joined(everyone[:: self.loop.settings.ranks_per_worker])

    def _step(self, timeline: Timeline | None = None) -> None:
        self.loop.gradient(next(self._batches))
        if timeline is not None:
            timeline.before_step()
        self.loop.opt.step()
        if timeline is not None:
            timeline.after_step()
        self.loop.opt.zero_grad()

    def _begin(self) -> float:
        wait_for(self.loop.workload.device)
        barrier()
        return time.perf_counter()

    def _end(self, began: float) -> float:
        wait_for(self.loop.workload.device)
        return time.perf_counter() - began


class StepsBlock(Block):
    """Steps that are all alike: with an all-reduce each, or with no exchange at all. As many as
    take about BLOCK_S; the first block finds out how many that are."""

    steps = LEAST

    def take(self) -> dict[str, float]:
        began = self._begin()
        for _ in range(self.steps):
            self._step()
        step = self._end(began) / self.steps
        if self.steps == LEAST:
            self.steps = max(LEAST, min(MOST, round(BLOCK_S / _slowest(step))))
        return {"step": step}

    def record(self) -> list[Span]:
        return self._recorded(itertools.repeat(None, self.steps))


class RoundBlock(Block):
    """A round of a method and its sync. The parts come from the method's ledger, less what it had
    booked before; computing is the remainder, as a ledger's own figure would include the blocks of
    other programs."""

    def __init__(self, settings: Settings, workload: Workload, *, step_s: float):
        shortest = max(LEAST, settings.fragments * max(1, settings.delay))
        length = max(shortest, int(ROUND_S / step_s)) if step_s else shortest
        whole = int(settings.sync_every)
        super().__init__(settings.changed({"sync_every": min(whole, length)}), workload)
        self._applied = 0
        self.loop.opt.on(Synced, self._note)

    def _note(self, event: Synced) -> None:
        self._applied += event.completes

    def take(self) -> dict[str, float]:
        before, synced = self._booked(), self._applied
        began = self._begin()
        for _ in self._until(synced + 1):
            self._step()
        wall = self._end(began)
        spent = {name: value - before[name] for name, value in self._booked().items()}
        gradients = spent.pop("gradients")
        others = spent["mixing"] + spent["sync"] + spent["waiting"]
        return spent | {"step": max(0.0, wall - others) / max(1.0, gradients)}

    def record(self) -> list[Span]:
        return self._recorded(self._until(self._applied + ROUNDS))

    def _until(self, applied: int) -> Iterator[None]:
        """Once before each step, until so many syncs have been applied."""
        while self._applied < applied:
            yield

    def _booked(self) -> dict[str, float]:
        ledger, opt = self.loop.opt.ledger, self.loop.opt
        return {
            "gradients": opt.gradient_steps,
            "mixings": opt.clock - opt.gradient_steps,
            "mixing": ledger.mixing_s,
            "sync": ledger.sync_s,
            "waiting": ledger.waiting_s,
        }


def _begin_together() -> float:
    """Wait for the instant that counts as zero, and tell how long ago it was. Processes of one
    machine share a clock, and agree on an instant; over a link that is too slow for the head start
    they begin later than that, each when it has heard of it. Processes of several machines begin
    when a barrier opens."""
    barrier()
    if int(os.environ.get("LOCAL_WORLD_SIZE", "1")) < dist.get_world_size():
        return 0.0
    zero = max(gathered(time.perf_counter(), read=float)) + HEAD_START_S
    time.sleep(max(0.0, zero - time.perf_counter()))
    return time.perf_counter() - zero


def _slowest(own: float) -> float:
    """The largest of all processes, so that they agree on it."""
    found = torch.tensor(own, dtype=torch.float64)
    if dist.get_backend() == "nccl":
        found = found.cuda()
    with waiting_for(None):
        dist.all_reduce(found, op=dist.ReduceOp.MAX)
    return float(found)

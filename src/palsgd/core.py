"""Algorithm 1 as a generator: one worker's steps, which yield tensors whenever a mean is due.

`Core` sends nothing. Whoever drives it replaces the yielded tensors by their mean over the
workers and resumes it with the number of bytes sent: `step()` from a process group, the
simulator from its other workers.
"""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from palsgd.buffers import Buffers
from palsgd.layout import Buckets
from palsgd.ledger import Ledger, Stopwatch
from palsgd.method import Method
from palsgd.replica import Anchor, Replica, digest
from palsgd.roll_call import Attendance, RollCall, check_consensus, check_finite, waiting
from palsgd.sync import Exchange, synchronize
from palsgd.transport import Transport
from palsgd.warmup import GradientSync, average_gradients


class Core:
    def __init__(
        self,
        *,
        method: Method,
        replica: Replica,
        inner: Optimizer,
        outer: Optimizer | None,
        buffers: Buffers,
        transport: Transport,
        gradient_sync: GradientSync,
        skip_nonfinite: bool,
        max_norm: float | None,
        bucket_size: int,
    ):
        self.method, self.replica, self.inner, self._outer = method, replica, inner, outer
        self.buffers, self.gradient_sync = buffers, gradient_sync
        self.worker, self.workers = transport.worker, transport.workers
        self._combine = transport.combine
        self.skip_nonfinite, self.max_norm = skip_nonfinite, max_norm
        self.bucket_size = bucket_size
        self.like = torch.empty(0, dtype=replica.dtype, device=replica.device)  # of all messages
        self.scheduler: Any = None
        self.roll_call = RollCall(self.workers)
        self.ledger = Ledger()
        self.watch = Stopwatch(self.ledger, replica.device)
        self.exchange_s = 0.0  # how long the last exchange took, waiting included
        self.clock = self.gradient_steps = self.rounds = 0
        self.epoch = 0  # passes over the data that until() has begun, less one
        self.synced = False
        self.started_alike = False  # have plain modules been compared, before their first step?
        self.opened = False  # has the local phase begun, is there an anchor?
        self.end: int | None = None  # the clock at which training ends, with a last sync
        self._plan: tuple[int, list[bool]] = (-1, [])
        self._buckets: Buckets | None = None
        self._left_step: Any = None  # the instant the last step ended
        self.after_exchange: Callable[[], None] | None = None  # for whoever watches
        self.since_sync = (0, 0, 0)  # clock, gradient and mixing steps at the last sync

    @property
    def anchor(self) -> Anchor:
        assert self.replica.anchor is not None
        return self.replica.anchor

    @property
    def outer(self) -> Optimizer:
        assert self._outer is not None
        return self._outer

    @property
    def warming_up(self) -> bool:
        return self.clock < self.method.warmup_steps

    def buckets(self, *, whole: bool = False) -> Buckets:
        """The messages a model travels in; with `whole`, a single one of any size.

        Kept between syncs, unless larger than a bucket may be: fresh memory costs page faults,
        which on a fast link weigh as much as the arithmetic.
        """
        extras = self.roll_call.size + len(self.replica.params) + self.buffers.encoded_size
        if whole and self.replica.layout.size > self.bucket_size:
            return Buckets(self.replica.layout, self.replica.layout.size, extras, self.like)
        if self._buckets is None:
            self._buckets = Buckets(self.replica.layout, self.bucket_size, extras, self.like)
        return self._buckets

    def step(self) -> Exchange:
        """Take the gradient at hand, then every step up to the next one that needs a gradient."""
        if self.warming_up:
            yield from self._warmup_step()
        else:
            if not self.opened or self._sync_is_due() or self._in_idle_round():
                yield from self.skip_idle_rounds()
            self.synced = False
            self._tick_head()
            round_end = self._round_end()
            self._gradient_step(self.method.gradient_share)
            self._local_rule(self._mixing_run() if self.clock < round_end else 0)
            if self.clock == round_end:
                yield from self._sync()
        if not self.opened or self.synced:
            yield from self.skip_idle_rounds()
            self._left_step = self.watch.now()

    def skip_idle_rounds(self) -> Exchange:
        """Tick off rounds that are all mixing, so the next gradient meets the model it is for.

        Such a round changes nothing here, but its sync does. Also opens the local phase.
        """
        if self.opened and self._sync_is_due():
            yield from self._sync()
        if self.warming_up or self.clock == self.end:
            return
        if not self.opened:
            yield from self._open_local_phase()
        while self.clock != self.end and self._in_idle_round():
            self._tick_head()
            yield from self._sync()

    def _sync_is_due(self) -> bool:
        """Did the last exchange fail, or was it interrupted, after the clock had come to it?"""
        ticks = int(self.clock - self.method.warmup_steps)
        at_end = ticks % self.method.sync_every == 0 or self.clock == self.end
        return at_end and self.since_sync[0] != self.clock

    def _in_idle_round(self) -> bool:
        return self._mixing_run() == self._round_end() - self.clock

    def _warmup_step(self) -> Exchange:
        if self.gradient_sync.in_step:
            self._book_time_since_last_step()
            with self.watch.timing("sync_s"):
                yield from average_gradients(self)
            self._left_step = self.watch.now()
        elif self.workers > 1:
            self.ledger.bytes_sent += sum(g.nbytes for g in self.replica.grads() if g is not None)
        self._gradient_step(1.0)
        self.ledger.warmup_steps += 1
        self.ledger.syncs += 1
        if not self.warming_up:
            self.gradient_sync.switch(on=False)
        if self.after_exchange is not None:
            self.after_exchange()

    def _open_local_phase(self) -> Exchange:
        """The model becomes the anchor, once all workers have shown that theirs is the same."""
        self.anchor.take()
        self.buffers.take()
        mine = self.attendance(finite=True)
        attendance = self.roll_call.encode(self.worker, mine, self.like)
        self.count_message((yield [attendance]))
        where = f"the start of the local phase (clock {self.clock})"
        check_consensus(self.roll_call.decode(attendance), where)
        self.opened = True
        self.since_sync = (self.clock, self.gradient_steps, self.ledger.mixing_steps)

    def _gradient_step(self, share: float) -> None:
        if self.max_norm is not None:
            torch.nn.utils.clip_grad_norm_(self.replica.params, self.max_norm)
        with lr_divided(self.inner, share):
            self.inner.step()
        self._book_time_since_last_step()
        self.gradient_steps += 1
        self.ledger.gradient_steps += 1
        self._tick()

    def _local_rule(self, mixing_steps: int) -> None:
        rates = []
        for _ in range(mixing_steps):
            rates.append(self.replica.learning_rates())
            self.ledger.mixing_steps += 1
            self._tick()
        betas = self.method.local_rule(self.replica, rates)
        if betas is not None:
            self.ledger.saw_betas(*betas)
            now = self.watch.now()
            self.watch.add("mixing_s", self._left_step, now)
            self._left_step = now

    def _tick_head(self) -> None:
        """Mixing steps at the head of a round: local model and anchor are equal, nothing moves."""
        for _ in range(self._mixing_run()):
            self.ledger.mixing_steps += 1
            self._tick()

    def _tick(self) -> None:
        self.clock += 1
        if self.scheduler is not None:
            self.scheduler.step()

    def _sync(self) -> Exchange:
        yield from synchronize(self)
        self.rounds += 1
        self.synced = True
        if self.after_exchange is not None:
            self.after_exchange()

    def round_of(self, clock: int) -> int:
        return int(clock - self.method.warmup_steps) // self.method.sync_every

    def _round_end(self) -> int:
        """The clock at which the current round is synced."""
        end = (
            int(self.method.warmup_steps) + (self.round_of(self.clock) + 1) * self.method.sync_every
        )
        return min(end, self.end) if self.end is not None and self.clock < self.end else end

    def _mixing_run(self) -> int:
        """How many mixing steps come next, before a gradient step or the end of the round."""
        round = self.round_of(self.clock)
        if self._plan[0] != round:
            self._plan = (round, self.method.plan(worker=self.worker, round=round))
        start = int(self.clock - self.method.warmup_steps) % self.method.sync_every
        run, longest = 0, self._round_end() - self.clock
        while run < longest and self._plan[1][start + run]:
            run += 1
        return run

    def attendance(self, *, finite: bool, model: Buckets | None = None) -> Attendance:
        """This worker's line of the roll call; all its ranks, if several, give the same one.

        The digest is that of the anchor or, before there is one, of the model, read through its
        buckets, and the clock.
        """
        if model is None:
            own = self.anchor.digest()
        else:
            own = self.clock
            for bucket in model.ranges:
                bucket.read(self.replica.local())
                own += digest(bucket.flat)
        whole = torch.tensor([own, not finite], device=self.replica.device)
        self._combine(whole)
        total, broken = whole.tolist()
        return Attendance(total & 0xFFFFFFFF, not broken, self.exchange_s)

    def judge(self, tail: Tensor) -> int:
        """Raise unless the sync may go ahead; else how many workers' models are in the mean."""
        attendance = self.roll_call.decode(tail[: self.roll_call.size])
        check_consensus(attendance, self.where())
        contributors = check_finite(attendance, self.where(), self.skip_nonfinite)
        if self.ledger.history:
            waited = waiting(attendance, self.worker)
            self.ledger.history[-1]["waiting_s"] = waited
            self.ledger.waiting_s += waited
            self.ledger.sync_s -= waited
        return contributors

    def where(self) -> str:
        return f"the sync of round {self.round_of(self.clock - 1)} (clock {self.clock})"

    def count_message(self, sent: int) -> None:
        self.ledger.messages += 1
        self.ledger.bytes_sent += sent

    def record_sync(self, distance: float, sent: int) -> None:
        clock, gradients, mixing = self.since_sync
        self.since_sync = (self.clock, self.gradient_steps, self.ledger.mixing_steps)
        self.ledger.syncs += 1
        self.ledger.distance = distance
        self.ledger.history.append(
            {
                "round": self.round_of(self.clock - 1),
                "clock": self.clock,
                "steps": self.clock - clock,
                "gradient_steps": self.gradient_steps - gradients,
                "mixing_steps": self.ledger.mixing_steps - mixing,
                "distance": distance,
                "bytes_sent": sent,
                "exchange_s": self.exchange_s,
                "waiting_s": math.nan,  # known at the next sync
            }
        )

    def _book_time_since_last_step(self) -> None:
        """An instant taken here serves as the end of one span and the start of the next."""
        now = self.watch.now()
        if self._left_step is not None:
            self.watch.add("gradient_s", self._left_step, now)
        self._left_step = now

    def counts(self) -> dict[str, Any]:
        names = ("gradient_steps", "rounds", "synced", "since_sync", "epoch")
        return {name: getattr(self, name) for name in names}

    def resume(self, clock: int, counts: dict[str, Any]) -> None:
        self.clock = clock
        for name in self.counts():
            setattr(self, name, counts[name])
        self.started_alike = False
        self.gradient_sync.switch(on=self.warming_up)

    def restart_watch(self) -> None:
        """What has passed since the last step was not for a gradient (an evaluation, say)."""
        if self._left_step is not None:
            self._left_step = self.watch.now()


@contextmanager
def lr_divided(inner: Optimizer, share: float) -> Iterator[None]:
    """The groups' learning rates divided by `share`, put back whatever happens inside."""
    saved = [group["lr"] for group in inner.param_groups]
    if share != 1:
        for group in inner.param_groups:
            group["lr"] = group["lr"] / share
    try:
        yield
    finally:
        for group, lr in zip(inner.param_groups, saved, strict=True):
            group["lr"] = lr

"""Algorithm 1 as a generator: one worker's steps, which yield tensors whenever a mean is due.

`Core` sends nothing. Whoever drives it replaces the values of a yielded message by their mean
over the workers and resumes it with the number of bytes sent: `step()` from a process group, the
simulator from its other workers.
"""

import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from palsgd.buffers import Buffers
from palsgd.compression import Codec, Residue
from palsgd.draws import round_stops
from palsgd.interval import Auto, Costs
from palsgd.layout import Bucket, Buckets
from palsgd.ledger import Ledger, Stopwatch
from palsgd.method import Method
from palsgd.replica import Anchor, Replica, digest
from palsgd.roll_call import Attendance, RollCall, check_consensus, check_finite, costs, waiting
from palsgd.sync import Exchange, Flight, land, launch, synchronize
from palsgd.transport import Message, Transport
from palsgd.warmup import GradientSync, average_gradients


class Core:
    _COUNTS = ("gradient_steps", "rounds", "synced", "since_sync", "epoch")

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
        codec: Codec | None = None,
        delay: int = 0,
        auto: Auto | None = None,
    ):
        self.method, self.replica, self.inner, self._outer = method, replica, inner, outer
        self.buffers, self.gradient_sync = buffers, gradient_sync
        self.worker, self.workers = transport.worker, transport.workers
        self._combine = transport.combine
        self.skip_nonfinite, self.max_norm = skip_nonfinite, max_norm
        self.bucket_size, self._codec, self._delay = bucket_size, codec, delay
        self.auto = auto  # None once H is settled
        self.like = torch.empty(0, dtype=replica.dtype, device=replica.device)  # of all messages
        self.scheduler: Any = None
        self.roll_call = RollCall(self.workers, with_costs=auto is not None)
        self.ledger = Ledger()
        self.watch = Stopwatch(self.ledger, replica.device)
        self.exchange_s = 0.0  # how long the last exchange took, waiting included
        self.clock = self.gradient_steps = self.rounds = 0
        self.epoch = 0  # passes over the data that until() has begun, less one
        self.synced = False
        self.started_alike = False  # have plain modules been compared, before their first step?
        self.opened = False  # has the local phase begun, is there an anchor?
        self.end: int | None = None  # the clock at which training ends, with a last sync
        self.origin: tuple[float, int] = (method.warmup_steps, 0)  # a clock, and the round there
        self.flight: Flight | None = None  # the sync that is under way
        self.sent_at = [-1] * self.fragments  # the clock of each fragment's last sync
        self.residues: dict[tuple[int, int], Residue] = {}  # by fragment and message
        self._costs: list[Costs] = []  # of syncs and steps, while H is being measured
        self._sync_s = 0.0  # how long the last sync took
        self._plan: tuple[int, list[bool]] = (-1, [])
        self._storage: Tensor | None = None  # of messages
        self._buckets: dict[tuple[range, int], Buckets] = {}  # in there
        self._departures: Tensor | None = None
        self._gradient_s_then = 0.0  # the ledger's, at the last sync
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

    @property
    def fragments(self) -> int:
        return 1 if self.replica.anchor is None else len(self.replica.anchor.ranges)

    def is_last(self, fragment: int) -> bool:
        """The last fragment ends the round."""
        return fragment == self.fragments - 1

    @property
    def delay(self) -> int:
        """Steps between sending and applying. What is measured is not overlapped."""
        return 0 if self.auto else self._delay

    @property
    def overlapped(self) -> bool:
        return self._delay > 0

    @property
    def lagging(self) -> bool:
        """May local model and anchor differ right after a sync?"""
        return self.fragments > 1 or self.overlapped

    def buckets(self, fragment: int | None = None, *, whole: bool = False) -> Buckets:
        """The messages a fragment, or the model, travels in; with `whole`, a single one of any
        size.

        Their memory is kept between syncs, unless it is larger than a bucket may be and only
        needed for a moment: fresh memory costs page faults, which on a fast link weigh as much
        as the arithmetic.
        """
        layout = self.replica.layout
        part = range(layout.size) if fragment is None else self.anchor.ranges[fragment]
        width = max(1, len(part) if whole else min(self.bucket_size, len(part)))
        extras = self.roll_call.size + len(self.replica.params) + self.buffers.encoded_size
        if self._storage is None or len(self._storage) < width + extras:
            storage = self.like.new_empty(width + extras)
            if width > self.bucket_size and not self.lagging:
                return Buckets(layout, part, width, storage)
            self._storage = storage
            self._buckets.clear()
        if (part, width) not in self._buckets:
            self._buckets[part, width] = Buckets(layout, part, width, self._storage)
        return self._buckets[part, width]

    def departure(self, fragment: int) -> Bucket:
        """Where a fragment that is sent is kept as it was."""
        part = self.anchor.ranges[fragment]
        if self._departures is None or len(self._departures) < len(part):
            self._departures = self.like.new_empty(len(part))
        return Bucket(self.replica.layout, part.start, self._departures[: len(part)])

    def message(self, values: Tensor, exact: int, fragment: int, number: int) -> Message:
        if self._codec is None:
            return Message(values)
        return Message(values, exact, self._codec, self.residues.get((fragment, number)))

    def keep_residues(self, fragment: int, messages: list[Message]) -> None:
        """The sync is through: what its messages left unsent goes with the next ones."""
        for number, message in enumerate(messages):
            if message.left is not None:
                self.residues[fragment, number] = message.left

    def step(self) -> Exchange:
        """Take the gradient at hand, then every step up to the next one that needs a gradient."""
        if self.warming_up:
            yield from self._warmup_step()
        else:
            yield from self.skip_idle_rounds()
            self.synced = False
            if not self.lagging:
                self._tick_head()
            self._gradient_step(self.method.gradient_share)
            yield from self._to_next_gradient(after_gradient=True)
        if not self.opened or self.synced:
            yield from self.skip_idle_rounds()
            self._left_step = self.watch.now()

    def skip_idle_rounds(self) -> Exchange:
        """Tick off what comes before the next gradient, so that it meets the model it is for: a
        sync that failed or was interrupted, rounds that are all mixing. Such a round changes
        nothing here, but its sync does. Also opens the local phase.
        """
        if self.opened:
            yield from self._meet()
        if self.warming_up or self.clock == self.end:
            return
        if not self.opened:
            yield from self._open_local_phase()
        if self.lagging:  # all mixing steps count: the anchor is not where the local model is
            yield from self._to_next_gradient(after_gradient=False)
            return
        while self.clock != self.end and self._mixing_run() == self._next_stop() - self.clock:
            self._tick_head()
            yield from self._meet()

    def _to_next_gradient(self, *, after_gradient: bool) -> Exchange:
        """Mixing steps, and the syncs between them. Without lag, no further than to a sync: the
        clock then stands on a multiple of H, and what follows changes nothing."""
        while True:
            pausing = self.clock == self.end or self._something_is_due()
            run = 0 if pausing else self._mixing_run()
            if run or after_gradient:
                self._local_rule(run)
            after_gradient = False
            if not self._something_is_due():
                return
            yield from self._meet()
            if not self.lagging or self.clock == self.end:
                return

    def _something_is_due(self) -> bool:
        return self._landing_is_due() or bool(self._departing())

    def _landing_is_due(self) -> bool:
        return self.flight is not None and self.clock in (self.flight.due, self.end)

    def _departing(self) -> list[int]:
        """The fragments whose sync belongs to this point of the clock and has not been done."""
        if not self.opened:
            return []
        every, passed = self.method.sync_every, int(self.clock - self.origin[0])
        due = [(f + 1) * every // self.fragments % every for f in range(self.fragments)]
        return [
            f
            for f in range(self.fragments)
            if (self.clock == self.end or passed % every == due[f]) and self.sent_at[f] < self.clock
        ]

    def _meet(self) -> Exchange:
        """Everything that is due at this point of the clock. At the end nothing is left behind."""
        if not self._something_is_due():
            return
        before = self.ledger.syncs
        if self._landing_is_due():
            landing = self.flight.fragment  # type: ignore[union-attr]
            yield from land(self)
            self._synced(landing)
        for fragment in self._departing():
            if self.delay and self.clock != self.end:
                yield from launch(self, fragment)
                self.sent_at[fragment] = self.clock
            else:
                yield from self._timed(synchronize(self, fragment))
                self.sent_at[fragment] = self.clock
                self._synced(fragment)
        self.restart_watch()
        if self.ledger.syncs > before and self.after_exchange is not None:
            self.after_exchange()

    def _timed(self, sync: Exchange) -> Exchange:
        """While H is being measured, seconds must be the device's too."""
        measured = self.auto is not None and self.replica.device.type == "cuda"
        if measured:
            torch.cuda.synchronize()
        began = time.perf_counter()
        yield from sync
        if measured:
            torch.cuda.synchronize()
        self._sync_s = time.perf_counter() - began

    def _synced(self, fragment: int) -> None:
        self.synced = True
        if self.is_last(fragment):
            self.rounds += 1
            if self.auto is not None and self.rounds == self.auto.rounds:
                self._settle_interval(self.auto)

    def _settle_interval(self, auto: Auto) -> None:
        """Choose H, from figures that all workers have seen alike."""
        found = Costs.of(self._costs[1:] or self._costs)
        chosen = auto.choose(
            found,
            fragments=self.fragments,
            delay=self._delay,
            gradient_share=self.method.gradient_share,
        )
        self.origin, self.auto = (self.clock, self.rounds), None
        self.method = replace(self.method, sync_every=chosen)
        self._plan = (-1, [])
        self.ledger.interval = {"sync_every": chosen, "from_clock": self.clock} | asdict(found)

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
        self.count_message((yield Message(attendance)))
        where = f"the start of the local phase (clock {self.clock})"
        check_consensus(self.roll_call.decode(attendance), where)
        self.opened = True
        self.sent_at = [self.clock] * self.fragments
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
            if self._left_step is not None:
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

    def round_of(self, clock: int) -> int:
        return int(clock - self.origin[0]) // self.method.sync_every + self.origin[1]

    def _next_stop(self) -> int:
        """The next point of the clock at which something is due: a fragment to be sent, or to be
        applied, or the end."""
        every = self.method.sync_every
        passed = int(self.clock - self.origin[0])
        start = self.clock - passed % every
        sends = [start + (f + 1) * every // self.fragments for f in range(self.fragments)]
        stops = [stop for stop in sends if stop > self.clock]
        if self.flight is not None and self.flight.due > self.clock:
            stops.append(self.flight.due)
        if self.end is not None and self.end > self.clock:
            stops.append(self.end)
        return min(stops)

    def _mixing_run(self) -> int:
        """How many mixing steps come next, before a gradient step or something that is due."""
        round = self.round_of(self.clock)
        if self._plan[0] != round:
            stops = round_stops(
                sync_every=self.method.sync_every, fragments=self.fragments, delay=self.delay
            )
            self._plan = (round, self.method.plan(worker=self.worker, round=round, stops=stops))
        start = int(self.clock - self.origin[0]) % self.method.sync_every
        if not self._plan[1][start]:
            return 0
        run, longest = 1, self._next_stop() - self.clock
        while run < longest and self._plan[1][start + run]:
            run += 1
        return run

    def attendance(
        self, *, finite: bool, fragment: int | None = None, model: Buckets | None = None
    ) -> Attendance:
        """This worker's line of the roll call; all its ranks, if several, give the same one.

        The digest is that of the anchor, or a fragment of it, or, before there is one, of the
        model, read through its buckets, and the clock.
        """
        if model is None:
            own = self.anchor.digest(fragment)
        else:
            own = self.clock
            for bucket in model.ranges:
                bucket.read(self.replica.local())
                own += digest(bucket.flat)
        whole = torch.tensor([own, not finite], device=self.replica.device)
        self._combine(whole)
        total, broken = whole.tolist()
        return Attendance(
            total & 0xFFFFFFFF, not broken, self.exchange_s, self._sync_s, self._step_s()
        )

    def _step_s(self) -> float:
        """Seconds of a gradient step since the last sync, while that is of interest."""
        if self.auto is None:
            return 0.0
        self.watch.catch_up()
        steps = self.gradient_steps - self.since_sync[1]
        return (self.ledger.gradient_s - self._gradient_s_then) / steps if steps else 0.0

    def judge(self, tail: Tensor, where: str) -> int:
        """Raise unless the sync may go ahead; else how many workers' models are in the mean."""
        attendance = self.roll_call.decode(tail[: self.roll_call.size])
        check_consensus(attendance, where)
        contributors = check_finite(attendance, where, self.skip_nonfinite)
        if self.auto is not None:
            self._costs.append(costs(attendance))
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

    def record_sync(self, fragment: int, distance: float, sent: int) -> None:
        self._gradient_s_then = self.ledger.gradient_s
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
                "fragment": fragment,
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
        return {name: getattr(self, name) for name in self._COUNTS} | {
            "sent_at": list(self.sent_at),
            "sync_every": self.method.sync_every,
            "origin": self.origin,
            "measuring": self.auto is not None,
            "costs": [(c.sync_s, c.step_s) for c in self._costs],
        }

    def resume(self, clock: int, counts: dict[str, Any]) -> None:
        self.clock = clock
        for name in self._COUNTS:
            setattr(self, name, counts[name])
        self.sent_at = list(counts["sent_at"])
        if self.auto is not None:
            self._costs = [Costs(*pair) for pair in counts["costs"]]
            if not counts["measuring"]:
                self.auto, self.origin = None, counts["origin"]
                self.method = replace(self.method, sync_every=counts["sync_every"])
        self._plan = (-1, [])
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

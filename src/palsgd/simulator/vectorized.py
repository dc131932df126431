"""The vectorized engine: the workers of one run, or of many, as one stacked program.

Within a round workers need each other for nothing, so they need not share a clock: the j-th
gradients of the round are computed for all workers at once, whatever steps they belong to, and
mixing steps cost no gradient. With balanced draws all have equally many; otherwise the workers
that have fewer sit out the last ones.
"""

import logging
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from palsgd.buffers import persistent_buffers
from palsgd.errors import NonFiniteError
from palsgd.guard import check_finite
from palsgd.ledger import Ledger
from palsgd.method import Method
from palsgd.methods.palsgd import PALSGDMethod, collapsed
from palsgd.optimizer import LocalOptimizer
from palsgd.simulator.batches import Batches, DryError
from palsgd.simulator.exact import built, check_losses
from palsgd.simulator.lanes import Lanes
from palsgd.simulator.program import (
    CannotVectorizeError,
    LossModule,
    Turn,
    check_plain,
    fastest_convolutions,
    turns_of,
)
from palsgd.simulator.record import Recorder, Watch
from palsgd.simulator.result import Result
from palsgd.simulator.stacked import stacked_optimizer
from palsgd.transports.in_memory import SimulatedTransport

log = logging.getLogger("palsgd")


class Run:
    """One training: its method, clock, anchor, data and records. The workers' own tensors are
    in the lanes."""

    def __init__(
        self,
        model: nn.Module,
        loss: Callable[[nn.Module, Any], Tensor],
        batches: list[Batches],
        method: Callable[[nn.Module], LocalOptimizer],
        recorder: Recorder,
    ):
        self.model, self.batches, self.recorder = model, batches, recorder
        self.workers = len(batches)
        self.opt = built(method, model, SimulatedTransport(0, self.workers, []))
        self.core, self.method = self.opt._core, self.opt.method
        self.module = LossModule(model, loss)
        self.ledgers = [Ledger() for _ in batches]
        self.rounds = 0
        self.error: Exception | None = None  # set when it ends early; the others go on
        self._last: list[Any] = [None] * self.workers
        self.fixed = self._settings_but_lr()
        self._check()
        named: dict[Tensor, str] = {p: name for name, p in self.module.named_parameters()}
        self.names = [named[p] for p in self.core.replica.params]
        kept = {getattr(module, name) for module, name in persistent_buffers(model)}
        self.buffers = {name: b for name, b in self.module.named_buffers() if b in kept}

    def _check(self) -> None:
        if type(self.method) not in (Method, PALSGDMethod):
            raise CannotVectorizeError(f"{type(self.method).__name__} has rules of its own")
        check_plain(self.model, self.opt)
        if any(p.dtype != self.core.replica.dtype for p in self.core.replica.params):
            raise CannotVectorizeError("the model is of lower precision than its anchor")

    def batch(self, worker: int) -> Any:
        """The next batch of a worker; once the run has ended, something of the same shape."""
        if self.error is None or self._last[worker] is None:
            try:
                self._last[worker] = self.batches[worker].next()
            except DryError as dry:
                self.error = dry
                if self._last[worker] is None:
                    raise
        return self._last[worker]

    def _settings_but_lr(self) -> list[dict[str, Any]]:
        free = {"params", "lr", "initial_lr"}
        return [
            {k: v for k, v in group.items() if k not in free}
            for group in self.opt.inner.param_groups
        ]

    def group_of(self) -> list[int]:
        groups = self.core.replica.groups
        return [
            next(g for g, members in enumerate(groups) if i in members)
            for i in range(len(self.core.replica.params))
        ]

    def tick(self, clock: int) -> list[float]:
        """The learning rates at this step of the clock, which then moves on."""
        rates = self.core.replica.learning_rates()
        self.core.clock = clock + 1  # schedules may look at it
        if self.core.scheduler is not None:
            self.core.scheduler.step()
            if self._settings_but_lr() != self.fixed:
                raise ValueError(
                    "the schedule changes more than the learning rate, which stacked workers "
                    "cannot follow; use vectorize=False"
                )
        return rates

    def turns(self, round: int, start: int, length: int) -> list[list[Turn]]:
        """The gradient steps of each worker in (this part of) a round."""
        found = []
        for k, ledger in enumerate(self.ledgers):
            plan = self.method.plan(worker=k, round=round)[start : start + length]
            ledger.mixing_steps += sum(plan)
            found.append(turns_of(plan))
        return found

    def pull(self, worker: int, mixing: list[int], rates: list[list[float]]) -> tuple[float, ...]:
        """The weight of these mixing steps in a row, for each parameter group."""
        assert isinstance(self.method, PALSGDMethod)
        betas = [self.method.betas(rates[tick]) for tick in mixing]
        flat = [beta for step in betas for beta in step]
        self.ledgers[worker].saw_betas(min(flat), max(flat))
        return tuple(collapsed(group) for group in zip(*betas, strict=True))

    def exchanged(self, elements: list[int]) -> None:
        """Count one exchange of messages with so many elements each."""
        for ledger in self.ledgers:
            ledger.messages += len(elements)
            if self.workers > 1:
                ledger.bytes_sent += sum(elements) * self.core.replica.dtype.itemsize

    def warmup_messages(self) -> list[int]:
        return self._messages(len(self.core.replica.params))

    def sync_messages(self) -> list[int]:
        return self._messages(0)

    def _messages(self, more: int) -> list[int]:
        """Elements of each; the first carries the roll call, the buffers and `more`."""
        size, width = self.core.replica.layout.size, self.core.bucket_size
        buckets = [min(width, size - low) for low in range(0, max(1, size), width)]
        extras = self.core.buffers.encoded_size if self.core.buffers.averaged else 0
        buckets[0] += self.core.roll_call.size + extras + more
        return buckets


class Vectorized:
    def __init__(self, runs: list[Run], compiled: bool | str):
        first = runs[0]
        group_of = first.group_of()
        inner, reason = stacked_optimizer(first.opt.inner, group_of)
        if inner is None:
            raise CannotVectorizeError(reason)
        self.runs, self.workers, self.method = runs, first.workers, first.method
        self.lanes = Lanes(
            module=first.module,
            names=first.names,
            rows=[[p.detach() for p in run.core.replica.params] for run in runs],
            buffers={name: [run.buffers[name] for run in runs] for name in first.buffers},
            workers=self.workers,
            inner=inner,
            group_of=group_of,
            compiled=compiled,
        )
        self.clock, self._open = 0, False
        self._losses: list[tuple[list[int], Tensor]] = []  # whose and what, since the last exchange

    def try_gradient(self) -> None:
        self.lanes.try_gradient([source.peek() for run in self.runs for source in run.batches])

    @torch.no_grad()
    def train(self, steps: int) -> None:
        """Until the clock shows `steps`, or no run is left."""
        while self._goes_on(steps) and self.clock < self.method.warmup_steps:
            self._warmup_step()
        if self._goes_on(steps) and not self._open:
            self._open_local_phase()
        while self._goes_on(steps):
            first = int(self.clock - self.method.warmup_steps) % self.method.sync_every
            end = min(steps, self.clock - first + self.method.sync_every)
            self._round(end)
            self._sync()

    def _goes_on(self, steps: int) -> bool:
        return self.clock < steps and any(run.error is None for run in self.runs)

    # -- steps -----------------------------------------------------------------------------------

    def _take_gradients(self, who: list[int]) -> list[Tensor]:
        batches = []
        for lane in who:
            run, k = self._place(lane)
            batches.append(run.batch(k))
            run.ledgers[k].gradient_steps += 1
        grads, losses = self.lanes.gradients(who, batches)
        self._losses.append((who, losses))
        return grads

    def _place(self, lane: int) -> tuple[Run, int]:
        return self.runs[lane // self.workers], lane % self.workers

    def _tick(self) -> list[list[float]]:
        """The learning rates of each run at this step of the clock, which then moves on."""
        rates = [run.tick(self.clock) for run in self.runs]
        self.clock += 1
        return rates

    def _warmup_step(self) -> None:
        rates = self._tick()
        grads = self._take_gradients(list(range(self.lanes.count)))
        self.lanes.update(
            list(range(len(self.runs))),
            grads,
            [list(group) for group in zip(*rates, strict=True)],
            self.runs[0].core.max_norm,
        )
        losses = self._losses_so_far()
        for run, lanes, mine in self._each_run(losses):
            if run.core.buffers.averaged:
                self._average_buffers(lanes, lanes)
            for ledger in run.ledgers:
                ledger.warmup_steps += 1
                ledger.syncs += 1
            run.exchanged(run.warmup_messages())
            self._record(run, mine, [0.0] * self.workers)

    def _open_local_phase(self) -> None:
        self._open = True
        self.lanes.split()
        for run, lanes, _ in self._each_run():
            for view, x in zip(run.core.anchor.views, self.lanes.params, strict=True):
                view.copy_(x[lanes[0]])
            run.exchanged([run.core.roll_call.size])

    def _round(self, end: int) -> None:
        done = int(self.clock - self.method.warmup_steps)
        round, start = divmod(done, self.method.sync_every)
        length = end - self.clock
        rates = [self._tick() for _ in range(length)]
        turns = [each for run in self.runs for each in run.turns(round, start, length)]
        for j in range(max(len(found) for found in turns)):
            who = [lane for lane, found in enumerate(turns) if j < len(found)]
            grads = self._take_gradients(who)
            now = [self._lane_rates(lane, rates[turns[lane][j].tick]) for lane in who]
            columns = [list(group) for group in zip(*now, strict=True)]
            self.lanes.update(who, grads, columns, self.runs[0].core.max_norm)
            self._mix({lane: turns[lane][j].mixing for lane in who}, rates)

    def _lane_rates(self, lane: int, rates: list[list[float]]) -> list[float]:
        run = lane // self.workers
        return [rate / self.runs[run].method.gradient_share for rate in rates[run]]

    def _mix(self, ticks: dict[int, list[int]], rates: list[list[list[float]]]) -> None:
        """Pull the lanes that mix now, those of equal weight together."""
        by_weight: dict[tuple[float, ...], list[int]] = {}
        for lane, mixing in ticks.items():
            if mixing:
                run, k = self._place(lane)
                own = [each[lane // self.workers] for each in rates]
                by_weight.setdefault(run.pull(k, mixing, own), []).append(lane)
        for weights, who in by_weight.items():
            for group, weight in enumerate(weights):
                members = self.runs[0].core.replica.groups[group]
                local = [self.lanes.params[i][lane] for i in members for lane in who]
                anchors = [self._place(lane)[0].core.anchor.views for lane in who]
                torch._foreach_lerp_(
                    local, [views[i] for i in members for views in anchors], weight
                )

    # -- syncs -----------------------------------------------------------------------------------

    def _sync(self) -> None:
        distances = self._distances()
        losses = self._losses_so_far()
        for run, lanes, mine in self._each_run(losses):
            distance = [distances[lane] for lane in lanes]
            try:
                who = self._contributors(run, lanes, mine, distance)
            except NonFiniteError as error:  # its lanes go on, unseen: they touch no others
                run.error = run.error or error
                continue
            self._global_step(run, lanes, who)
            if run.core.buffers.averaged:
                self._average_buffers(lanes, who)
            run.rounds += 1
            for k, ledger in enumerate(run.ledgers):
                ledger.syncs += 1
                ledger.distance = distance[k]
            run.exchanged(run.sync_messages())
            self._record(run, mine, distance)

    def _distances(self) -> list[float]:
        """Of each lane to its anchor, in one transfer from the device."""
        lanes = self.lanes
        squares = torch.zeros(lanes.count, dtype=torch.float64, device=lanes.device)
        for run, own, _ in self._each_run():
            part = slice(own[0], own[-1] + 1)
            for x, a in zip(lanes.params, run.core.anchor.views, strict=True):
                if x.numel():
                    away = (a - x[part]).reshape(len(own), -1)
                    squares[part] += torch.linalg.vector_norm(away, dim=1).double().square()
        return squares.sqrt().tolist()

    def _global_step(self, run: Run, lanes: list[int], who: list[int]) -> None:
        part = slice(lanes[0], lanes[-1] + 1)
        for param, x in zip(run.core.anchor.params, self.lanes.params, strict=True):
            param.grad = (param - (x[part] if who == lanes else x[who])).mean(dim=0)
        run.method.global_rule(run.core.outer)
        for param, x in zip(run.core.anchor.params, self.lanes.params, strict=True):
            param.grad = None
            x[part] = param

    def _contributors(
        self, run: Run, lanes: list[int], losses: list[Tensor], distance: list[float]
    ) -> list[int]:
        """The lanes of a run whose values are finite; an error where that is not all of them,
        unless the method leaves such workers out."""
        finite = torch.tensor(distance).isfinite().tolist()
        if run.core.buffers.averaged:
            for buffer in self.lanes.buffers.values():
                sound = buffer[lanes].reshape(self.workers, -1).isfinite().all(dim=1).tolist()
                finite = [a and b for a, b in zip(finite, sound, strict=True)]
        if not all(finite):
            if not run.core.skip_nonfinite:
                self._check(run, losses)
            lines = [Attendance(0, ok, 0.0) for ok in finite]
            where = f"the sync of round {run.rounds} (clock {self.clock})"
            check_finite(lines, where, run.core.skip_nonfinite)
            for lane, ok in zip(lanes, finite, strict=True):
                if not ok:
                    self.lanes.forget_nonfinite(lane)
        return [lane for lane, ok in zip(lanes, finite, strict=True) if ok]

    def _average_buffers(self, lanes: list[int], who: list[int]) -> None:
        """Floats by their mean over `who`, integers by worker 0's."""
        for buffer in self.lanes.buffers.values():
            floating = buffer.is_floating_point()
            buffer[lanes] = buffer[who].mean(dim=0) if floating else buffer[lanes[0]].clone()

    # -- bookkeeping -----------------------------------------------------------------------------

    def _each_run(
        self, losses: list[Tensor] | None = None
    ) -> list[tuple[Run, list[int], list[Tensor]]]:
        """Runs with their lanes, and those lanes' part of `losses`."""
        found = []
        for r, run in enumerate(self.runs):
            lanes = list(range(r * self.workers, (r + 1) * self.workers))
            found.append((run, lanes, losses[lanes[0] : lanes[-1] + 1] if losses else []))
        return found

    def _losses_so_far(self) -> list[Tensor]:
        """Of each lane since the last exchange, in one transfer from the device."""
        taken, self._losses = self._losses, []
        if not taken:
            return [torch.zeros(0)] * self.lanes.count
        flat = torch.cat([losses for _, losses in taken]).double().cpu()
        owner = torch.tensor([lane for who, _ in taken for lane in who])
        order = owner.argsort(stable=True)
        counts = owner.bincount(minlength=self.lanes.count).tolist()
        return list(flat[order].split(counts))

    def _check(self, run: Run, losses: list[Tensor]) -> None:
        totals = [ledger.gradient_steps for ledger in run.ledgers]
        check_losses(losses, totals, list(range(self.workers)))

    def _record(self, run: Run, losses: list[Tensor], distance: list[float]) -> None:
        if not run.core.skip_nonfinite:
            try:
                self._check(run, losses)
            except NonFiniteError as error:
                run.error = run.error or error
        if run.error is not None:
            return
        run.recorder.add(
            clock=self.clock,
            round=run.rounds,
            losses=[float(found.mean()) for found in losses],
            distance=distance,
            ledger=run.ledgers[0],
            metric=run.recorder.metric(self.clock, lambda: self.show(run)),
        )

    def show(self, run: Run) -> Any:
        """The model of a run with worker 0's weights and buffers, which right after a sync are
        the global ones."""
        lane = self.runs.index(run) * self.workers
        row = lane // self.workers if self.lanes.shared else lane
        with torch.no_grad():
            for param, x in zip(run.core.replica.params, self.lanes.params, strict=True):
                param.copy_(x[row])
            for name, buffer in run.buffers.items():
                buffer.copy_(self.lanes.buffers[name][lane])
        return nullcontext(run.model)


def alike(runs: list[Run]) -> list[list[Run]]:
    """Runs that fit into one program each: shapes, rounds and inner optimizers must be equal;
    learning rates, p, eta, seeds and outer optimizers are each run's own."""
    groups: list[list[Run]] = []
    for run in runs:
        mates = next((group for group in groups if not _difference(group[0], run)), None)
        if mates is None:
            groups.append([run])
        else:
            mates.append(run)
    if len(groups) > 1:
        log.warning(
            "palsgd.simulate_many: %d programs, because runs differ in %s",
            len(groups),
            _difference(groups[0][0], groups[1][0]),
        )
    return groups


def _difference(first: Run, other: Run) -> str:
    """What keeps two runs from sharing a program; empty if nothing does."""
    mine, theirs = _shape_of(first), _shape_of(other)
    for name in mine:
        if mine[name] != theirs[name]:
            return f"{name} ({mine[name]} and {theirs[name]})"
    for name, x in _constants(first).items():
        if not torch.equal(x, _constants(other)[name]):
            return f"{name}, which is not trained"
    return ""


def _shape_of(run: Run) -> dict[str, Any]:
    core, inner = run.core, run.opt.inner
    return {
        "workers": run.workers,
        "sync_every": run.method.sync_every,
        "warmup_steps": run.method.warmup_steps,
        "max_norm": core.max_norm,
        "inner optimizer": type(inner).__name__,
        "inner settings": run.fixed,
        "parameter groups": core.replica.groups,
        "parameters": [
            (name, tuple(p.shape)) for name, p in zip(run.names, core.replica.params, strict=True)
        ],
    }


def _constants(run: Run) -> dict[str, Tensor]:
    varied = {*run.names, *run.buffers}
    everything = [*run.module.named_parameters(), *run.module.named_buffers()]
    return {name: x for name, x in everything if name not in varied}


def run_vectorized(engine: Vectorized, steps: int) -> list[Result]:
    watch = Watch()
    for run in engine.runs:
        run.recorder.begin(steps, watch)
    with fastest_convolutions():
        engine.train(steps)
    for run in engine.runs:
        run.recorder.end()
        engine.show(run)
    return [
        Result(
            model=run.model,
            engine="vectorized",
            history=run.recorder.history,
            ledgers=run.ledgers,
            error=run.error,
        )
        for run in engine.runs
    ]

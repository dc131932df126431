"""The vectorized engine: K workers as one stacked program.

Within a round workers need each other for nothing, so they need not share a clock: the j-th
gradients of the round are computed for all workers at once, whatever steps they belong to, and
mixing steps cost no gradient. With balanced draws all have equally many; otherwise the workers
that have fewer sit out the last ones.
"""

import copy
import logging
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad_and_value, vmap

from palsgd.buffers import persistent_buffers
from palsgd.ledger import Ledger
from palsgd.method import Method
from palsgd.optimizer import LocalOptimizer
from palsgd.pseudo_async import PseudoAsync, collapsed
from palsgd.roll_call import Attendance, check_finite
from palsgd.simulator.batches import Batches, moved
from palsgd.simulator.exact import SimulatedTransport, built, check_losses
from palsgd.simulator.program import (
    CannotVectorizeError,
    LossModule,
    UnequalBatchesError,
    as_it_is,
    check_plain,
    clip_each_,
    fastest_convolutions,
    first_line,
    stacked_batch,
    turns_of,
)
from palsgd.simulator.record import Recorder
from palsgd.simulator.result import Result
from palsgd.simulator.stacked import Step, stacked_optimizer

log = logging.getLogger("palsgd")


class Vectorized:
    def __init__(
        self,
        model: nn.Module,
        workers: int,
        loss: Callable[[nn.Module, Any], Tensor],
        batches: list[Batches],
        method: Callable[[nn.Module], LocalOptimizer],
        compiled: bool,
    ):
        self.opt = built(method, model, SimulatedTransport(0, workers, []))
        self.model, self.workers, self._module = model, workers, LossModule(model, loss)
        self.core, self.method = self.opt._core, self.opt.method
        if type(self.method) not in (Method, PseudoAsync):
            raise CannotVectorizeError(f"{type(self.method).__name__} has rules of its own")
        params = self.core.replica.params
        check_plain(model, self.opt)
        if any(p.dtype != self.core.replica.dtype for p in params):
            raise CannotVectorizeError("the model is of lower precision than its anchor")
        group_of = [self._group_of(i) for i in range(len(params))]
        inner, reason = stacked_optimizer(self.opt.inner, group_of)
        if inner is None:
            raise CannotVectorizeError(reason)
        self._inner = inner
        self._batches = batches
        names: dict[Tensor, str] = {p: name for name, p in self._module.named_parameters()}
        self._names = [names[p] for p in params]
        # One copy as long as all workers are equal (warm-up, DDP); K from the switch on.
        self.params = [p.detach()[None].clone() for p in params]
        self.state = [
            self._inner.new_state(x, group) for x, group in zip(self.params, group_of, strict=True)
        ]
        kept = {getattr(module, name) for module, name in persistent_buffers(model)}
        named = list(self._module.named_buffers())
        self._buffer_names = [name for name, b in named if b in kept]
        self.buffers = [b.expand(workers, *b.shape).clone() for _, b in named if b in kept]
        held = {id(p) for p in params}
        self._constant = {n: b for n, b in named if b not in kept} | {
            n: p.detach() for n, p in self._module.named_parameters() if id(p) not in held
        }
        self.ledgers = [Ledger() for _ in range(workers)]
        self._columns: dict[tuple[float, ...], Tensor] = {}
        self._programs(compiled)
        self.clock = self.rounds = 0
        self._losses: list[tuple[list[int], Tensor]] = []  # who and what, since the last exchange

    def _group_of(self, i: int) -> int:
        return next(g for g, members in enumerate(self.core.replica.groups) if i in members)

    # -- gradients -------------------------------------------------------------------------------

    def try_gradient(self) -> None:
        """Raise CannotVectorizeError if this model cannot be stacked; nothing changes."""
        saved = [b.clone() for b in self.buffers]
        try:
            batches = [source.peek() for source in self._batches]
            try:
                self._gradients(list(range(self.workers)), batches)
            except RuntimeError as error:
                if not self._compiled:
                    raise
                log.warning("palsgd.simulate: not compiled, because %s", first_line(error))
                self._programs(compiled=False)
                self._gradients(list(range(self.workers)), batches)
            self._compare_with_backward(batches[0])
        except (RuntimeError, TypeError, ValueError, IndexError) as error:
            raise CannotVectorizeError(f"vmap says: {first_line(error)}") from error
        finally:
            for buffer, old in zip(self.buffers, saved, strict=True):
                buffer.copy_(old)

    def _gradients(self, who: list[int], batches: list[Any]) -> tuple[list[Tensor], Tensor]:
        """Gradients and losses of the workers in `who`, stacked."""
        if len(self.params[0]) == 1:  # one copy of the weights, a batch for each worker
            one = [x[0] for x in self.params]
            return self._run(self._shared_weights, one, self.buffers, batches)
        if len(who) == self.workers:
            return self._run(self._own_weights, self.params, self.buffers, batches)
        buffers = [b[who] for b in self.buffers]
        found = self._run(self._some_workers, [x[who] for x in self.params], buffers, batches)
        for buffer, part in zip(self.buffers, buffers, strict=True):
            buffer[who] = part
        return found

    def _one_gradient(self, k: int, batch: Any) -> tuple[list[Tensor], Tensor]:
        own = 0 if len(self.params[0]) == 1 else k
        params, buffers = (
            [x[own : own + 1] for x in self.params],
            [b[k : k + 1] for b in self.buffers],
        )
        return self._run(self._some_workers, params, buffers, [batch])

    def _compare_with_backward(self, batch: Any) -> None:
        """Refuse a model whose stacked program is not what backward() computes: an unused
        parameter (no gradient is not a zero one), or one that the module reaches by another way."""
        first, second = self._plain_gradients(batch), self._plain_gradients(batch)
        grads, _ = self._one_gradient(0, batch)
        largest = max(float(a.norm()) for a in first)
        for name, a, b, g in zip(self._names, first, second, grads, strict=True):
            # What repeats bit for bit has no dropout; a norm far below the largest is rounding.
            difference = float((a - g[0]).norm())
            if torch.equal(a, b) and difference > 0.05 * float(a.norm()) + 1e-4 * largest:
                raise ValueError(f"the stacked gradient of {name} is not that of backward()")

    def _plain_gradients(self, batch: Any) -> list[Tensor]:
        module = copy.deepcopy(self._module)
        with torch.enable_grad():
            module(moved(batch, self.params[0].device)).backward()
        found = {name: p.grad for name, p in module.named_parameters()}
        missing = [name for name in self._names if found[name] is None]
        if missing:
            raise ValueError(f"{missing[0]} gets no gradient")
        return [found[name] for name in self._names]  # type: ignore[misc]

    def _run(
        self, program: Callable, params: list[Tensor], buffers: list[Tensor], batches: list[Any]
    ) -> tuple[list[Tensor], Tensor]:
        batch = moved(stacked_batch(batches), self.params[0].device)
        grads, losses = program(params, buffers, batch)
        return list(grads), losses.detach()

    def _programs(self, compiled: bool) -> None:
        """The stacked programs. Only those that always run on all workers are compiled: a set of
        workers of another size would be another program."""
        self._compiled = compiled
        run = grad_and_value(self._loss_of)
        own = vmap(run, in_dims=(0, 0, 0), randomness="different")
        shared = vmap(run, in_dims=(None, 0, 0), randomness="different")
        build = torch.compile if compiled else as_it_is
        self._own_weights, self._shared_weights = build(own), build(shared)
        self._some_workers = own
        self._step_all: Step = build(self._inner.step)

    def _loss_of(self, trained: list[Tensor], held: list[Tensor], batch: Any) -> Tensor:
        weights = dict(zip(self._names, trained, strict=True))
        states = dict(zip(self._buffer_names, held, strict=True))
        loss = functional_call(self._module, (weights, states, self._constant), (batch,))
        return loss.reshape(()) if loss.numel() == 1 else loss

    def _take_gradients(self, who: list[int]) -> list[Tensor]:
        batches = [self._batches[k].next() for k in who]
        try:
            grads, losses = self._gradients(who, batches)
        except UnequalBatchesError:  # the last ones of an epoch, say: one worker after another
            found = [self._one_gradient(k, batch) for k, batch in zip(who, batches, strict=True)]
            grads = [torch.cat(parts) for parts in zip(*(g for g, _ in found), strict=True)]
            losses = torch.cat([loss for _, loss in found])
        self._losses.append((who, losses))
        for k in who:
            self.ledgers[k].gradient_steps += 1
        return grads

    def _update(self, who: list[int], grads: list[Tensor], rates: list[list[float]]) -> None:
        """One inner step of the workers in `who`; `rates[g]` has their learning rates."""
        if self.core.max_norm is not None:
            clip_each_(grads, self.core.max_norm)
        columns = [self._column(group) for group in rates]
        if len(who) == len(self.params[0]):
            self._step_all(self.params, grads, columns, self.state)
            return
        params = [x[who] for x in self.params]
        state = [[s[who] for s in kept] for kept in self.state]
        self._inner.step(params, grads, columns, state)
        for x, part in zip(self.params, params, strict=True):
            x[who] = part
        for kept, parts in zip(self.state, state, strict=True):
            for s, part in zip(kept, parts, strict=True):
                s[who] = part

    def _column(self, rates: list[float]) -> Tensor:
        """Learning rates on the device; most rounds use the same few again and again."""
        key = tuple(rates)
        if key not in self._columns:
            if len(self._columns) > 256:
                self._columns.clear()
            device = self.params[0].device
            self._columns[key] = torch.tensor(rates, dtype=torch.float64, device=device)
        return self._columns[key]

    # -- training --------------------------------------------------------------------------------

    @torch.no_grad()
    def train(self, steps: int, recorder: Recorder) -> None:
        while self.clock < steps and self.clock < self.method.warmup_steps:
            self._warmup_step(recorder)
        if self.clock < steps:
            self._open()
        while self.clock < steps:
            first = int(self.clock - self.method.warmup_steps) % self.method.sync_every
            end = min(steps, self.clock - first + self.method.sync_every)
            self._round(end)
            self._sync(recorder)

    def _warmup_step(self, recorder: Recorder) -> None:
        rates = self._tick()
        everyone = list(range(self.workers))
        with torch.enable_grad():
            grads = self._take_gradients(everyone)
        self._update([0], [g.mean(dim=0, keepdim=True) for g in grads], [[rate] for rate in rates])
        if self.core.buffers.averaged:
            self._average_buffers(everyone)
        layout, core = self.core.replica.layout, self.core
        extras = core.buffers.encoded_size if core.buffers.averaged else 0
        elements = layout.size + len(core.replica.params) + core.roll_call.size + extras
        for ledger in self.ledgers:
            ledger.warmup_steps += 1
            ledger.syncs += 1
            self._count_messages(ledger, elements)
        self._record(recorder, [0.0] * self.workers)

    def _open(self) -> None:
        """From here on each worker has weights and inner state of its own."""
        if len(self.params[0]) != self.workers:
            self.params = [x.repeat(self.workers, *[1] * (x.dim() - 1)) for x in self.params]
            self.state = [
                [s.repeat(self.workers, *[1] * (s.dim() - 1)) for s in kept] for kept in self.state
            ]
        for view, x in zip(self.core.anchor.views, self.params, strict=True):
            view.copy_(x[0])
        for ledger in self.ledgers:
            self._count_messages(ledger, self.core.roll_call.size)

    def _round(self, end: int) -> None:
        round = int(self.clock - self.method.warmup_steps) // self.method.sync_every
        start = int(self.clock - self.method.warmup_steps) % self.method.sync_every
        length = end - self.clock
        rates = [self._tick() for _ in range(length)]
        turns = []
        for k in range(self.workers):
            plan = self.method.plan(worker=k, round=round)[start : start + length]
            self.ledgers[k].mixing_steps += sum(plan)
            turns.append(turns_of(plan))
        for j in range(max(len(found) for found in turns)):
            who = [k for k, found in enumerate(turns) if j < len(found)]
            with torch.enable_grad():
                grads = self._take_gradients(who)
            share = self.method.gradient_share
            now = [rates[turns[k][j].tick] for k in who]
            self._update(
                who, grads, [[rate / share for rate in group] for group in zip(*now, strict=True)]
            )
            self._mix({k: turns[k][j].mixing for k in who}, rates)

    def _mix(self, ticks: dict[int, list[int]], rates: list[list[float]]) -> None:
        """Pull the workers that mix now, those of equal weight together."""
        assert not any(ticks.values()) or isinstance(self.method, PseudoAsync)
        alike: dict[tuple[float, ...], list[int]] = {}
        for k, mixing in ticks.items():
            if mixing:
                betas = [self.method.betas(rates[tick]) for tick in mixing]  # type: ignore[attr-defined]
                flat = [beta for step in betas for beta in step]
                self.ledgers[k].saw_betas(min(flat), max(flat))
                weights = tuple(collapsed(group) for group in zip(*betas, strict=True))
                alike.setdefault(weights, []).append(k)
        for weights, who in alike.items():
            for group, weight in enumerate(weights):
                members = self.core.replica.groups[group]
                local = [self.params[i][k] for i in members for k in who]
                anchor = [self.core.anchor.views[i] for i in members for _ in who]
                torch._foreach_lerp_(local, anchor, weight)

    def _sync(self, recorder: Recorder) -> None:
        squares = torch.zeros(self.workers, dtype=torch.float64, device=self.params[0].device)
        for x, a in zip(self.params, self.core.anchor.views, strict=True):
            if x.numel():
                squares += (
                    torch.linalg.vector_norm((a - x).reshape(len(x), -1), dim=1).double().square()
                )
        distance = squares.sqrt().tolist()
        who = self._contributors(distance)
        for param, x in zip(self.core.anchor.params, self.params, strict=True):
            part = x if len(who) == self.workers else x[who]
            param.grad = (param - part).mean(dim=0)
        self.method.global_rule(self.core.outer)
        for param, x in zip(self.core.anchor.params, self.params, strict=True):
            param.grad = None
            x.copy_(param.expand_as(x))
        if self.core.buffers.averaged:
            self._average_buffers(who)
        self.rounds += 1
        core = self.core
        extras = core.buffers.encoded_size if core.buffers.averaged else 0
        for k, ledger in enumerate(self.ledgers):
            ledger.syncs += 1
            ledger.distance = distance[k]
            for number, bucket in enumerate(self._bucket_sizes()):
                self._count_messages(
                    ledger, bucket + (core.roll_call.size + extras) * (number == 0)
                )
        self._record(recorder, distance)

    def _contributors(self, distance: list[float]) -> list[int]:
        finite = torch.tensor(distance).isfinite().tolist()
        if self.core.buffers.averaged:
            for buffer in self.buffers:
                sound = buffer.reshape(self.workers, -1).isfinite().all(dim=1).tolist()
                finite = [a and b for a, b in zip(finite, sound, strict=True)]
        if not all(finite):
            if not self.core.skip_nonfinite:
                self._check(self._losses_so_far())
            lines = [Attendance(0, ok, 0.0) for ok in finite]
            where = f"the sync of round {self.rounds} (clock {self.clock})"
            check_finite(lines, where, self.core.skip_nonfinite)
            self._forget_nonfinite([k for k, ok in enumerate(finite) if not ok])
        return [k for k, ok in enumerate(finite) if ok]

    def _forget_nonfinite(self, broken: list[int]) -> None:
        """As the exact engine: a parameter's state starts anew where it holds inf or nan."""
        for kept in self.state:
            for k in broken:
                if not all(bool(s[k].isfinite().all()) for s in kept):
                    for s in kept:
                        s[k] = 0

    def _average_buffers(self, who: list[int]) -> None:
        """Floats by their mean over `who`, integers by worker 0's."""
        for buffer in self.buffers:
            mean = buffer[who].mean(dim=0) if buffer.is_floating_point() else buffer[0].clone()
            buffer.copy_(mean.expand_as(buffer))

    # -- bookkeeping -----------------------------------------------------------------------------

    def _tick(self) -> list[float]:
        """The learning rates at this step of the clock, which then moves on."""
        rates = self.core.replica.learning_rates()
        self.clock += 1
        self.core.clock = self.clock  # schedules may look at it
        if self.core.scheduler is not None:
            self.core.scheduler.step()
        return rates

    def _bucket_sizes(self) -> list[int]:
        size, width = self.core.replica.layout.size, self.core.bucket_size
        return [min(width, size - low) for low in range(0, max(1, size), width)]

    def _count_messages(self, ledger: Ledger, elements: int) -> None:
        ledger.messages += 1
        if self.workers > 1:
            ledger.bytes_sent += elements * self.core.replica.dtype.itemsize

    def _losses_so_far(self) -> list[Tensor]:
        """Of each worker since the last exchange, in one transfer from the device."""
        if not self._losses:
            return [torch.zeros(0)] * self.workers
        flat = torch.cat([losses.reshape(-1) for _, losses in self._losses]).double().cpu()
        owner = torch.tensor([k for who, _ in self._losses for k in who])
        return [flat[owner == k] for k in range(self.workers)]

    def _check(self, losses: list[Tensor]) -> None:
        totals = [ledger.gradient_steps for ledger in self.ledgers]
        check_losses(losses, totals, list(range(self.workers)))

    def _record(self, recorder: Recorder, distance: list[float]) -> None:
        losses = self._losses_so_far()
        if not self.core.skip_nonfinite:
            self._check(losses)
        self._losses.clear()
        recorder.add(
            clock=self.clock,
            round=self.rounds,
            losses=[float(found.mean()) for found in losses],
            distance=distance,
            bytes_sent=self.ledgers[0].bytes_sent,
            metric=recorder.metric(self.clock, self.show),
        )

    def show(self) -> Any:
        """The model with worker 0's weights and buffers, which right after a sync are the
        global ones."""
        with torch.no_grad():
            for param, x in zip(self.core.replica.params, self.params, strict=True):
                param.copy_(x[0])
            named = dict(self._module.named_buffers())
            for name, b in zip(self._buffer_names, self.buffers, strict=True):
                named[name].copy_(b[0])
        return nullcontext(self.model)


def run_vectorized(engine: Vectorized, steps: int, recorder: Recorder) -> Result:
    recorder.begin(steps)
    with fastest_convolutions():
        engine.train(steps, recorder)
    recorder.end()
    engine.show()
    return Result(
        model=engine.model, engine="vectorized", history=recorder.history, ledgers=engine.ledgers
    )

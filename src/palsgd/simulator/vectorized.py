"""The vectorized engine: the workers of one run, or of many, as one stacked program.

Between two exchanges no worker needs another, so the workers need not have the same clock. The j-th
gradients of such a stretch are computed for all workers at once, whatever their clocks. Steps
without data compute no gradient. With balanced draws all workers have equally many gradients in a
stretch; otherwise the last gradients are computed for fewer workers.
"""

import logging
import math
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from palsgd.digest import row_digests
from palsgd.errors import NonFiniteError
from palsgd.finite import all_finite
from palsgd.guard import nonfinite_step
from palsgd.schedule import Schedule
from palsgd.simulator.exact import check_losses, own_randomness, seeded
from palsgd.simulator.history import Recorder, Watch
from palsgd.simulator.result import Result
from palsgd.simulator.run import Rules, Run
from palsgd.simulator.saved import cloned, load_optimizer, optimizer_state
from palsgd.simulator.stack import StackedWorkers
from palsgd.simulator.stacked_optimizers import stacked_optimizer
from palsgd.simulator.stacked_rules import StackedRules
from palsgd.simulator.stacking_checks import (
    CannotVectorizeError,
    LoopIsFasterError,
    clipped,
    fastest_convolutions,
    joined_batch,
    writable,
)
from palsgd.simulator.stretch import GradientSlot, RunStretch, TickRates
from palsgd.simulator.warm_start import CommonWarmUp, WarmUp, is_wanted, known_warmups
from palsgd.simulator.workerwise_rules import WorkerwiseRules

log = logging.getLogger("palsgd")

Losses = list[Tensor]  # of each worker, in their order
# What torch.compile takes, in seconds, and the share of a step that it saves, on an H200.
COMPILE_S, COMPILE_S_PER_PARAMETER, COMPILE_SAVES = 15.0, 0.35, 0.3


class Trial(NamedTuple):
    unfolded: int  # the most channels of convolutions that are computed from patches
    took: float  # seconds of a gradient of all workers
    loop: float  # of the same, one worker after another


_tried: dict[tuple[Any, ...], Trial] = {}  # by the likeness of stacks


class Member(NamedTuple):
    """A run of the program, with its number and the number of its first worker in the stack."""

    run: Run
    number: int

    @property
    def first(self) -> int:
        return self.number * self.run.workers

    @property
    def rules(self) -> Rules:
        assert self.run.rules is not None
        return self.run.rules

    def part(self, everyone: list[Any]) -> list[Any]:
        """This run's part of a list over all workers of all runs."""
        return everyone[self.first : self.first + self.run.workers]


class Vectorized:
    """Runs that share one stacked program, up to the clock `steps`. `seed` is that of the random
    numbers that they share."""

    name = "vectorized"

    def __init__(
        self,
        runs: list[Run],
        *,
        steps: int,
        seed: int = 0,
        warmups: list[CommonWarmUp | None] | None = None,
    ):
        """`warmups`: what each run shares with others."""
        first = runs[0]
        inner, reason = stacked_optimizer(first.opt.inner, first.group_of)
        if inner is None:
            raise CannotVectorizeError(reason)
        self.runs, self.workers = runs, first.workers
        self._warmups = warmups or [None] * len(runs)
        self._known = known_warmups(self._warmups)  # before training, so that nobody is surprised
        self.stack = StackedWorkers(
            module=first.module,
            names=first.names,
            rows=[[p.detach() for p in run.replica.params] for run in runs],
            buffers={name: [run.buffers[name] for run in runs] for name in first.buffers},
            workers=self.workers,
            inner=inner,
            group_of=first.group_of,
        )
        self.clock, self.steps, self._open = 0, steps, False
        self._rng, self._watch = seeded(seed, self.stack.device), Watch()
        for run in runs:
            run.recorder.watch = self._watch
        for run in runs[1:]:  # the runs share a clock, so one bar is enough
            run.recorder.bar = False
        self._pauses = False  # after this exchange?
        self._max_norm = first.worker.inner.max_norm
        # the workers and their losses, since the last record
        self._losses: list[tuple[list[int], Tensor]] = []

    @property
    def schedule(self) -> Schedule:
        """The schedule, which all runs of one program have in common."""
        return self.runs[0].schedule

    def try_gradient(self) -> None:
        self.stack.try_gradient(self._first_batches())

    def choose_program(self, *, compile: bool | str | None, against_loop: bool) -> None:
        """Choose, on a GPU by trying, how gradients are computed. `compile`: as for `simulate`.
        `against_loop`: raise LoopIsFasterError where one worker after another is faster. Compiling
        takes up to minutes, so it comes last."""
        batches, took = self._first_batches(), 0.0
        if self.stack.device.type == "cuda":
            took = self._choose_by_time(batches, against_loop, compiled=bool(compile))
        if compile is None:
            pays = self._compiling_pays(took)
            self.stack.compile(any(pays.values()), **pays)
        elif compile:
            self.stack.compile(compile)
            self.stack.try_compiled(batches)

    def _choose_by_time(self, batches: list[Any], against_loop: bool, compiled: bool) -> float:
        """The seconds of a gradient of all workers. `compiled`: will it be? Stacks alike are tried
        once in a process, as a sweep has many of them."""
        alike = (*self.stack.likeness(batches), against_loop)
        if alike not in _tried:
            with fastest_convolutions(), torch.no_grad():
                took = self.stack.choose_convolutions(batches)
                # Workers one after another replay graphs where stacked ones are compiled.
                loop = self.stack.loop_seconds(batches, compiled) if against_loop else math.inf
            if math.isfinite(took):  # memory that is short now may be there the next time
                _tried[alike] = Trial(self.stack.unfolded, took, loop)
        else:
            unfolded, took, loop = _tried[alike]
            self.stack.unfold(unfolded)
        stacked = took * (1 - COMPILE_SAVES if compiled else 1)
        if loop < stacked:
            raise LoopIsFasterError(
                f"a gradient of every worker takes {1e3 * loop:.1f} ms one after another, and "
                f"{1e3 * stacked:.1f} ms stacked{', by estimate, if compiled' if compiled else ''}"
            )
        return took

    def _compiling_pays(self, took: float) -> dict[str, bool]:
        cost = COMPILE_S + COMPILE_S_PER_PARAMETER * len(self.stack.params)
        # steps in which workers share a row
        shared = min(self.schedule.warmup, self.steps)
        known = self._known[0].steps if self._known else 0
        counts = {"shared": shared - known, "own": self.steps - shared}
        return {rows: COMPILE_SAVES * took * n > cost for rows, n in counts.items()}

    def _first_batches(self) -> list[Any]:
        return [source.peek() for run in self.runs for source in run.batches]

    @property
    def recorders(self) -> list[Recorder]:
        return [run.recorder for run in self.runs]

    def advance(self) -> bool:
        """Train up to the next pause. Returns whether there was one; False: the clock shows `steps`
        or every run has ended."""
        for run in self.runs:
            run.end_at(self.steps)
        self.start_warm()
        with (
            own_randomness(self._rng),
            self._watch.running(),
            fastest_convolutions(),
            torch.no_grad(),
        ):
            while self._goes_on():
                self._pauses = False
                self._to_next_exchange()
                if self._pauses:
                    return True
        return False

    @property
    def starts_warm(self) -> bool:
        return bool(self._known)

    def start_warm(self) -> None:
        """Go to the end of the warm-ups that are known, before training."""
        for number, warmup in enumerate(self._known if self.clock == 0 else []):
            warmup.give(self.runs[number], number, self.stack)
            self.clock = warmup.steps
            self._watch.set(warmup.seconds)
            self._rng.update(warmup.rng)

    def _keep_warmup(self, member: Member) -> None:
        shared = self._warmups[member.number]
        if shared is not None and is_wanted(shared, member.run, self.clock):
            shared.leave(WarmUp.of(member.run, member.number, self.stack))

    def _goes_on(self) -> bool:
        return self.clock < self.steps and any(run.error is None for run in self.runs)

    def _to_next_exchange(self) -> None:
        if self.schedule.warms_up(self.clock):
            self._warmup_step()
        else:
            self._open_local_phase()
            self._stretch(self.schedule.next_due(self.clock))
            self._exchange()

    def _members(self) -> Iterator[Member]:
        """The runs that have not ended."""
        for number, run in enumerate(self.runs):
            if run.error is None:
                yield Member(run, number)

    # -- steps -----------------------------------------------------------------------------------

    def _take_gradients(self, who: list[int]) -> list[Tensor]:
        if len(who) == self.stack.count and all(run.has_joint_batch for run in self.runs):
            joint = joined_batch([run.joint_batch() for run in self.runs])
            grads, losses = self.stack.gradients_of(who, joint)
        else:
            places = [divmod(worker, self.workers) for worker in who]
            batches = [self.runs[run].batch(k) for run, k in places]
            grads, losses = self.stack.gradients(who, batches)
        self._losses.append((who, losses))
        return grads if self._max_norm is None else clipped(grads, self._max_norm)

    def _tick(self) -> list[list[float]]:
        """Advance the clock by one step. Returns the learning rates of each run at that step."""
        rates = [run.tick(self.clock) for run in self.runs]
        self.clock += 1
        return rates

    def _warmup_step(self) -> None:
        rates = self._tick()
        grads = self._take_gradients(list(range(self.stack.count)))
        losses, sound = self._losses_so_far(), self._sound_runs(grads)
        self._step_runs([run for run, may in enumerate(sound) if may], grads, rates)
        for member in self._members():
            run, where = member.run, f"a step of the warm-up (clock {self.clock - 1})"
            if not sound[member.number] and not run.skips_nonfinite:
                averaged = "the averaged gradient of all workers"
                run.error = self._loss_error(member, losses) or nonfinite_step(averaged, where)
                continue
            if run.opt.config["buffers"] == "average":
                self._average_buffers(member)
            run.warmed_up(self.clock, skipped=not sound[member.number])
            self._record(member, losses, [0.0] * self.workers)
            self._keep_warmup(member)

    def _sound_runs(self, grads: list[Tensor]) -> list[bool]:
        """For each run, whether its averaged gradient and the buffers of its workers are finite."""
        averaged = [self._statistics(Member(run, n)) for n, run in enumerate(self.runs)]
        if all_finite([*grads, *(x for own in averaged for x in own)]):
            return [True] * len(self.runs)
        return [all_finite([*(g[n] for g in grads), *own]) for n, own in enumerate(averaged)]

    def _step_runs(self, who: list[int], grads: list[Tensor], rates: list[list[float]]) -> None:
        """The inner step of some runs, whose workers share one row."""
        if who:
            some = grads if len(who) == len(self.runs) else [g[who] for g in grads]
            columns = zip(*(rates[run] for run in who), strict=True)
            self.stack.step(who, some, [list(group) for group in columns])

    def _statistics(self, member: Member) -> list[Tensor]:
        """The rows of the floating-point buffers that this run's workers average."""
        if member.run.opt.config["buffers"] != "average":
            return []
        found = [self.stack.buffers[name] for name in member.run.statistics]
        return [buffer[member.first : member.first + self.workers] for buffer in found]

    def _average_buffers(self, member: Member) -> None:
        """Set statistics to their mean over the workers whose statistics are all finite, and
        integer buffers to worker 0's."""
        floats = self._statistics(member)
        sound = [k for k in range(self.workers) if all_finite(own[k] for own in floats)]
        for own in floats if sound else []:
            own.copy_(own[sound].mean(dim=0))
        for buffer in self.stack.buffers.values():
            if sound and not buffer.is_floating_point():
                own = buffer[member.first : member.first + self.workers]
                own.copy_(own[0].clone())

    def _open_local_phase(self) -> None:
        """Give each worker a model of its own."""
        if self._open:
            return
        self._open = True
        self.stack.split()
        for member in self._members():
            self._make_rules(member)
            member.rules.open_local_phase()

    def _make_rules(self, member: Member) -> None:
        kind = WorkerwiseRules if member.run.apart else StackedRules
        member.run.rules = kind(member.run, self.stack, member.first)

    def _stretch(self, end: int) -> None:
        """Take all steps up to an exchange."""
        start = self.clock
        stretches = [run.stretches(start, end) for run in self.runs]
        pairs = zip(stretches, self._rates_until(end), strict=True)
        steps = [RunStretch(start, *pair) for pair in pairs]
        everyone = [stretch for of_run in stretches for stretch in of_run]
        for member in self._members():
            member.rules.run_head(steps[member.number])
        for j in range(max(len(stretch.slots) for stretch in everyone)):
            slots = {k: s.slots[j] for k, s in enumerate(everyone) if j < len(s.slots)}
            self._gradient_step(slots, steps)
        for member in self._members():
            member.rules.passed(steps[member.number])

    def _rates_until(self, end: int) -> list[TickRates]:
        """Advance the clock to `end`. Returns the learning rates of each run at each step. Steps
        with equal rates share one list, so that comparing them is fast."""
        found: list[TickRates] = [[] for _ in self.runs]
        while self.clock < end:
            for kept, now in zip(found, self._tick(), strict=True):
                kept.append(kept[-1] if kept and kept[-1] == now else now)
        return found

    def _gradient_step(self, slots: dict[int, GradientSlot], steps: list[RunStretch]) -> None:
        """Take the next gradient step of each worker that has one, and the steps without data after
        it."""
        who = list(slots)
        grads = self._take_gradients(who)
        by_run = self._by_run(slots)
        own = [(m, by_run[m.number]) for m in self._members() if m.number in by_run]
        self._compare_gradients(own, who, grads)
        self._before_gradient(steps, own, who, grads)
        self.stack.step(who, grads, self._columns(slots, steps))
        for member, found in own:
            if member.run.method.overrides("after_gradient"):
                member.rules.after_gradient(steps[member.number], found)

    def _by_run(self, slots: dict[int, GradientSlot]) -> dict[int, dict[int, GradientSlot]]:
        """By the number of the run, its slots by the number of the worker in it."""
        found: dict[int, dict[int, GradientSlot]] = {}
        for worker, slot in slots.items():
            run, k = divmod(worker, self.workers)
            found.setdefault(run, {})[k] = slot
        return found

    def _compare_gradients(
        self, own: list[tuple[Member, dict[int, GradientSlot]]], who: list[int], grads: list[Tensor]
    ) -> None:
        """Let the next sync compare the first gradients of the local phase, as between
        processes."""
        for member, found in own:
            guard = member.run.worker.warmup.guard
            if guard.awaits_gradient:
                guard.awaits_gradient = False
                low = who.index(member.first + next(iter(found)))
                digests = row_digests([g[low : low + len(found)] for g in grads], len(found))
                member.rules.saw_gradients(dict(zip(found, digests, strict=True)))

    def _before_gradient(
        self,
        steps: list[RunStretch],
        own: list[tuple[Member, dict[int, GradientSlot]]],
        who: list[int],
        grads: list[Tensor],
    ) -> None:
        for member, found in own:
            if member.run.method.overrides("before_gradient"):
                grads[:] = [writable(g) for g in grads]
                low = who.index(member.first + next(iter(found)))
                rows = [g[low : low + len(found)] for g in grads]
                member.rules.before_gradient(steps[member.number], found, rows)

    def _columns(
        self, slots: dict[int, GradientSlot], steps: list[RunStretch]
    ) -> list[list[float]]:
        """For each parameter group, the divided learning rates of the workers."""
        now = []
        for worker, slot in slots.items():
            rates = steps[worker // self.workers].rates[slot.tick]
            now.append([rate / slot.share for rate in rates])
        return [list(group) for group in zip(*now, strict=True)]

    # -- exchanges -------------------------------------------------------------------------------

    def _exchange(self) -> None:
        """Do what is due at this clock."""
        losses = self._losses_so_far() if self.schedule.changes_model(self.clock) else []
        for member in self._members():
            run = member.run
            try:
                changed = member.rules.run_due()
            # its workers stay in the stack, where they do not affect other runs
            except NonFiniteError as error:
                run.error = self._loss_error(member, losses) or error
                continue
            if changed:
                self._record(member, losses, [ledger.distance for ledger in run.ledgers])

    # -- bookkeeping -----------------------------------------------------------------------------

    def _losses_so_far(self) -> Losses:
        """The losses of each worker since the last record, in one transfer from the device."""
        taken, self._losses = self._losses, []
        if not taken:
            return [torch.zeros(0)] * self.stack.count
        flat = torch.cat([losses for _, losses in taken]).double().cpu()
        owner = torch.tensor([worker for who, _ in taken for worker in who])
        order = owner.argsort(stable=True)
        counts = owner.bincount(minlength=self.stack.count).tolist()
        return list(flat[order].split(counts))

    def _loss_error(self, member: Member, losses: Losses) -> NonFiniteError | None:
        """An error that names the first loss that is not finite; None if there is none or such
        workers are left out."""
        if member.run.skips_nonfinite:
            return None
        totals = [ledger.gradient_steps for ledger in member.run.ledgers]
        try:
            check_losses(member.part(losses), totals, list(range(self.workers)))
        except NonFiniteError as error:
            return error
        return None

    def _record(self, member: Member, losses: Losses, distance: list[float]) -> None:
        run = member.run
        run.error = self._loss_error(member, losses)
        if run.error is None:
            self._pauses |= run.recorder.wants_pause(self.clock)
            run.recorder.add(
                clock=self.clock,
                round=run.rounds,
                losses=[float(found.mean()) for found in member.part(losses)],
                distance=distance,
                ledger=run.ledgers[0],
                metric=run.recorder.metric(self.clock, lambda: run.show(self.stack, member.first)),
            )

    def results(self) -> list[Result]:
        for number, run in enumerate(self.runs):
            run.recorder.end()
            run.show(self.stack, number * self.workers)
        return [
            Result(
                model=run.model,
                engine=self.name,
                history=run.recorder.history,
                ledgers=run.ledgers,
                error=run.error,
            )
            for run in self.runs
        ]

    # -- states ----------------------------------------------------------------------------------

    def state(self) -> Iterator[tuple[str, Any]]:
        """The state between two exchanges, in pieces. Tensors of the stack are not copied, so each
        piece must be written before training goes on."""
        yield (
            "stack",
            {
                "clock": self.clock,
                "open": self._open,
                "unfolded": self.stack.unfolded,
                "compiled": self.stack.compiled,
                "seconds": self._watch.seconds(),
                "rng": {name: self._rng[name] for name in ("cpu", "cuda")},
                **self.stack.tensors(),
            },
        )
        for number, run in enumerate(self.runs):
            yield f"run-{number}", run.state()
            for k, opt in enumerate(run.opts):
                yield f"run-{number}-optimizer-{k}", optimizer_state(opt, inner=False)

    @torch.no_grad()
    def load(self, saved: Mapping[str, Any]) -> None:
        stack = saved["stack"]
        self.clock, self._open = stack["clock"], stack["open"]
        # a bool in states of palsgd 0.2.0, for all convolutions or none
        self.stack.unfold(2**31 if stack["unfolded"] is True else int(stack["unfolded"]))
        if stack["compiled"] != self.stack.compiled:
            self.stack.compile(any(stack["compiled"].values()), **stack["compiled"])
        self._watch.set(stack["seconds"])
        self._rng.update(cloned(stack["rng"]))
        if self._open:
            self.stack.split()
        self.stack.load(stack)
        for number, run in enumerate(self.runs):
            for k, opt in enumerate(run.opts):
                load_optimizer(opt, saved[f"run-{number}-optimizer-{k}"])
            kept = saved[f"run-{number}"]
            run.load(kept)
            if kept["rules"] is not None:
                self._make_rules(Member(run, number))
                Member(run, number).rules.load(kept["rules"])


def alike(runs: list[Run]) -> list[list[Run]]:
    """Groups of runs that can share one program. Shapes, rounds and inner optimizers must be equal;
    methods, learning rates, seeds and outer optimizers may differ."""
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
    """The reason why two runs cannot share a program; empty if they can."""
    mine, theirs = _shape_of(first), _shape_of(other)
    for name in mine:
        if mine[name] != theirs[name]:
            return f"{name} ({mine[name]} and {theirs[name]})"
    if first.method.varies_length or other.method.varies_length:
        return "the lengths of their rounds, which are found while they train"
    for name, x in _constants(first).items():
        if not torch.equal(x, _constants(other)[name]):
            return f"{name}, which is not trained"
    return ""


def _shape_of(run: Run) -> dict[str, Any]:
    params = zip(run.names, run.replica.params, strict=True)
    return {
        "workers": run.workers,
        "sync_every": run.opt.sync_every,
        "warmup_steps": run.schedule.warmup,
        "fragments": run.schedule.fragments,
        "delay": run.schedule.spans[-1].delay,
        "max_norm": run.worker.inner.max_norm,
        "inner optimizer": type(run.opt.inner).__name__,
        "inner settings": run.fixed,
        "parameter groups": run.replica.groups,
        "parameters": [(name, tuple(p.shape), str(p.dtype)) for name, p in params],
        "buffers": [(name, tuple(b.shape)) for name, b in run.buffers.items()],
    }


def _constants(run: Run) -> dict[str, Tensor]:
    varied = {*run.names, *run.buffers}
    everything = [*run.module.named_parameters(), *run.module.named_buffers()]
    return {name: x for name, x in everything if name not in varied}

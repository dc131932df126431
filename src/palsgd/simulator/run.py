"""One run inside the stacked engine: its method, clock, data and records."""

import copy
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from palsgd.buffers import persistent_buffers
from palsgd.errors import NonFiniteError
from palsgd.events import Averaged
from palsgd.ledger import Ledger
from palsgd.method import Method
from palsgd.optimizer import LocalOptimizer
from palsgd.payload import payload_size, wire_bytes
from palsgd.replica import Replica
from palsgd.schedule import Schedule, StepPace
from palsgd.simulator.batches import Batches, DryError
from palsgd.simulator.exact import built
from palsgd.simulator.global_model import GlobalModel
from palsgd.simulator.history import Recorder
from palsgd.simulator.stack import StackedWorkers
from palsgd.simulator.stacking_checks import LossModule, check_stackable
from palsgd.simulator.stretch import GradientSlot, Stretch, TickRates
from palsgd.transports.in_memory import SimulatedTransport
from palsgd.worker import Worker


class Rules(Protocol):
    """Applies a run's method to the stacked workers of that run."""

    def open_local_phase(self) -> None:
        """The model of the warm-up becomes the anchor."""

    def run_head(self, start: int, stretches: list[Stretch], rates: TickRates) -> None:
        """Take the steps without data before the first gradient step of the stretch."""

    def saw_gradients(self, digests: dict[int, int]) -> None:
        """Keep digests of the first gradients of the local phase, by worker, for the next sync."""

    def before_gradient(self, start: int, slots: dict[int, GradientSlot], grads: Any) -> None:
        """Apply the rule before the inner step of the workers in `slots`."""

    def after_gradient(
        self,
        start: int,
        slots: dict[int, GradientSlot],
        stretches: list[Stretch],
        rates: TickRates,
    ) -> None:
        """Apply the rule after the inner step, and the steps without data that follow it."""

    def passed(self, clock: int, stretches: list[Stretch], rates: TickRates) -> None:
        """Count the steps of a finished stretch."""

    def run_due(self) -> bool:
        """Do what is due at this clock. Returns whether the global model has changed."""

    def show(self) -> None:
        """Copy the global model into the run's model."""

    def state(self) -> dict[str, Any]:
        """What the rules keep beside the optimizers and the stack."""

    def load(self, saved: dict[str, Any]) -> None:
        """Set what `state` returned, where optimizers and stack are set already."""


class Run:
    """One run. The tensors of its workers are in the stack, and `rules` applies the method to them.

    A method whose workers have one anchor has one optimizer for all of them; otherwise each worker
    has its own, with a copy of the model.
    """

    def __init__(
        self,
        model: nn.Module,
        loss: Callable[[nn.Module, Any], Tensor],
        batches: list[Batches],
        method: Callable[[nn.Module], LocalOptimizer],
        recorder: Recorder,
    ):
        self.batches, self.recorder = batches, recorder
        self.opts = self._built(model, method)
        self.module = LossModule(model, loss)
        self.shown = GlobalModel(self.opt) if self.apart else None
        ledgers = [opt.ledger for opt in self.opts]
        self.ledgers = ledgers + [
            Ledger(speeds=copy.deepcopy(ledgers[0].speeds))
            for _ in range(self.workers - len(ledgers))
        ]
        self.error: Exception | None = None  # set when this run ends early; the other runs go on
        self._last: list[Any] = [None] * self.workers
        self._last_joint: Any = None  # if it was taken after those
        self.fixed = self._settings_but_lr()
        for opt in self.opts:
            check_stackable(opt.model, opt)
        named: dict[Tensor, str] = {p: name for name, p in self.module.named_parameters()}
        self.names = [named[p] for p in self.replica.params]
        self.buffers = self._named_buffers(model)
        self.rules: Rules | None = None  # None before the local phase
        self._warmup_messages = payload_size(self.worker).warmup()
        # the clock at which the round began, and its plans
        self._planned: tuple[int, list[tuple[list[bool], Sequence[StepPace]]]] = (-1, [])

    def _built(
        self, model: nn.Module, method: Callable[[nn.Module], LocalOptimizer]
    ) -> list[LocalOptimizer]:
        settings: list[dict[str, Any]] = []
        first = built(method, model, SimulatedTransport(0, self.workers, settings))
        if first.method.shares_anchor:
            return [first]
        return [first] + [
            built(method, copy.deepcopy(model), SimulatedTransport(k, self.workers, settings))
            for k in range(1, self.workers)
        ]

    @property
    def workers(self) -> int:
        return len(self.batches)

    @property
    def opt(self) -> LocalOptimizer:
        """The optimizer of all workers, or of the first."""
        return self.opts[0]

    @property
    def apart(self) -> bool:
        """Has each worker an optimizer of its own?"""
        return len(self.opts) > 1

    @property
    def worker(self) -> Worker:
        return self.opt._worker

    @property
    def method(self) -> Method:
        return self.worker.method

    @property
    def replica(self) -> Replica:
        return self.worker.inner.replica

    @property
    def model(self) -> nn.Module:
        """The one that is made to hold the global model."""
        return self.shown.model if self.shown else self.module.model

    @property
    def group_of(self) -> list[int]:
        """The parameter group of each parameter."""
        groups = self.replica.groups
        return [
            next(g for g, members in enumerate(groups) if i in members)
            for i in range(len(self.replica.params))
        ]

    @property
    def statistics(self) -> list[str]:
        """The floating-point buffers that are averaged, by their names in the stack."""
        return [f"model.{name}" for name in self.worker.warmup.buffers.statistics]

    @property
    def schedule(self) -> Schedule:
        return self.worker.schedule

    @property
    def rounds(self) -> int:
        return self.worker.at.rounds

    @property
    def skips_nonfinite(self) -> bool:
        return self.opt.config["on_nonfinite"] == "skip"

    def end_at(self, steps: int) -> None:
        for opt in self.opts:
            opt._worker.end_at(steps)

    # -- data and learning rates ---------------------------------------------------------------

    def batch(self, worker: int) -> Any:
        """The next batch of a worker. After the run has ended it is the last batch, which has the
        right shape."""
        if self.error is not None and self._last_joint is not None:
            return pytree.tree_map_only(Tensor, lambda x: x[worker], self._last_joint)
        if self.error is None or self._last[worker] is None:
            try:
                self._last[worker] = self.batches[worker].next()
            except DryError as dry:
                self.error = dry
                if self._last[worker] is None:
                    raise
        return self._last[worker]

    @property
    def has_joint_batch(self) -> bool:
        """Do the data give the next batches of all workers as one?"""
        first = self.batches[0].joint_place
        if self.error is not None or first is None:
            return False
        maker, index = first
        together = all(source.joint_place == first for source in self.batches)
        return together and maker.joint(index) is not None

    def joint_batch(self) -> Any:
        """The next batches of all workers, with the workers as a first axis."""
        place = self.batches[0].joint_place
        assert place is not None, "asked for where there is none"
        maker, index = place
        self._last_joint = maker.joint(index)
        for source in self.batches:
            source.pass_by()
        return self._last_joint

    def _settings_but_lr(self) -> list[dict[str, Any]]:
        free = {"params", "lr", "initial_lr"}
        return [
            {k: v for k, v in group.items() if k not in free}
            for group in self.opt.inner.param_groups
        ]

    def tick(self, clock: int) -> list[float]:
        """Advance the clock by one step. Returns the learning rates of that step."""
        rates = self.worker.inner.rates()
        for opt in self.opts:
            opt._worker.at.clock = clock + 1  # a scheduler may read the clock
            opt._worker.inner.tick()
        if self.worker.inner.scheduler is not None and self._settings_but_lr() != self.fixed:
            raise ValueError(
                "the schedule changes more than the learning rate, which stacked workers "
                "cannot follow; use vectorize=False"
            )
        return rates

    def stretches(self, clock: int, end: int) -> list[Stretch]:
        """The steps of each worker from this clock up to `end`, which are in one round."""
        round, offset = self.schedule.place(clock)
        part = slice(offset, offset + end - clock)
        return [Stretch.of(plan[part], pace[part]) for plan, pace in self._plans(clock, round)]

    def _plans(self, clock: int, round: int) -> list[tuple[list[bool], Sequence[StepPace]]]:
        """The steps of each worker's round, and what they count for."""
        began = self.schedule.round_start(clock)
        if self._planned[0] != began:
            owners = [self.opts[k if self.apart else 0]._worker for k in range(self.workers)]
            alike = [StepPace(self.method.gradient_share, 1.0)] * self.schedule.length(clock)
            self._planned = (
                began,
                [
                    (owner.plan_of(k, round), owner.pace_of(k, round) or alike)
                    for k, owner in enumerate(owners)
                ],
            )
        return self._planned[1]

    # -- counting ------------------------------------------------------------------------------

    def count_messages(self, sizes: list[int], on_the_wire: int) -> None:
        """Count messages of `sizes` bytes for every worker."""
        for ledger in self.ledgers:
            ledger.messages += len(sizes)
            ledger.bytes_sent += sum(sizes)
            ledger.bytes_on_the_wire += on_the_wire

    def warmed_up(self, clock: int, *, skipped: bool) -> None:
        """Count one step of the warm-up, and call the listeners. A step is skipped after its first
        message."""
        sizes = self._warmup_messages[:1] if skipped else self._warmup_messages
        self.count_messages(sizes, sum(wire_bytes(sent, self.workers) for sent in sizes))
        for opt in self.opts:
            opt._worker.at.gradient_steps += 1
        for k, ledger in enumerate(self.ledgers):
            ledger.gradient_steps += 1
            ledger.warmup_steps += 1
            ledger.skipped_steps += skipped
            ledger.syncs += 1
            listeners = self.opts[k if self.apart else 0]._worker.listeners
            if listeners.wanted(Averaged):
                sent = sum(sizes)
                listeners.tell(Averaged(worker=k, clock=clock, bytes_sent=sent, skipped=skipped))

    # -- states --------------------------------------------------------------------------------

    def state(self) -> dict[str, Any]:
        """What this run has beside its optimizers and the stack."""
        return {
            "history": self.recorder.state(),
            "error": None if self.error is None else [type(self.error).__name__, str(self.error)],
            "ledgers": [asdict(ledger) for ledger in self.ledgers],
            "batches": [source.state() for source in self.batches],
            "rules": None if self.rules is None else self.rules.state(),
        }

    def load(self, saved: dict[str, Any]) -> None:
        self.recorder.load(saved["history"])
        for ledger, kept in zip(self.ledgers, saved["ledgers"], strict=True):
            ledger.load(kept)
        if saved["error"] is None:
            for source, place in zip(self.batches, saved["batches"], strict=True):
                source.load(place)
            return
        kind, reason = saved["error"]
        self.error = DryError(reason) if kind == DryError.__name__ else NonFiniteError(reason)
        # Its workers stay in the stack, and any batch of the right shape will do for them.
        self._last = [source.peek() for source in self.batches]

    # -- the global model ----------------------------------------------------------------------

    def show(self, stack: StackedWorkers, first: int) -> AbstractContextManager[nn.Module]:
        """The model of this run with the global weights and buffers."""
        with torch.no_grad():
            if self.rules is None:
                self._show_common(stack, first)
            else:
                self.rules.show()
        return nullcontext(self.model)

    def _show_common(self, stack: StackedWorkers, first: int) -> None:
        """Copy the model that all workers share in the warm-up into the run's model."""
        row = first // self.workers if stack.shared else first
        named = {f"model.{name}": p for name, p in self.model.named_parameters()}
        for name, x in zip(self.names, stack.params, strict=True):
            named[name].copy_(x[row])
        self.show_buffers(stack, first)

    def show_buffers(self, stack: StackedWorkers, row: int) -> None:
        for name, buffer in self._named_buffers(self.model).items():
            buffer.copy_(stack.buffers[name][row])

    def buffers_of(self, opt: LocalOptimizer) -> dict[str, Tensor]:
        """The buffers of a worker's own model, by their names in the stack."""
        return self._named_buffers(opt.model)

    def _named_buffers(self, model: nn.Module) -> dict[str, Tensor]:
        kept = {getattr(module, name) for module, name in persistent_buffers(model)}
        return {f"model.{name}": b for name, b in model.named_buffers() if b in kept}

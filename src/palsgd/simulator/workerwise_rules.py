"""Applies the rules of a method whose workers have their own anchors, worker by worker.

Each worker has its own optimizer, whose parameters, buffers and inner state are views of the stack.
Gradients and inner steps are computed for all workers at once. Everything else runs the code of a
real process.
"""

from typing import Any

from torch import Tensor

from palsgd.optimizer import LocalOptimizer
from palsgd.simulator.exact import exchanged
from palsgd.simulator.global_model import global_part
from palsgd.simulator.run import Run
from palsgd.simulator.stack import StackedWorkers
from palsgd.simulator.stretch import GradientSlot, RunStretch
from palsgd.transports.requests import Exchange, Request
from palsgd.worker import Worker


class WorkerwiseRules:
    def __init__(self, run: Run, stack: StackedWorkers, first: int):
        self._run, self._stack, self._first = run, stack, first
        self._workers: list[Worker] = [opt._worker for opt in run.opts]
        assert run.shown is not None
        self._shown = run.shown

    def open_local_phase(self) -> None:
        self._share_all()
        self._drive([worker.open_local_phase() for worker in self._workers])

    def state(self) -> dict[str, Any]:
        """Nothing: the workers' optimizers and the stack have everything."""
        return {}

    def load(self, saved: dict[str, Any]) -> None:
        self._share_all()

    def _share_all(self) -> None:
        for k, opt in enumerate(self._run.opts):
            self._share_memory(opt, self._first + k)

    def _share_memory(self, opt: LocalOptimizer, row: int) -> None:
        """Make an optimizer's tensors views of a row of the stack."""
        params = opt._worker.inner.replica.params
        for param, x in zip(params, self._stack.params, strict=True):
            param.data = x[row]
        for name, buffer in self._run.buffers_of(opt).items():
            buffer.data = self._stack.buffers[name][row]
        self._share_state(opt, row)

    def _share_state(self, opt: LocalOptimizer, row: int) -> None:
        for name in ("momentum_buffer", "exp_avg", "exp_avg_sq"):
            if self._stack.has_state(name):
                tensors = self._stack.state_named(name)
                for param, x in zip(opt._worker.inner.replica.params, tensors, strict=True):
                    opt.inner.state[param][name] = x[row]

    # -- steps ---------------------------------------------------------------------------------

    def run_head(self, steps: RunStretch) -> None:
        for worker, stretch in zip(self._workers, steps.stretches, strict=True):
            if stretch.head and worker.leads:
                mixing = [steps.rates[tick] for tick in stretch.head]
                worker.at.clock = steps.start + len(mixing)
                worker.steps.after_gradient(None, mixing)

    def saw_gradients(self, digests: dict[int, int]) -> None:
        for k, found in digests.items():
            self._workers[k].warmup.guard.gradient = found

    def before_gradient(
        self, steps: RunStretch, slots: dict[int, GradientSlot], grads: list[Tensor]
    ) -> None:
        for row, (k, slot) in enumerate(slots.items()):
            worker = self._workers[k]
            params = worker.inner.replica.params
            for param, gradient in zip(params, grads, strict=True):
                param.grad = gradient[row]
            worker.at.clock = steps.start + slot.tick
            worker.steps.before_gradient()
            for param in params:
                param.grad = None

    def after_gradient(self, steps: RunStretch, slots: dict[int, GradientSlot]) -> None:
        for k, slot in slots.items():
            worker, mixing = self._workers[k], [steps.rates[tick] for tick in slot.mixing]
            worker.at.clock = steps.start + slot.end
            worker.steps.after_gradient(steps.rates[slot.tick], mixing)

    def passed(self, steps: RunStretch) -> None:
        rates = steps.rates
        for worker, stretch in zip(self._workers, steps.stretches, strict=True):
            taken = [[rate / slot.share for rate in rates[slot.tick]] for slot in stretch.slots]
            mixing = stretch.mixing_steps
            worker.steps.passed(steps.end, rates=taken, last=rates[-1], mixing_steps=mixing)

    # -- syncs ---------------------------------------------------------------------------------

    def run_due(self) -> bool:
        first = self._workers[0]
        changes = first.schedule.changes_model(first.at.clock)
        self._drive([worker.run_due() for worker in self._workers])
        if self._run.skips_nonfinite:
            self._forget_nonfinite()
        return changes

    def _drive(self, exchanges: list[Exchange]) -> None:
        """Run the exchanges of all workers together, request by request."""
        clock = self._workers[0].at.clock
        requests = [next(exchange, None) for exchange in exchanges]
        while any(request is not None for request in requests):
            sent = exchanged(requests, clock)
            requests = [_resumed(exchange, sent) for exchange in exchanges]

    def _forget_nonfinite(self) -> None:
        """Reset the inner state in the stack of each worker whose optimizer has dropped it."""
        for k, opt in enumerate(self._run.opts):
            if any(not state for state in opt.inner.state.values()):
                self._stack.forget_nonfinite(self._first + k)
                self._share_state(opt, self._first + k)

    def show(self) -> None:
        first = self._run.opt
        self._shown.set_weights(first, [global_part(opt) for opt in self._run.opts])
        self._shown.set_buffers(first)


def _resumed(exchange: Exchange, sent: int) -> Request | None:
    try:
        return exchange.send(sent)
    except StopIteration:
        return None

"""The optimizer that a training loop sees: an inner optimizer and the rules of a method."""

import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import chain
from typing import Any

import torch
from torch import nn
from torch.distributed import ProcessGroup
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks

from palsgd.assembly import build_worker
from palsgd.auto_interval import Auto
from palsgd.codecs import Codec
from palsgd.composed import composed
from palsgd.errors import SyncError
from palsgd.events import Averaged, Event, Handle, Synced
from palsgd.inner import ChainedOptimizer, check_scheduler
from palsgd.ledger import Ledger
from palsgd.method import Facts, Method
from palsgd.options import checked_options, documented
from palsgd.outer import OuterFactory, plain_average
from palsgd.replica import Replica
from palsgd.schedule import Schedule
from palsgd.state import Parts, load_state, save_state
from palsgd.transports.process_group import find_transport
from palsgd.transports.requests import fulfil
from palsgd.transports.transport import Transport, ambient_transport
from palsgd.worker import Exchange


@documented
class LocalOptimizer(Optimizer):
    """An inner optimizer whose workers exchange only at syncs, by the rules of a method.

    Args:
        model: the module that is trained, as the loop calls it.
        inner: the torch optimizer of each worker, or a list of them.
        method: a `palsgd.Method`, or several that are composed.
        sync_every: the number of steps between two syncs, H; "auto", or `palsgd.Auto(...)`, to
            have it chosen from what a sync and a step are measured to cost.

    Example:
        >>> import torch, palsgd
        >>> model = torch.nn.Linear(2, 1)
        >>> inner = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> opt = palsgd.LocalOptimizer(
        ...     model, inner, method=palsgd.Method(), sync_every=8, transport=palsgd.Alone()
        ... )
        >>> model(torch.ones(1, 2)).sum().backward()
        >>> opt.step()
        >>> opt.clock
        1
    """

    fixed_outer = False  # is the outer step part of the method?

    def __init__(
        self,
        model: nn.Module,
        inner: Optimizer | Sequence[Optimizer],
        method: Method | Sequence[Method],
        outer: OuterFactory | None = None,
        *,
        sync_every: int | str | Auto = 1,
        warmup_steps: float = 0,
        draws: str = "balanced",
        seed: int = 0,
        buffers: str = "average",
        max_norm: float | None = None,
        on_nonfinite: str = "raise",
        scheduler: LRScheduler | Callable[[Optimizer], LRScheduler] | None = None,
        bucket_mb: float = 128.0,
        compress: str | Codec | None = None,
        delay: int = 0,
        fragments: int = 1,
        offload: bool = False,
        group: ProcessGroup | None = None,
        transport: Transport | None = None,
    ):
        inner, method = _inner(inner), composed(method)
        options = checked_options(
            method=method,
            outer=outer,
            sync_every=sync_every,
            warmup_steps=warmup_steps,
            draws=draws,
            seed=seed,
            buffers=buffers,
            max_norm=max_norm,
            on_nonfinite=on_nonfinite,
            bucket_mb=bucket_mb,
            compress=compress,
            delay=delay,
            fragments=fragments,
            offload=offload,
        )
        self.model, self.inner = model, inner
        super().__init__(inner.param_groups, inner.defaults)
        self._share_inner()
        # a strong reference would make a cycle, which keeps sockets open
        share = weakref.WeakMethod(self._share_inner)
        inner.register_load_state_dict_post_hook(lambda _: (share() or (lambda: None))())
        replica = Replica(model, inner)
        method.check([float(group["lr"]) for group in inner.param_groups])
        self.transport = transport or ambient_transport() or find_transport(replica.params, group)
        self.transport.check(options.codec)
        method.check_run(inner, self.transport.workers)
        outer = outer or plain_average()
        self._worker = build_worker(model, inner, replica, self.transport, outer, options)
        self._showing_anchor = False
        self.config = {
            "method": self._title(),
            "workers": self.transport.workers,
            **options.as_config(),
            "inner": str(inner) if isinstance(inner, ChainedOptimizer) else type(inner).__name__,
            "outer": _signature(self.outer),
        }
        self._agree(replica, bucket_mb=bucket_mb, offload=offload)
        self._worker.warmup.switch(on=self._worker.warming_up)
        self.set_scheduler(scheduler)
        if delay:
            self.transport.prepare(replica.device)

    def _agree(self, replica: Replica, **sizes: Any) -> None:
        """Raise unless the settings that must be equal on all workers are equal. `sizes` are those
        that a saved state and its reader need not have in common."""
        worker = self._worker
        self.transport.agree(
            self.config
            | {
                "parameters": replica.describe(),
                "the model's buffers": worker.warmup.buffers.describe(),
                **sizes,
                "gradients averaged by": type(worker.warmup.gradient_sync).__name__,
            }
        )

    def _title(self) -> str:
        """The name of the method in messages and settings."""
        if type(self) is not LocalOptimizer:
            return type(self).__name__
        return str(self._worker.method)

    def _share_inner(self) -> None:
        """Make the groups and the state the inner optimizer's own objects, so that schedulers,
        GradScaler and hooks act on the same objects whether they are given this optimizer or the
        inner one."""
        self.param_groups, self.state = self.inner.param_groups, self.inner.state

    def set_scheduler(
        self, scheduler: LRScheduler | Callable[[Optimizer], LRScheduler] | None
    ) -> None:
        """Step `scheduler` once per step of the clock, steps without data included."""
        if isinstance(scheduler, type) or (callable(scheduler) and not hasattr(scheduler, "step")):
            # A scheduler holds its optimizer. Made from this one, it would close a cycle, which
            # keeps the anchor in memory until the garbage collector runs. The groups are the same.
            scheduler = scheduler(self.inner)
        if scheduler is not None:
            check_scheduler(scheduler, self.inner)
        bound = getattr(scheduler, "optimizer", None)
        if bound is not None:
            # A round may begin with steps without data, and the scheduler is stepped in them before
            # the first inner step. torch would warn that the calls are in the wrong order.
            bound._opt_called = True
        self._worker.inner.scheduler = scheduler

    # -- the training loop ---------------------------------------------------------------------

    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        """One gradient step, and every step up to the next one that needs a gradient.

        Args:
            closure: computes the loss and its gradients before the step.

        Returns:
            What the closure returned.

        Raises:
            ConsensusError: another worker holds another global model.
            NonFiniteError: a model has inf or nan at a sync.
            SyncError: a peer could not be reached; the global model is unchanged.
        """
        if self._showing_anchor:
            raise RuntimeError(
                "step() inside anchor_weights(): leave the with block before training"
            )
        # torch calls the hooks of a subclass's own step
        hooked = type(self).step is LocalOptimizer.step
        if hooked and (self._optimizer_step_pre_hooks or _global_optimizer_pre_hooks):
            self._call_hooks(_global_optimizer_pre_hooks, self._optimizer_step_pre_hooks)
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        if not self._worker.plain_step():
            self._drive(self._worker.step())
        if hooked and (self._optimizer_step_post_hooks or _global_optimizer_post_hooks):
            self._call_hooks(self._optimizer_step_post_hooks, _global_optimizer_post_hooks)
        return loss

    step.hooked = True  # type: ignore[attr-defined]  # torch's profiling wrapper costs half a step

    def _call_hooks(self, *hooks: Any) -> None:
        for hook in chain.from_iterable(each.values() for each in hooks):
            hook(self, (self,), {})

    def simulated_step(self) -> Exchange:
        """`step()` for an engine that exchanges with other workers itself."""
        self._call_hooks(_global_optimizer_pre_hooks, self._optimizer_step_pre_hooks)
        if not self._worker.plain_step():
            # no_grad is a decorator here, as a with block would stay open while the generator
            # pauses.
            yield from torch.no_grad()(self._worker.step)()
        self._call_hooks(self._optimizer_step_post_hooks, _global_optimizer_post_hooks)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget the gradients of the inner optimizer's parameters."""
        self.inner.zero_grad(set_to_none)

    def run_until(self, steps: int) -> None:
        """End training when the clock shows `steps`. The workers sync there, even within a
        round."""
        self._worker.end_at(steps)
        self._drive(self._worker.prepare())

    def on(self, kind: type[Event], listener: Callable[[Any], None]) -> Handle:
        """Call `listener(event)` at every later event of this kind.

        Args:
            kind: `palsgd.events.Synced`, `Averaged`, `Mixed`, `Sent` or `IntervalChosen`.
            listener: called with the event, a frozen record.

        Returns:
            A handle whose `remove()` removes the listener.
        """
        return self._worker.listeners.on(kind, listener)

    def after_exchange(self, callback: Callable[[], None]) -> tuple[Handle, Handle]:
        """Call `callback()` after every later exchange. Deprecated: use `on`."""
        return (
            self.on(Averaged, lambda event: callback()),
            self.on(Synced, lambda event: callback() if event.completes else None),
        )

    @torch.no_grad()
    def _drive(self, exchange: Exchange) -> None:
        """Do through the transport what the worker requests. An error is raised inside the worker,
        so that the worker can restore its tensors."""
        try:
            request = next(exchange)
            while True:
                try:
                    sent = fulfil(self.transport, request)
                except RuntimeError as error:
                    lost = not isinstance(error, torch.OutOfMemoryError)
                    request = exchange.throw(self._lost_peer(error) if lost else error)
                except BaseException as error:  # KeyboardInterrupt too
                    request = exchange.throw(error)
                else:
                    request = exchange.send(sent)
        except StopIteration:
            pass

    def _lost_peer(self, error: RuntimeError) -> SyncError:
        failure = SyncError(
            f"worker {self.transport.worker} could not exchange with the others at clock "
            f"{self.clock}: a worker left early, stalled or lost its link. The global model is "
            f"unchanged; start all workers again from a checkpoint ({str(error).splitlines()[0]})"
        )
        failure.__cause__ = error
        return failure

    # -- where it stands -----------------------------------------------------------------------

    @property
    def method(self) -> Method:
        """The rules of the method."""
        return self._worker.method

    @property
    def facts(self) -> Facts:
        """The facts that are equal on all workers."""
        return self._worker.facts

    @property
    def outer(self) -> Optimizer | None:
        """The outer optimizer, whose parameters are the anchor's tensors; None for DDP."""
        syncer = self._worker._syncer
        return None if syncer is None else syncer.outer

    @property
    def schedule(self) -> Schedule:
        """The clocks of rounds and syncs. Its last span has the present H."""
        return self._worker.schedule

    @property
    def sync_every(self) -> int:
        """H of the present round: `sync_every="auto"` and some methods change it."""
        return self.schedule.length(max(self.clock, self.schedule.spans[0].start))

    @property
    def clock(self) -> int:
        """Steps so far, steps without data included."""
        return self._worker.at.clock

    @property
    def gradient_steps(self) -> int:
        """Gradient steps so far."""
        return self._worker.at.gradient_steps

    @property
    def rounds(self) -> int:
        """Rounds completed, each with its sync."""
        return self._worker.at.rounds

    @property
    def synced(self) -> bool:
        """True right after a sync: the local model is then equal to the global one. With `delay` or
        `fragments` the local model may differ from the global one, and one `step()` may contain
        several syncs. Code that all workers must run at every sync therefore belongs into a
        listener of `palsgd.events.Synced`."""
        return self._worker.at.synced

    @property
    def ledger(self) -> Ledger:
        """What this worker did: counts, bytes, seconds, and one line per sync."""
        self._worker.meter.watch.catch_up()
        return self._worker.ledger

    @contextmanager
    def anchor_weights(self) -> Iterator[nn.Module]:
        """Inside, the model holds the global weights and buffers. On leaving, the local weights and
        buffers are restored. For a method whose workers have no common anchor the global model
        takes a message, so all workers must call this."""
        buffers = self._worker.warmup.buffers
        if self._worker.at.has_anchor and not buffers.current:
            warnings.warn(
                "buffers='recompute' and they were not recomputed since the last sync: the global "
                "weights are shown with this worker's own buffers; call recompute_buffers(batches)",
                stacklevel=3,
            )
        with self._global_model():
            yield self.model

    @contextmanager
    def _global_model(self) -> Iterator[None]:
        worker, buffers = self._worker, self._worker.warmup.buffers
        held = worker.inner.replica.local() + buffers.all()
        with torch.no_grad():
            saved = [worker.aside(t) for t in held]
        if worker.at.has_anchor:  # in the warm-up every local model is the global model
            self._drive(worker.show_global_model())
        outside, self._showing_anchor = self._showing_anchor, True
        try:
            yield
        finally:
            self._showing_anchor = outside
            with torch.no_grad():
                torch._foreach_copy_(held, saved)
            worker.meter.skip()

    def recompute_buffers(
        self,
        batches: Iterable[Any],
        forward: Callable[[nn.Module, Any], Any] = lambda model, batch: model(batch),
    ) -> None:
        """Compute the global model's normalization statistics by forward passes over `batches`, and
        average them over the workers. All workers must call this."""
        buffers = self._worker.warmup.buffers
        with self._global_model(), torch.no_grad():
            buffers.recompute(self.model, batches, forward)
            self._drive(self._worker.average_buffers())

    # -- state ---------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """The whole state except the model. Save model.state_dict() of each worker too."""
        return save_state(self._parts())

    def load_state_dict(self, state_dict: dict[str, Any], *, strict: bool = True) -> None:
        """Resume from `state_dict` bit for bit, also within a round. With `strict=False` the
        settings may differ from the saved ones."""
        load_state(self._parts(), state_dict, strict=strict)

    def _parts(self) -> Parts:
        return Parts(self._worker, self.transport, self.config)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        if hasattr(self, "_worker"):
            raise ValueError(
                "parameters cannot be added to a palsgd optimizer; add them to the inner optimizer "
                "and build a new one"
            )
        super().add_param_group(param_group)


def _inner(inner: Any) -> Optimizer:
    if isinstance(inner, (list, tuple)):
        inner = ChainedOptimizer(inner)
    if not isinstance(inner, Optimizer):
        raise ValueError(
            f"inner must be a torch optimizer, got {type(inner).__name__}; use for instance "
            "torch.optim.AdamW(model.parameters(), lr=1e-3)"
        )
    return inner


def _signature(optimizer: Optimizer | None) -> str:
    if optimizer is None:
        return "none"
    settings = {k: v for k, v in optimizer.defaults.items() if v is not None}
    return (
        f"{type(optimizer).__name__}({', '.join(f'{k}={v}' for k, v in sorted(settings.items()))})"
    )

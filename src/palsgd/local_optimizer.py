"""The optimizer that a training loop sees: an inner optimizer and the rules of a method."""

import inspect
import sys
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from copy import deepcopy
from itertools import chain
from typing import Any, ClassVar, NoReturn, Self
from weakref import proxy

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks

from palsgd.assembly import build_worker
from palsgd.auto_interval import Auto
from palsgd.checks import warn
from palsgd.codecs import Codec
from palsgd.composed import composed
from palsgd.driver import Driver
from palsgd.evaluation import EvaluationMode, average_buffers, check_modes
from palsgd.events import Averaged, Event, Handle, Synced
from palsgd.inner import (
    check_same_parameters,
    check_scheduler,
    checked_inner,
    only_initialises,
)
from palsgd.keywords import documented
from palsgd.ledger import Ledger
from palsgd.live_state import LiveState
from palsgd.method import Facts, Method
from palsgd.options import Options, check_elastic, checked_options
from palsgd.outer import OuterFactory, OuterScheduler, plain_average
from palsgd.packing import check_form, refuse_palsgd_state
from palsgd.position import join_company
from palsgd.replica import Replica, check_model
from palsgd.schedule import Schedule
from palsgd.schedulers import (
    LagWatch,
    check_rates,
    hold_weakly,
    peak_rates,
    rates_ahead,
    settings_in,
    weakly_held,
    wrap_step,
)
from palsgd.settings import agree, settings_of
from palsgd.state import Parts, load_state, save_state
from palsgd.transports.elastic import ElasticTransport
from palsgd.transports.levels import check_attached, wrapper_group
from palsgd.transports.process_group import find_transport
from palsgd.transports.requests import Exchange
from palsgd.transports.transport import Transport, ambient_transport
from palsgd.unsynced import Unsynced
from palsgd.warmup import check_attachable, gradient_sync
from palsgd.wrapped import Wrapped

# The arguments that are no options of training.
NO_OPTIONS = ("model", "inner", "scheduler", "group", "transport")
# How many steps ahead the schedule is looked at, before a run and when its length is known. A copy
# of it is stepped, at some microseconds a step.
AT_FIRST, AT_MOST = 1_000, 20_000


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

    # arguments of this class that a subclass does not take -> what it says of them
    refused: ClassVar[Mapping[str, str]] = {}

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
        speeds: Sequence[Any] | None = None,
        seed: int = 0,
        buffers: str = "average",
        max_norm: float | None = None,
        on_nonfinite: str = "raise",
        scheduler: LRScheduler | Callable[[Optimizer], LRScheduler] | None = None,
        bucket_mb: float = 128.0,
        compress: str | Codec | None = None,
        delay: int = 0,
        fragments: int = 1,
        same_data: bool = False,
        blend: float | None = None,
        outer_scheduler: OuterScheduler | None = None,
        average_state: Sequence[str] | None = None,
        offload: bool = False,
        group: ProcessGroup | None = None,
        transport: Transport | None = None,
    ):
        given = locals()
        self._given = {k: given[k] for k in inspect.signature(LocalOptimizer).parameters}
        check_model(model)
        inner = checked_inner(inner, LocalOptimizer)
        options = self._checked_options()
        if options.has_rounds:
            check_modes(inner, options.average_state)
        refuse_palsgd_state(inner)
        self.model, self.inner = model, inner
        super().__init__(inner.param_groups, inner.defaults)
        replica = Replica(model, inner)
        options.method.check(peak_rates(inner))
        self.transport = self._found_transport(replica, options)
        outer = plain_average() if outer is None else outer
        self._worker = build_worker(
            model, inner, replica, self.transport, outer, outer_scheduler, options
        )
        self.config = settings_of(self._title(), self._worker, self.transport, options)
        self._driver, self._watch = Driver(self._parts()), LagWatch()
        self._evaluation = EvaluationMode(self._worker, self._driver)
        self.set_scheduler(scheduler)
        sizes = {"bucket_mb": bucket_mb, "offload": offload}
        agree(self.config, model, self._worker, self.transport, **sizes)
        join_company(self._worker, self.transport)
        self._worker.warmup.switch(on=self._worker.course.warming_up)
        self._begin(options)

    def _checked_options(self) -> Options:
        options = {k: v for k, v in self._given.items() if k not in NO_OPTIONS}
        return checked_options(**options | {"method": composed(self._given["method"])})

    def _found_transport(self, replica: Replica, options: Options) -> Transport:
        """The transport that was given, or the one that the surroundings have, if it can do what
        the options need."""
        transport: Transport = (
            self._given["transport"]
            or ambient_transport()
            or find_transport(replica.params, self._given["group"], wrapper_group(self.model))
        )
        transport.check(options.codec)
        if transport.elastic:
            check_elastic(options, sharded=replica.sharded)
        options.method.check_run(self.inner, transport.workers)
        return transport

    def _begin(self, options: Options) -> None:
        """Say what is doubtful, prepare what runs beside training, and join a run that is under
        way."""
        self._check_ahead(AT_FIRST)
        for doubt in options.method.doubts(peak_rates(self.inner), options.sync_every):
            warn(doubt)
        if options.delay:
            self.transport.prepare(self._worker.inner.replica.device)
        several = self.transport.workers > 1 or self.transport.elastic
        if several and self.transport is not ambient_transport():
            self._unsynced = self._driver.unsynced = Unsynced(self)
        if isinstance(self.transport, ElasticTransport) and self.transport.outside:
            self._driver.run(self._worker.meetings.join(fresh=True))

    def _title(self) -> str:
        """The name of the method in messages and settings."""
        if type(self) is not LocalOptimizer:
            return type(self).__name__
        return str(self._worker.method)

    # The groups and the state are the inner optimizer's own objects, so that schedulers, GradScaler
    # and hooks act on the same objects whether they are given this optimizer or the inner one.

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]
        """The groups of the inner optimizer. Groups that are assigned become the inner optimizer's;
        they must hold the same parameters."""
        return self.inner.param_groups

    @param_groups.setter
    def param_groups(self, groups: list[dict[str, Any]]) -> None:
        if hasattr(self, "_worker"):  # the base class sets an empty list when it is built
            check_same_parameters(self.inner.param_groups, groups)
            self.inner.param_groups = groups

    @property
    def state(self) -> Any:  # type: ignore[override]
        """The inner optimizer's state."""
        return LiveState(self._worker) if "_worker" in vars(self) else self.inner.state

    @state.setter
    def state(self, state: defaultdict[Tensor, Any]) -> None:
        if hasattr(self, "_worker"):
            self.inner.state = state

    def set_scheduler(
        self, scheduler: LRScheduler | Callable[[Optimizer], LRScheduler] | None
    ) -> None:
        """Step `scheduler` once per step of the clock, steps without data included."""
        if isinstance(scheduler, type) or (callable(scheduler) and not hasattr(scheduler, "step")):
            scheduler = scheduler(self)
            hold_weakly(scheduler, self)
        if scheduler is not None:
            check_scheduler(scheduler, self.inner)
        bound = getattr(scheduler, "optimizer", None)
        if bound is not None:
            # A round may begin with steps without data, and the scheduler is stepped in them before
            # the first inner step. torch would warn that the calls are in the wrong order.
            bound._opt_called = True
        self._worker.inner.scheduler = scheduler
        self.config["scheduler"] = settings_in(scheduler)

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
        if "torch._dynamo" in sys.modules:  # this call may be in a function that it compiles
            return _untraced()(self, closure)
        return self._step(closure)

    step.hooked = True  # type: ignore[attr-defined]  # torch's profiling wrapper costs half a step

    def _step(self, closure: Callable[[], Any] | None) -> Any:
        if (
            self._evaluation.shows_global
            or self._worker.leaving
            or torch.is_inference_mode_enabled()
        ):
            self._refuse_step()
        if self._worker.at.clock == 0 and only_initialises(self.inner):
            self.inner.step()
            return None
        # torch calls the hooks of a subclass's own step
        hooked = type(self).step is LocalOptimizer.step
        if hooked and (self._optimizer_step_pre_hooks or _global_optimizer_pre_hooks):
            self._call_hooks(_global_optimizer_pre_hooks, self._optimizer_step_pre_hooks)
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        if not self._worker.plain_step():
            self._check_gradients()
            self._driver.run(self._worker.step())
            self._check_schedulers()
        if hooked and (self._optimizer_step_post_hooks or _global_optimizer_post_hooks):
            self._call_hooks(self._optimizer_step_post_hooks, _global_optimizer_post_hooks)
        return loss

    def _check_gradients(self) -> None:
        """Warn if the first local step has nothing to go by, which torch's optimizers accept."""
        worker = self._worker
        if worker.at.gradient_steps or worker.course.warming_up:
            return
        if all(p.grad is None for p in worker.inner.replica.params):
            warn(
                "step() was called and no parameter has a gradient, so the clock ticks and the "
                "model stays as it is; call loss.backward() before step()"
            )

    def _check_schedulers(self) -> None:
        at = self._worker.at
        if at.synced and self._worker.inner.scheduler is None:
            self._watch.look(
                self, self.inner, clock=at.clock, steps=at.gradient_steps, rounds=at.rounds
            )

    def _refuse_step(self) -> NoReturn:
        if self._worker.leaving:
            raise RuntimeError(
                f"step() after opt.leaving became True at clock {self.clock}, where all workers "
                "stop; save and end the program, or go on with another palsgd.until()"
            )
        if not self._evaluation.shows_global:
            raise RuntimeError(
                "step() inside torch.inference_mode(): what the inner optimizer makes there cannot "
                "be changed by a later step; leave inference mode before training"
            )
        if self._evaluation.lasts:
            raise RuntimeError(
                "step() after eval(): the model holds the global weights; call opt.train() first"
            )
        raise RuntimeError("step() inside anchor_weights(): leave the with block before training")

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
        self.train()
        self._worker.leaving = False  # a loop that goes on does so until the next sync
        self._check_ahead(min(steps - self.clock, AT_MOST))
        self._worker.course.end_at(steps)
        self._driver.run(self._worker.prepare())

    def attach(self, model: nn.Module) -> None:
        """Tell the optimizer of the `DistributedDataParallel` that was put around its model after
        the optimizer was built, as many frameworks do. All workers must call this at the same step.
        Calling it again, with a model that is not wrapped, or with a wrapper around the ranks of
        one worker, changes nothing.

        Args:
            model: the wrapped model, as the loop calls it.

        Raises:
            ValueError: the model has other parameters, is sharded by FSDP, which needs no
                attach(), or averages over ranks that do not fit the optimizer's group.
        """
        worker = self._worker
        check_attachable(model, worker.inner.replica)
        check_attached(model, self.transport)
        wrapper = gradient_sync(model, self.transport)
        known = getattr(worker.warmup.gradient_sync, "model", None)
        if isinstance(wrapper, Wrapped) and wrapper.model is not known:
            worker.attach(wrapper)

    def _check_ahead(self, steps: int) -> None:
        """Raise if the schedule leads to learning rates that the method refuses, within so many
        steps."""
        worker = self._worker
        if worker.method.foreseeable:
            ahead = rates_ahead(worker.inner.scheduler, self, self.inner)
            clocks = range(self.clock, self.clock + steps)
            check_rates(worker.method, worker.schedule, clocks, ahead)

    def finish(self) -> None:
        """End a loop that ends with its data: apply what is pending, and sync the steps since the
        last sync. All workers call it, after any number of steps of one round each. Where no worker
        has taken a step since the last sync nothing changes. A loop over `palsgd.until` needs no
        such call.

        Raises:
            ConsensusError: a worker called it while another came to a sync within its loop.
        """
        self.train()
        self._driver.run(self._worker.finish())

    def leave(self) -> None:
        """Ask all workers to end training at the same point, the next sync at which every worker
        can know of it. `leaving` is True there. Any worker may call this, at any moment, also in
        the handler of a signal; `palsgd.leave_on_sigterm` does so."""
        self._worker.warmup.guard.leaving = True

    @property
    def leaving(self) -> bool:
        """Was a worker asked to leave? It becomes True on all workers at the same clock, at a sync
        or after a step of the warm-up, and ends a loop over `palsgd.until`. Then save, and leave:
        a further `step()` is refused."""
        alone = self.transport.workers == 1 and self._worker.warmup.guard.leaving
        return self._worker.leaving or alone

    def hear_leavers(self) -> None:
        """Have a `DistributedDataParallel` that averages in the warm-up, and sends no header, ask
        every few steps whether a worker was asked to leave. All workers must call this."""
        self._worker.hears_leavers = True

    @property
    def unsynced_steps(self) -> int:
        """Steps of this worker that no sync has sent."""
        at = self._worker.at
        return at.clock - min(at.sent_at) if at.has_anchor else 0

    def __del__(self) -> None:
        unsynced = self.__dict__.get("_unsynced")  # it is missing if building failed
        if unsynced is not None and not sys.is_finalizing():
            unsynced.warn(self)

    def on(self, kind: type[Event], listener: Callable[[Any], None]) -> Handle:
        """Call `listener(event)` at every later event of this kind.

        Args:
            kind: `palsgd.events.Synced`, `Averaged`, `Mixed`, `Sent` or `IntervalChosen`.
            listener: called with the event, a frozen record.

        Returns:
            A handle whose `remove()` removes the listener.
        """
        return self._worker.books.listeners.on(kind, listener)

    def after_exchange(self, callback: Callable[[], None]) -> tuple[Handle, Handle]:
        """Call `callback()` after every later exchange. Deprecated: use `on`."""
        return (
            self.on(Averaged, lambda event: callback()),
            self.on(Synced, lambda event: callback() if event.completes else None),
        )

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
        changes = self._worker.changes
        return None if changes is None else changes.outer

    @property
    def outer_scheduler(self) -> Any:
        """The scheduler of the outer learning rate, or None."""
        changes = self._worker.changes
        return None if changes is None else changes.outer_scheduler

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
    def joined_at(self) -> int | None:
        """The clock at which the other workers let this one in; None if it was there from the
        beginning."""
        return self._driver.joined_at

    @property
    def gradient_steps(self) -> int:
        """Gradient steps so far."""
        return self._worker.at.gradient_steps

    @property
    def rounds(self) -> int:
        """Rounds completed, each with its sync."""
        return self._worker.at.rounds

    @property
    def may_save(self) -> bool:
        """Do all workers that have taken as many gradient steps as this one have the same syncs
        behind them? States that all workers save after the same iteration can be loaded together
        only then. It is always True with `draws="balanced"` or `"shared"`, and costs no message.
        With `draws="paced"` workers take unequally many iterations to a sync, and it is True right
        after a sync: there all workers may save."""
        return self._worker.course.may_save

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
        self._worker.books.meter.watch.catch_up()
        return self._worker.ledger

    def eval(self) -> None:
        """Show the global model: until `train()`, the model holds the global weights and buffers,
        and `step()` is refused. An inner optimizer that has `train()` and `eval()` itself is put
        into evaluation mode. For a method whose workers have no common anchor the global model
        takes a message, so all workers must call this."""
        self._evaluation.begin()

    def train(self) -> None:
        """Go back to the local model after `eval()`, bit for bit."""
        self._evaluation.end()

    @contextmanager
    def anchor_weights(self) -> Iterator[nn.Module]:
        """Inside, the model holds the global weights and buffers. On leaving, the local weights and
        buffers are restored. For a method whose workers have no common anchor the global model
        takes a message, so all workers must call this."""
        self._evaluation.warn_of_stale_buffers()
        with self._evaluation.inside():
            yield self.model

    def training_state(self) -> AbstractContextManager[None]:
        """Inside, the model and the inner optimizer are as training left them, also after
        `eval()`."""
        return self._evaluation.interrupted()

    def recompute_buffers(
        self,
        batches: Iterable[Any],
        forward: Callable[[nn.Module, Any], Any] = lambda model, batch: model(batch),
    ) -> None:
        """Compute the global model's normalization statistics by forward passes over `batches`, and
        average them over the workers. All workers must call this."""
        buffers = self._worker.warmup.buffers
        with self._evaluation.inside(), torch.no_grad():
            buffers.recompute(self.model, batches, forward)
            self._driver.run(average_buffers(self._worker))

    # -- state ---------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """A snapshot of the whole state except the model, in the form of any torch optimizer's. It
        costs the memory of a copy. Save model.state_dict() of each worker too. Hooks that were
        registered for it are called, as torch's optimizers do."""
        for hook in self._optimizer_state_dict_pre_hooks.values():
            hook(self)
        with self.training_state():
            state = save_state(self._parts())
        if "_unsynced" in vars(self):
            self._unsynced.saved_at = self.clock
        for post_hook in self._optimizer_state_dict_post_hooks.values():
            changed = post_hook(self, state)
            state = state if changed is None else changed
        return state

    def load_state_dict(self, state_dict: dict[str, Any], *, strict: bool = True) -> None:
        """Resume from `state_dict` bit for bit, also within a round. Load the model before.

        With `strict=True` the settings must be those under which the state was saved, the inner
        optimizer's initial hyper-parameters and the scheduler's included. With `strict=False` the
        settings are those of this optimizer, inner and outer ones alike, and progress and tensors
        those of the state. The learning rate stays at its point of the schedule. A sync under way
        is applied first. What no longer fits is left out, and one warning names it: residues of
        codecs under another number of workers, of fragments or another codec; the outer state and,
        with several workers, the inner one, if the clock lies in the new warm-up; the inner state
        of another class. With `sync_every="auto"` in place of a fixed H, H is measured anew.

        The state of another worker resumes from its global model, with a warning. The state of a
        plain optimizer is loaded into the inner one; the clock starts at 0, and the model is the
        anchor with which the local phase begins.

        Args:
            state_dict: what `state_dict()` returned, here or on another optimizer.
            strict: must the settings be equal?

        Raises:
            ValueError: the settings differ, or the state is of another model or release.
        """
        self._load(state_dict, strict=strict)

    def _load(
        self,
        state_dict: dict[str, Any],
        *,
        strict: bool,
        joining: Collection[int] | None = None,
    ) -> None:
        """`load_state_dict`. Given the workers that load another's state, also for another number
        of workers."""
        check_form(state_dict)
        state = dict(state_dict)  # a hook may replace entries of it
        for pre_hook in self._optimizer_load_state_dict_pre_hooks.values():
            changed = pre_hook(self, state)
            state = state if changed is None else changed
        # The model is loaded beside this state, so what it held before eval() must not come back.
        self._evaluation.forget()
        load_state(self._parts(), state, strict=strict, joining=joining)
        for hook in self._optimizer_load_state_dict_post_hooks.values():
            hook(self)

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        """A copy with copies of the model and the inner optimizer, as training left them. Hooks and
        listeners are not copied, as torch's optimizers do not copy theirs."""
        if self.transport.workers > 1:
            raise TypeError(
                f"a {type(self).__name__} of {self.transport.workers} workers cannot be copied, as "
                "the copy would exchange on the same links; build another one and load "
                "state_dict() into it, or use palsgd.checkpoint"
            )
        with self.training_state():
            copy = memo[id(self)] = type(self).__new__(type(self))
            kept = self._given | {
                "model": deepcopy(self.model, memo),
                "inner": deepcopy(self.inner, memo),
                "scheduler": None,
                "transport": self.transport,
                "group": None,
            }
            LocalOptimizer.__init__(copy, **kept)
            # the copy was built with present hyper-parameters, which are not the initial ones, and
            # gets its schedule below
            copy.config |= deepcopy(self.config)
            load_state(copy._parts(), deepcopy(save_state(self._parts())), strict=True)
        scheduler = self._worker.inner.scheduler
        memo |= {id(each.optimizer): proxy(copy) for each in weakly_held(scheduler)}
        copy.set_scheduler(deepcopy(scheduler, memo))
        copy.config |= deepcopy(self.config)
        copy._worker.course.end_at(self._worker.schedule.end)
        if "step" in vars(self):  # a scheduler has wrapped it, around the original's
            wrap_step(copy)
        for name in vars(self).keys() - vars(copy).keys():  # a subclass's own
            setattr(copy, name, deepcopy(getattr(self, name), memo))
        return copy

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise TypeError(
            f"a {type(self).__name__} cannot be pickled, as it holds the links to its peers; save "
            "its state_dict(), or use palsgd.checkpoint"
        )

    def _parts(self) -> Parts:
        return Parts(self._worker, self.transport, self.config)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        if hasattr(self, "_worker"):
            raise ValueError(
                "parameters cannot be added to a palsgd optimizer; add them to the inner optimizer "
                "and build a new one"
            )


_UNTRACED_STEP: Callable[..., Any] | None = None


def _untraced() -> Callable[..., Any]:
    """A step that torch.compile calls as it is: messages and clocks cannot be traced. It is made
    when the compiler is there, as importing that takes a second."""
    global _UNTRACED_STEP
    if _UNTRACED_STEP is None:
        _UNTRACED_STEP = torch.compiler.disable(LocalOptimizer._step)
    return _UNTRACED_STEP

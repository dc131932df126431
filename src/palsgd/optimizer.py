"""The optimizers a training loop sees: PALSGD and its three special cases."""

import math
import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from typing import Any, TypedDict, Unpack

import torch
from torch import nn
from torch.distributed import ProcessGroup
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from palsgd.buffers import Buffers
from palsgd.compression import find_codec
from palsgd.core import Core
from palsgd.draws import one_of, whole
from palsgd.errors import SyncError
from palsgd.interval import Auto, interval
from palsgd.joined import Joined
from palsgd.ledger import Ledger
from palsgd.method import Method
from palsgd.outer import OuterFactory, nesterov, plain_average
from palsgd.process_group import find_transport
from palsgd.pseudo_async import PseudoAsync
from palsgd.replica import Anchor, Replica
from palsgd.state import load_state, save_state
from palsgd.sync import Exchange
from palsgd.transport import Transport, ambient_transport, fulfil
from palsgd.warmup import gradient_sync


class Shared(TypedDict, total=False):
    """What every method's constructor takes beside its own settings."""

    buffers: str  # "average", "local" or "recompute": normalization statistics at a sync
    max_norm: float | None  # clip the gradient to this norm inside step(), after any averaging
    on_nonfinite: str  # "raise" or "skip": a worker whose model is not finite at a sync
    scheduler: Any  # an LRScheduler, or optimizer -> LRScheduler, stepped once per tick
    bucket_mb: float  # the largest message, in MiB
    compress: str | None  # "bf16", "int8", "int4", "topk:SHARE": what a sync sends
    delay: int  # steps that a sync has to travel, during which training goes on
    fragments: int  # parts of the model that are synced one after another within a round
    group: ProcessGroup | None  # the workers, if not all ranks
    transport: Transport | None  # instead of a process group


class LocalOptimizer(Optimizer):
    """An inner optimizer whose workers meet only now and then, by the rules of a `Method`."""

    def __init__(
        self,
        model: nn.Module,
        inner: Optimizer | Sequence[Optimizer],
        method: Method,
        outer: OuterFactory | None,
        *,
        buffers: str = "average",
        max_norm: float | None = None,
        on_nonfinite: str = "raise",
        scheduler: LRScheduler | Callable[[Optimizer], LRScheduler] | None = None,
        bucket_mb: float = 128.0,
        compress: str | None = None,
        delay: int = 0,
        fragments: int = 1,
        auto: Auto | None = None,
        group: ProcessGroup | None = None,
        transport: Transport | None = None,
    ):
        if isinstance(inner, (list, tuple)):
            inner = Joined(inner)
        if not isinstance(inner, Optimizer):
            raise ValueError(
                f"inner must be a torch optimizer, got {type(inner).__name__}; use for instance "
                "torch.optim.AdamW(model.parameters(), lr=1e-3)"
            )
        one_of("on_nonfinite", on_nonfinite, ("raise", "skip"))
        for name, value in (("max_norm", max_norm), ("bucket_mb", bucket_mb)):
            if value is not None and not (isinstance(value, (int, float)) and 0 < value < math.inf):
                raise ValueError(f"{name}={value!r} must be a number > 0")
        codec = find_codec(compress)
        _check_lag(method, auto, delay, fragments)
        self.model, self.inner = model, inner
        super().__init__(inner.param_groups, inner.defaults)
        self._share_inner()
        share = weakref.WeakMethod(self._share_inner)  # no cycle that keeps sockets open
        inner.register_load_state_dict_post_hook(lambda _: (share() or (lambda: None))())
        replica = Replica(model, inner)
        method.check(replica)
        self.transport = transport or ambient_transport() or find_transport(replica.params, group)
        self.outer = self._build_outer(replica, outer, fragments)
        self._core = Core(
            method=method,
            replica=replica,
            inner=inner,
            outer=self.outer,
            buffers=Buffers(model, buffers),
            transport=self.transport,
            gradient_sync=gradient_sync(model),
            skip_nonfinite=on_nonfinite == "skip",
            max_norm=max_norm,
            bucket_size=max(1, int(bucket_mb * 2**20) // replica.dtype.itemsize),
            codec=codec,
            delay=delay,
            auto=auto,
        )
        self._showing_anchor = False
        self.config = self._describe(on_nonfinite, max_norm) | {
            "compress": None if codec is None else codec.name,
            "delay": delay,
            "fragments": fragments,
            **({} if auto is None else {"sync_every": str(auto)}),
        }
        self.transport.agree(
            self.config
            | {
                "parameters": replica.describe(),
                "the model's buffers": self._core.buffers.describe(),
                "bucket_mb": bucket_mb,
                "gradients averaged by": type(self._core.gradient_sync).__name__,
            }
        )
        self._core.gradient_sync.switch(on=self._core.warming_up)
        self.set_scheduler(scheduler)
        if delay:
            self.transport.prepare(replica.device)

    @property
    def method(self) -> Method:
        """The rules, with the H in force: sync_every="auto" changes it."""
        return self._core.method

    def _share_inner(self) -> None:
        """Groups and state are the inner optimizer's own objects, so that schedulers, GradScaler
        and hooks act on the real ones whichever of the two they are given."""
        self.param_groups, self.state = self.inner.param_groups, self.inner.state

    def _build_outer(
        self, replica: Replica, outer: OuterFactory | None, fragments: int
    ) -> Optimizer | None:
        if outer is None:
            return None
        if fragments > 1 and any(isinstance(p, DTensor) for p in replica.params):
            raise ValueError(
                f"fragments={fragments} cut through tensors, which sharded parameters cannot bear; "
                "use fragments=1, with delay= to overlap"
            )
        replica.anchor = Anchor(replica, fragments)
        if not callable(outer):
            raise ValueError(f"outer={outer!r} is not a callable; use palsgd.nesterov(lr=0.2)")
        built = outer(replica.anchor.params)
        if not isinstance(built, Optimizer):
            raise ValueError(
                f"outer must be a callable that makes a torch optimizer from parameters, but gave "
                f"{type(built).__name__}; use palsgd.nesterov(lr=0.2) or "
                "lambda params: torch.optim.Adam(params, lr=1e-3)"
            )
        return built

    def _describe(self, on_nonfinite: str, max_norm: float | None) -> dict[str, Any]:
        """The settings that workers, and a saved state and its reader, must agree on."""
        return {
            "method": type(self).__name__,
            "workers": self.transport.workers,
            **asdict(self.method),  # type: ignore[call-overload]
            "inner": str(self.inner)
            if isinstance(self.inner, Joined)
            else type(self.inner).__name__,
            "outer": _signature(self.outer),
            "buffers": self._core.buffers.policy,
            "on_nonfinite": on_nonfinite,
            "max_norm": max_norm,
        }

    def set_scheduler(
        self, scheduler: LRScheduler | Callable[[Optimizer], LRScheduler] | None
    ) -> None:
        """Have `scheduler` stepped once per tick of the clock, mixing steps included."""
        if isinstance(scheduler, type) or (callable(scheduler) and not hasattr(scheduler, "step")):
            scheduler = scheduler(self)
        if scheduler is not None and not hasattr(scheduler, "step"):
            raise ValueError(
                f"scheduler={scheduler!r} is no scheduler; give an LRScheduler or a function that "
                "makes one from the optimizer"
            )
        if scheduler is not None:
            # A round may begin with mixing steps, which tick the scheduler before the first
            # inner step; torch would take that for calls in the wrong order and warn.
            scheduler.optimizer._opt_called = True  # type: ignore[union-attr]
        self._core.scheduler = scheduler

    # -- the training loop ---------------------------------------------------------------------

    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        """One gradient step, and every step up to the next one that needs a gradient."""
        if self._showing_anchor:
            raise RuntimeError(
                "step() inside anchor_weights(): leave the with block before training"
            )
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._drive(self._core.step())
        return loss

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.inner.zero_grad(set_to_none)

    def run_until(self, steps: int) -> None:
        """Training ends when the clock shows `steps`: sync there, even if a round is cut short."""
        self._core.end = steps
        self._drive(self._core.skip_idle_rounds())

    def after_exchange(self, callback: Callable[[], None] | None) -> None:
        """Have `callback()` called after every exchange with the other workers: each sync, each
        step of the warm-up."""
        self._core.after_exchange = callback

    @torch.no_grad()
    def _drive(self, exchange: Exchange) -> None:
        """Feed the core from the transport. A failure is raised inside the core, which puts back
        what it must."""
        try:
            request = next(exchange)
            while True:
                try:
                    sent = fulfil(self.transport, request)
                except RuntimeError as error:
                    request = exchange.throw(self._lost_peer(error))
                except BaseException as error:  # Ctrl-C, say
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
    def clock(self) -> int:
        """Steps so far, mixing steps included."""
        return self._core.clock

    @property
    def gradient_steps(self) -> int:
        return self._core.gradient_steps

    @property
    def rounds(self) -> int:
        """Rounds completed, each with its sync."""
        return self._core.rounds

    @property
    def synced(self) -> bool:
        """True right after a sync: the local model is the global one. With `delay` or `fragments`
        it may be ahead of it, and workers may pass several syncs in one step: what they do
        together at a sync belongs in `after_exchange`."""
        return self._core.synced

    @property
    def ledger(self) -> Ledger:
        self._core.watch.catch_up()
        return self._core.ledger

    @contextmanager
    def anchor_weights(self) -> Iterator[nn.Module]:
        """The model holds the global weights (and buffers) inside; what is done to them is
        undone on leaving."""
        if self._core.opened and not self._core.buffers.current:
            warnings.warn(
                "buffers='recompute' and they were not recomputed since the last sync: the global "
                "weights are shown with this worker's own buffers; call recompute_buffers(batches)",
                stacklevel=3,
            )
        with self._global_model():
            yield self.model

    @contextmanager
    def _global_model(self) -> Iterator[None]:
        core, held = self._core, self._core.replica.local() + self._core.buffers.all()
        with torch.no_grad():
            saved = [t.clone() for t in held]
            if core.opened:  # in the warm-up the model is the global one
                core.anchor.give()
                core.buffers.give()
        outside, self._showing_anchor = self._showing_anchor, True
        try:
            yield
        finally:
            self._showing_anchor = outside
            with torch.no_grad():
                torch._foreach_copy_(held, saved)
            core.restart_watch()

    def recompute_buffers(
        self,
        batches: Iterable[Any],
        forward: Callable[[nn.Module, Any], Any] = lambda model, batch: model(batch),
    ) -> None:
        """The global model's normalization statistics, from forward passes over `batches`,
        averaged over the workers: all of them must call."""
        buffers = self._core.buffers
        with self._global_model(), torch.no_grad():
            buffers.recompute(self.model, batches, forward)
            sent = buffers.encode(self.transport.worker, self._core.like)
            self.transport.average([sent])
            buffers.decode(sent, self.transport.workers, self.transport.workers)

    # -- state ---------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Everything but the model itself: save model.state_dict() of each worker beside it."""
        return save_state(self)

    def load_state_dict(self, state_dict: dict[str, Any], *, strict: bool = True) -> None:
        """Go on from `state_dict`, mid-round too, bit for bit. With `strict=False` the settings
        may differ from those it was saved under."""
        load_state(self, state_dict, strict=strict)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        if hasattr(self, "_core"):
            raise ValueError(
                "parameters cannot be added to a palsgd optimizer; add them to the inner optimizer "
                "and build a new one"
            )
        super().add_param_group(param_group)


class PALSGD(LocalOptimizer):
    """Pseudo-Asynchronous Local SGD: H steps between syncs, of which a share p only pulls the
    local model towards the last global one."""

    def __init__(
        self,
        model: nn.Module,
        inner: Optimizer | Sequence[Optimizer],
        *,
        sync_every: int | str | Auto,
        mix_prob: float,
        mix_rate: float,
        outer: OuterFactory | None = None,
        warmup_steps: int = 0,
        draws: str = "balanced",
        seed: int = 0,
        **shared: Unpack[Shared],
    ):
        first, auto = interval(sync_every)
        method = PseudoAsync(
            sync_every=first,
            warmup_steps=warmup_steps,
            mix_prob=mix_prob,
            mix_rate=mix_rate,
            draws=draws,
            seed=seed,
        )
        super().__init__(model, inner, method, outer or nesterov(), auto=auto, **shared)


class DiLoCo(PALSGD):
    """PALSGD that never mixes."""

    def __init__(
        self,
        model: nn.Module,
        inner: Optimizer | Sequence[Optimizer],
        *,
        sync_every: int | str | Auto,
        outer: OuterFactory | None = None,
        warmup_steps: int = 0,
        **shared: Unpack[Shared],
    ):
        super().__init__(
            model,
            inner,
            sync_every=sync_every,
            mix_prob=0.0,
            mix_rate=0.0,
            outer=outer,
            warmup_steps=warmup_steps,
            **shared,
        )


class LocalSGD(DiLoCo):
    """DiLoCo whose outer step is plain SGD with learning rate 1: local models are averaged."""

    def __init__(
        self,
        model: nn.Module,
        inner: Optimizer | Sequence[Optimizer],
        *,
        sync_every: int | str | Auto,
        warmup_steps: int = 0,
        **shared: Unpack[Shared],
    ):
        super().__init__(
            model,
            inner,
            sync_every=sync_every,
            outer=plain_average(),
            warmup_steps=warmup_steps,
            **shared,
        )


class DDP(LocalOptimizer):
    """A warm-up that never ends: gradients are averaged at every step."""

    def __init__(
        self, model: nn.Module, inner: Optimizer | Sequence[Optimizer], **shared: Unpack[Shared]
    ):
        for name, nothing in (("compress", None), ("delay", 0), ("fragments", 1)):
            if shared.get(name, nothing) not in (nothing, "none"):
                raise ValueError(
                    f"{name}={shared[name]!r} is about syncs, which DDP has none of; leave it out, "  # type: ignore[literal-required]
                    "or give torch's DistributedDataParallel a communication hook"
                )
        super().__init__(model, inner, Method(sync_every=1, warmup_steps=math.inf), None, **shared)


def _check_lag(method: Method, auto: Auto | None, delay: int, fragments: int) -> None:
    whole("fragments", fragments, least=1)
    whole("delay", delay)
    most, name = (auto.most, "most") if auto else (method.sync_every, "sync_every")
    if fragments > most:
        raise ValueError(
            f"fragments={fragments} are more than a round has steps ({name}={most}); use fewer"
        )
    if delay * fragments > most:
        raise ValueError(
            f"delay={delay} is longer than the {most // fragments} steps until the next sync "
            f"begins ({name}={most}, fragments={fragments}); use delay <= {most // fragments}"
        )


def _signature(optimizer: Optimizer | None) -> str:
    if optimizer is None:
        return "none"
    settings = {k: v for k, v in optimizer.defaults.items() if v is not None}
    return (
        f"{type(optimizer).__name__}({', '.join(f'{k}={v}' for k, v in sorted(settings.items()))})"
    )

"""PALSGD and its special cases, and the function that builds any other method."""

import inspect
import math
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

from torch import nn
from torch.optim import Optimizer

from palsgd import registry
from palsgd.auto_interval import Auto
from palsgd.checks import in_error
from palsgd.keywords import documented, explained, joined, named
from palsgd.local_optimizer import LocalOptimizer
from palsgd.method import Method
from palsgd.methods.palsgd import OfClock, PALSGDMethod
from palsgd.options import NOTHING, left_out
from palsgd.outer import OuterFactory, nesterov, plain_average
from palsgd.registry import Row

__all__ = ["DDP", "PALSGD", "DiLoCo", "LocalOptimizer", "LocalSGD", "builder_of"]


@documented
class PALSGD(LocalOptimizer):
    """Pseudo-Asynchronous Local SGD: H steps between syncs, of which a share p only pulls the
    local model towards the last global one.

    Args:
        model: the module that is trained, as the loop calls it.
        inner: the torch optimizer of each worker, or a list of them.
        sync_every: the number of steps between two syncs, H; or "auto".
        mix_prob: the share p of the steps that mix; 0 is DiLoCo.
        pull: how far the mixing steps of a round take a worker back to the last global model: a
            displacement at the start of a round shrinks to 1 - pull of itself, whatever the
            learning rate. A number in [0, 1] or a function of the clock; 0.5 if neither it nor
            `mix_rate` is given. The weight of a mixing step is 1 - (1 - pull)^(1 / (p H)).
        mix_rate: instead of `pull`, the paper's eta, a number or a function of the clock. A mixing
            step has the weight lr * eta / p, which must lie in [0, 1].

    Example:
        >>> import torch, palsgd
        >>> model = torch.nn.Linear(2, 1)
        >>> inner = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> opt = palsgd.PALSGD(model, inner, sync_every=4, transport=palsgd.Alone())
        >>> for batch in palsgd.until([torch.ones(1, 2)], opt, steps=8):
        ...     model(batch).sum().backward()
        ...     opt.step()
        ...     opt.zero_grad()
        >>> opt.clock, opt.rounds
        (8, 2)
    """

    def __init__(
        self,
        model: nn.Module,
        inner: Optimizer | Sequence[Optimizer],
        *,
        sync_every: int | str | Auto = 64,
        mix_prob: float = 0.1,
        pull: OfClock | None = None,
        mix_rate: OfClock | None = None,
        outer: OuterFactory | None = None,
        **options: Any,
    ):
        method = PALSGDMethod(mix_prob=mix_prob, mix_rate=mix_rate, pull=pull)
        super().__init__(
            model,
            inner,
            method,
            nesterov() if outer is None else outer,
            sync_every=sync_every,
            **options,
        )


@documented
class DiLoCo(LocalOptimizer):
    """An outer Nesterov step on the mean of H local steps: PALSGD that never mixes.

    Args:
        model: the module that is trained, as the loop calls it.
        inner: the torch optimizer of each worker, or a list of them.
        sync_every: the number of steps between two syncs, H; or "auto".

    Example:
        >>> import torch, palsgd
        >>> model = torch.nn.Linear(2, 1)
        >>> inner = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> opt = palsgd.DiLoCo(model, inner, sync_every=4, transport=palsgd.Alone())
    """

    def __init__(
        self,
        model: nn.Module,
        inner: Optimizer | Sequence[Optimizer],
        *,
        sync_every: int | str | Auto = 64,
        outer: OuterFactory | None = None,
        **options: Any,
    ):
        super().__init__(
            model,
            inner,
            Method(),
            nesterov() if outer is None else outer,
            sync_every=sync_every,
            **options,
        )


@documented
class LocalSGD(LocalOptimizer):
    """The local models are averaged every H steps: DiLoCo whose outer step is plain SGD with
    learning rate 1.

    Args:
        model: the module that is trained, as the loop calls it.
        inner: the torch optimizer of each worker, or a list of them.
        sync_every: the number of steps between two syncs, H; or "auto".

    Example:
        >>> import torch, palsgd
        >>> model = torch.nn.Linear(2, 1)
        >>> inner = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> opt = palsgd.LocalSGD(model, inner, sync_every=4, transport=palsgd.Alone())
    """

    refused: ClassVar = {
        "outer": "LocalSGD averages and has no outer=; use palsgd.DiLoCo(outer=...)",
    }

    def __init__(
        self,
        model: nn.Module,
        inner: Optimizer | Sequence[Optimizer],
        *,
        sync_every: int | str | Auto = 64,
        **options: Any,
    ):
        super().__init__(model, inner, Method(), plain_average(), sync_every=sync_every, **options)


@documented
class DDP(LocalOptimizer):
    """A warm-up that never ends: gradients are averaged at every step.

    Args:
        model: the module that is trained, as the loop calls it.
        inner: the torch optimizer of each worker, or a list of them.

    It has no rounds, so `sync_every`, `warmup_steps`, `outer`, `outer_scheduler`, `compress`,
    `delay`, `fragments`, `blend` and `offload` are refused.

    Example:
        >>> import torch, palsgd
        >>> model = torch.nn.Linear(2, 1)
        >>> inner = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> opt = palsgd.DDP(model, inner, transport=palsgd.Alone())
    """

    refused: ClassVar = {
        name: f"DDP has no {name}=; it averages gradients at every step"
        for name in ("outer", "sync_every", "warmup_steps")
    }

    def __init__(self, model: nn.Module, inner: Optimizer | Sequence[Optimizer], **options: Any):
        for name in ("compress", "delay", "fragments", "blend", "outer_scheduler", "offload"):
            given = options.get(name, NOTHING.get(name))
            if not left_out(name, given) and not (isinstance(given, str) and given == "none"):
                raise ValueError(
                    f"{name}={in_error(given)} is about syncs, which DDP has none of; leave it "
                    "out, or give torch's DistributedDataParallel a communication hook"
                )
        super().__init__(model, inner, Method(), None, warmup_steps=math.inf, **options)


def builder_of(row: Row) -> Callable[..., LocalOptimizer]:
    """The function of `palsgd.methods` that builds a method's optimizer."""
    if row.name in registry.names() and row.title in __all__:
        return globals()[row.title]

    def build(
        model: nn.Module, inner: Optimizer | Sequence[Optimizer], **settings: Any
    ) -> LocalOptimizer:
        own = {name: settings.pop(name) for name in row.settings() if name in settings}
        if row.outer is not None and not row.fixed_outer:
            settings.setdefault("outer", row.outer())
        return LocalOptimizer(model, inner, row.method(**own), **settings)

    build.__name__ = build.__qualname__ = row.title
    summary = row.summary[0].upper() + row.summary[1:]
    build.__doc__ = explained(f"{summary}.\n\n{inspect.getdoc(row.method)}")
    return named(build, _signature_of(row))


def _signature_of(row: Row) -> inspect.Signature:
    """Model, inner optimizer, the method's own settings, and the options that it takes."""
    shared = inspect.signature(LocalOptimizer)
    first = [shared.parameters[name] for name in ("model", "inner")]
    own = inspect.signature(row.method).parameters.values()
    signature = shared.replace(parameters=[*first, *own])
    return joined(signature, shared, {"method", *(["outer"] if row.fixed_outer else [])})

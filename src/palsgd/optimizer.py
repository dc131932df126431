"""PALSGD and its special cases, and the function that builds any other method."""

import inspect
import math
from collections.abc import Callable, Sequence
from typing import Any

from torch import nn
from torch.optim import Optimizer

from palsgd.auto_interval import Auto
from palsgd.local_optimizer import LocalOptimizer
from palsgd.method import Method
from palsgd.methods.palsgd import PALSGDMethod
from palsgd.options import OPTIONS, documented
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
        mix_prob: the share p of the steps that mix.
        mix_rate: eta. A mixing step has the weight lr * eta / p, which must lie in [0, 1].

    Example:
        >>> import torch, palsgd
        >>> model = torch.nn.Linear(2, 1)
        >>> inner = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> opt = palsgd.PALSGD(
        ...     model, inner, sync_every=4, mix_prob=0.25, mix_rate=1.0, transport=palsgd.Alone()
        ... )
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
        sync_every: int | str | Auto,
        mix_prob: float,
        mix_rate: float,
        outer: OuterFactory | None = None,
        **options: Any,
    ):
        method = PALSGDMethod(mix_prob=mix_prob, mix_rate=mix_rate)
        super().__init__(
            model, inner, method, outer or nesterov(), sync_every=sync_every, **options
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
        sync_every: int | str | Auto,
        outer: OuterFactory | None = None,
        **options: Any,
    ):
        super().__init__(
            model, inner, Method(), outer or nesterov(), sync_every=sync_every, **options
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

    fixed_outer = True

    def __init__(
        self,
        model: nn.Module,
        inner: Optimizer | Sequence[Optimizer],
        *,
        sync_every: int | str | Auto,
        **options: Any,
    ):
        if "outer" in options:
            raise TypeError("LocalSGD averages and has no outer=; use palsgd.DiLoCo(outer=...)")
        super().__init__(model, inner, Method(), plain_average(), sync_every=sync_every, **options)


@documented
class DDP(LocalOptimizer):
    """A warm-up that never ends: gradients are averaged at every step.

    Args:
        model: the module that is trained, as the loop calls it.
        inner: the torch optimizer of each worker, or a list of them.

    It has no rounds, so `sync_every`, `warmup_steps`, `outer`, `compress`, `delay`, `fragments`
    and `offload` are refused.

    Example:
        >>> import torch, palsgd
        >>> model = torch.nn.Linear(2, 1)
        >>> inner = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> opt = palsgd.DDP(model, inner, transport=palsgd.Alone())
    """

    fixed_outer = True

    def __init__(self, model: nn.Module, inner: Optimizer | Sequence[Optimizer], **options: Any):
        for name, nothing in (
            ("compress", None),
            ("delay", 0),
            ("fragments", 1),
            ("offload", False),
        ):
            if options.get(name, nothing) not in (nothing, "none"):
                raise ValueError(
                    f"{name}={options[name]!r} is about syncs, which DDP has none of; leave it "
                    "out, or give torch's DistributedDataParallel a communication hook"
                )
        for name in ("outer", "sync_every", "warmup_steps"):
            if name in options:
                raise TypeError(f"DDP has no {name}=; it averages gradients at every step")
        super().__init__(model, inner, Method(), None, warmup_steps=math.inf, **options)


def builder_of(row: Row) -> Callable[..., LocalOptimizer]:
    """The function of `palsgd.methods` that builds a method's optimizer."""
    public = globals().get(row.title)
    if public is not None:
        return public

    def build(
        model: nn.Module, inner: Optimizer | Sequence[Optimizer], **settings: Any
    ) -> LocalOptimizer:
        own = {name: settings.pop(name) for name in row.settings() if name in settings}
        if row.outer is not None and not row.fixed_outer:
            settings.setdefault("outer", row.outer())
        return LocalOptimizer(model, inner, row.method(**own), **settings)

    build.__name__ = build.__qualname__ = row.title
    build.__doc__ = (
        f"{row.summary}.\n\nSettings of its own: {', '.join(row.settings()) or 'none'}.\n"
    )
    build.__doc__ += f"{row.method.__doc__ or ''}\n\n{inspect.cleandoc(OPTIONS)}"
    return build

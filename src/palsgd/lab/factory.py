"""Builds optimizers, schedules and precision from settings."""

import math
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

import palsgd
from palsgd import registry
from palsgd.lab.methods import own_settings, takes_outer
from palsgd.lab.settings import Settings
from palsgd.optimizer import builder_of
from palsgd.outer import OuterFactory


def build_optimizer(
    settings: Settings, steps: int, model: nn.Module, group: ProcessGroup | None = None
) -> palsgd.LocalOptimizer:
    """The method over its inner optimizer, with the schedule stepped by the clock. `group` has one
    rank of every worker; None: every rank is a worker."""
    shared: dict[str, Any] = {
        "group": group,
        "buffers": settings.buffers,
        "max_norm": settings.max_norm,
        "scheduler": partial(LambdaLR, lr_lambda=partial(learning_rate_factor, settings, steps)),
    }
    row = registry.row(settings.method)
    if row.rounds:
        names = ("sync_every", "warmup_steps", "compress", "delay", "fragments", "seed")
        shared |= {name: getattr(settings, name) for name in names}
        if row.mixes:
            shared["draws"] = settings.draws
        if takes_outer(row):
            shared["outer"] = outer_optimizer(settings)
    build = builder_of(row)
    return build(model, inner_optimizer(settings, model), **own_settings(settings), **shared)


def inner_optimizer(settings: Settings, model: nn.Module) -> Optimizer:
    params = [p for p in model.parameters() if p.requires_grad]
    common: dict[str, Any] = {"lr": settings.lr, "weight_decay": settings.weight_decay}
    if settings.inner == "sgd":
        return torch.optim.SGD(params, momentum=settings.momentum, **common)
    kind = torch.optim.AdamW if settings.inner == "adamw" else torch.optim.Adam
    return kind(params, fused=True, **common)


def outer_optimizer(settings: Settings) -> OuterFactory:
    lr, momentum = settings.outer_lr, settings.outer_momentum
    if settings.outer == "nesterov":
        return palsgd.nesterov(lr=lr, momentum=momentum)
    if settings.outer == "sgd":
        return partial(torch.optim.SGD, lr=lr, momentum=momentum)
    return partial(torch.optim.Adam, lr=lr)


def learning_rate_factor(settings: Settings, steps: int, clock: int) -> float:
    """Linear warm-up, then constant or half a cosine down to zero."""
    if clock < settings.lr_warmup_steps:
        return (clock + 1) / (settings.lr_warmup_steps + 1)
    if settings.schedule == "constant":
        return 1.0
    done = (clock - settings.lr_warmup_steps) / max(1, steps - settings.lr_warmup_steps)
    return 0.5 * (1 + math.cos(math.pi * min(1.0, done)))


def low_precision(
    settings: Settings, device: torch.device
) -> Callable[[], AbstractContextManager[Any]]:
    """A function that makes a new context for each forward pass. It also allows TF32 for fp32
    products if the settings ask for it."""
    torch.backends.cuda.matmul.allow_tf32 = settings.precision != "fp32"
    torch.backends.cudnn.allow_tf32 = settings.precision != "fp32"
    if settings.precision == "bf16":
        return partial(torch.autocast, device.type, torch.bfloat16)
    return nullcontext


class MeanNorm:
    """Keeps the norm of the mean displacement of each sync, read from the outer optimizer's
    gradients."""

    def __init__(self, opt: palsgd.LocalOptimizer):
        self.all: list[Tensor] = []
        if opt.outer is not None:
            opt.outer.register_step_pre_hook(self._look)

    def _look(self, outer: Optimizer, args: Any, kwargs: Any) -> None:
        means = [p.grad for group in outer.param_groups for p in group["params"]]
        norms = torch._foreach_norm([g for g in means if g is not None and g.numel()])
        self.all.append(torch.stack([n.double() for n in norms]).norm())

    def take(self) -> float | None:
        """The norm at the last sync; None if there was no sync since the last call."""
        norms, self.all = self.all, []
        return float(norms[-1]) if norms else None


def agreement(mean_norm: float | None, distances: list[float]) -> float | None:
    """The mean cosine between workers' outer gradients d_k and their mean d, each weighted by its
    length: sum_k |d_k| cos_k / sum_k |d_k| = sum_k <d_k, d> / (|d| sum_k |d_k|), and as the d_k
    sum up to K d, that is |d| over the mean of |d_k|."""
    total = sum(distances)
    return None if mean_norm is None or not total else mean_norm * len(distances) / total

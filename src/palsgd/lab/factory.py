"""Builds optimizers, schedules and precision from settings."""

import math
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

import palsgd
from palsgd import registry
from palsgd.lab.methods import method_of, own_settings, takes_outer
from palsgd.lab.rounds import ChangingRounds, round_lengths
from palsgd.lab.settings import IN_EPOCHS, Settings
from palsgd.optimizer import builder_of
from palsgd.outer import OuterFactory


def build_optimizer(
    settings: Settings,
    steps: int,
    model: nn.Module,
    group: ProcessGroup | None = None,
    transport: palsgd.Transport | None = None,
) -> palsgd.LocalOptimizer:
    """The method over its inner optimizer, with the schedule stepped by the clock. `group` has one
    rank of every worker; None: every rank is a worker, or the `transport` knows."""
    shared: dict[str, Any] = {
        "group": group,
        "transport": transport,
        "buffers": settings.buffers,
        "max_norm": settings.max_norm,
        "scheduler": partial(LambdaLR, lr_lambda=partial(learning_rate_factor, settings, steps)),
    }
    row = registry.row(settings.method)
    if row.rounds:
        names = ("warmup_steps", "compress", "delay", "fragments", "seed")
        shared |= {name: getattr(settings, name) for name in names}
        if row.mixes or settings.draws == "paced":
            shared["draws"] = settings.draws
            shared["speeds"] = settings.worker_speeds
        if takes_outer(row):
            shared["outer"] = outer_optimizer(settings)
            if settings.outer_schedule != "constant":
                factor = outer_learning_rate_factor(settings, steps)
                shared["outer_scheduler"] = partial(LambdaLR, lr_lambda=factor)
    inner = inner_optimizer(settings, model)
    if row.rounds and settings.rounds_differ:
        return _with_changing_rounds(settings, steps, model, inner, shared)
    if row.rounds:
        shared["sync_every"] = settings.sync_every
    return builder_of(row)(model, inner, **own_settings(settings, steps), **shared)


def _with_changing_rounds(
    settings: Settings, steps: int, model: nn.Module, inner: Optimizer, shared: dict[str, Any]
) -> palsgd.LocalOptimizer:
    row, lengths = registry.row(settings.method), lengths_of_rounds(settings, steps)
    if row.outer is not None and not row.fixed_outer:
        shared.setdefault("outer", row.outer())
    rounds = ChangingRounds(rule=str(settings.sync_every), lengths=lengths)
    method = [method_of(settings, steps), rounds]
    return palsgd.LocalOptimizer(model, inner, method, sync_every=lengths[0], **shared)


def inner_optimizer(settings: Settings, model: nn.Module) -> Optimizer:
    params = [p for p in model.parameters() if p.requires_grad]
    common: dict[str, Any] = {"lr": settings.lr, "weight_decay": settings.weight_decay}
    if settings.inner in ("sgd", "nesterov"):
        nesterov = settings.inner == "nesterov" and settings.momentum != 0
        # On a GPU one pass over VGG-16's 134 M weights in place of four.
        common["fused"] = any(p.is_cuda for p in params) or None
        return torch.optim.SGD(params, momentum=settings.momentum, nesterov=nesterov, **common)
    kind = torch.optim.AdamW if settings.inner == "adamw" else torch.optim.Adam
    return kind(params, fused=True, **common)


def outer_optimizer(settings: Settings) -> OuterFactory:
    common: dict[str, Any] = {
        "lr": settings.outer_lr,
        "weight_decay": settings.outer_weight_decay,
        "fused": True,
    }
    if settings.outer in ("adam", "adamw"):
        kind = torch.optim.AdamW if settings.outer == "adamw" else torch.optim.Adam
        return partial(kind, **common)
    momentum = outer_momentum(settings)
    nesterov = settings.outer == "nesterov" and momentum != 0  # torch refuses it without momentum
    return partial(torch.optim.SGD, momentum=momentum, nesterov=nesterov, **common)


def outer_momentum(settings: Settings) -> float:
    """That of the outer optimizer; 0 for those that have none."""
    return settings.outer_momentum if settings.outer in ("nesterov", "sgd_m") else 0.0


def learning_rate(settings: Settings, steps: int, clock: int) -> float:
    return settings.lr * learning_rate_factor(settings, steps, clock)


def learning_rate_factor(settings: Settings, steps: int, clock: int) -> float:
    """Linear warm-up, then the schedule. A cosine begins where the warm-up ends; the steps of
    schedule=step count from the beginning of the run."""
    _check_in_steps(settings)
    warmup = settings.lr_warmup_steps
    if clock < warmup:
        return (clock + 1) / (warmup + 1)
    return _factor(settings, settings.schedule, steps, clock)


def outer_learning_rate_factor(settings: Settings, steps: int) -> Callable[[int], float]:
    """A function of the round: the schedule at the step with which the round begins. At the step
    with which it ends, a cosine would be 0 for the last round."""
    _check_in_steps(settings)
    starts = _round_starts(settings, steps)
    return lambda round: _factor(settings, settings.outer_schedule, steps, starts(round))


def _round_starts(settings: Settings, steps: int) -> Callable[[int], int]:
    first = settings.warmup_steps
    if not settings.rounds_differ:
        return lambda round: first + round * int(settings.sync_every)
    starts = list(accumulate(lengths_of_rounds(settings, steps), initial=first))
    return lambda round: starts[min(round, len(starts) - 1)]


def _factor(settings: Settings, schedule: str, steps: int, clock: int) -> float:
    if schedule == "constant":
        return 1.0
    if schedule == "step" and settings.schedule_shares:
        passed = sum(clock >= share * steps for share in settings.schedule_shares)
        return settings.schedule_factor**passed
    if schedule == "step":
        assert settings.schedule_every is not None
        return settings.schedule_factor ** (clock // settings.schedule_every)
    warmup = settings.lr_warmup_steps
    done = (clock - warmup) / max(1, steps - warmup)
    return 0.5 * (1 + math.cos(math.pi * min(1.0, max(0.0, done))))


def _check_in_steps(settings: Settings) -> None:
    for name, in_epochs in IN_EPOCHS[1:]:
        if getattr(settings, in_epochs) and not getattr(settings, name):
            raise ValueError(
                f"{in_epochs}={getattr(settings, in_epochs):g} is not known in steps; use "
                "settings.in_steps(examples)"
            )


def lengths_of_rounds(settings: Settings, steps: int) -> tuple[int, ...]:
    """H of every round, where it changes with the clock."""
    return round_lengths(settings, steps, partial(learning_rate, settings, steps))


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

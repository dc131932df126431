"""The settings of an optimizer that must be equal on all workers, and in a saved state and its
reader."""

from typing import Any

from torch import nn
from torch.optim import Optimizer

from palsgd.agreement import by_name, inner_settings, program_settings
from palsgd.inner import ChainedOptimizer
from palsgd.options import Options
from palsgd.outer import described
from palsgd.transports.transport import Transport
from palsgd.worker import Worker


def settings_of(
    title: str, worker: Worker, transport: Transport, options: Options
) -> dict[str, Any]:
    """The settings that a saved state has. `title` is the name of the method."""
    inner, changes = worker.inner.optimizer, worker.changes
    return {
        "method": title,
        "workers": "elastic" if transport.elastic else transport.workers,
        **options.as_config(),
        "inner": str(inner) if isinstance(inner, ChainedOptimizer) else type(inner).__name__,
        "inner_settings": inner_settings(inner),
        "outer": "none" if changes is None else _signature(changes.outer),
        "outer_scheduler": None if changes is None else described(changes.outer_scheduler),
    }


def agree(
    settings: dict[str, Any], model: nn.Module, worker: Worker, transport: Transport, **sizes: Any
) -> None:
    """Raise unless the workers have equal settings. `sizes` are those that a saved state and its
    reader need not have in common."""
    compared = settings | {
        "parameters": worker.inner.replica.describe(),
        "the model's buffers": worker.warmup.buffers.describe(),
        **sizes,
        "same_data": not worker.warmup.guard.compares_work,
        "gradients averaged by": type(worker.warmup.gradient_sync).__name__,
    }
    compared |= by_name(compared.pop("inner_settings"))
    if not transport.shares_code:
        compared |= program_settings(model)
    transport.agree(compared)


def _signature(optimizer: Optimizer) -> str:
    settings = {k: v for k, v in optimizer.defaults.items() if v is not None}
    return (
        f"{type(optimizer).__name__}({', '.join(f'{k}={v}' for k, v in sorted(settings.items()))})"
    )

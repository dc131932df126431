"""What both engines save of models and optimizers, and how it is set again.

A simulation goes on bit for bit, so more is saved than between processes: whether the workers have
compared their data already. Resumed processes compare again, in a message more; resumed simulated
workers are the ones that were saved.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from palsgd.optimizer import LocalOptimizer
from palsgd.packing import compact


def tensors_of(model: nn.Module) -> dict[str, Tensor]:
    """All tensors of a model, those that its state_dict leaves out included."""
    named = [*model.named_parameters(), *model.named_buffers()]
    return {name: x.detach() for name, x in named}


@torch.no_grad()
def copy_tensors(saved: Mapping[str, Tensor], into: Mapping[str, Tensor]) -> None:
    """Set tensors in place, as their places in memory may matter to their users."""
    odd = sorted(set(saved) ^ set(into))
    if odd:
        raise ValueError(
            f"the checkpoint is of another model: {odd[0]} is only on one side; give the model "
            "with which the simulation began, or another checkpoint folder"
        )
    for name, x in into.items():
        if saved[name].shape != x.shape:
            raise ValueError(
                f"the checkpoint is of another model: {name} has the shape "
                f"{tuple(saved[name].shape)} there and {tuple(x.shape)} here; give the model with "
                "which the simulation began, or another checkpoint folder"
            )
        x.copy_(saved[name])


def optimizer_state(opt: LocalOptimizer, *, inner: bool = True) -> dict[str, Any]:
    """The state of a worker's optimizer. Unless `inner`, the tensors of the inner optimizer are
    left out, as they are in a stack."""
    warmup = opt._worker.warmup
    return {
        "state": compact(opt.state_dict(), inner=inner),
        "compared": warmup.compared,
        "awaits_gradient": warmup.guard.awaits_gradient,
        "gradient": warmup.guard.gradient,
    }


def load_optimizer(opt: LocalOptimizer, saved: Mapping[str, Any]) -> None:
    opt.load_state_dict(saved["state"])
    worker = opt._worker
    worker.position.due = False
    worker.warmup.compared = saved["compared"]
    worker.warmup.guard.awaits_gradient = saved["awaits_gradient"]
    worker.warmup.guard.gradient = saved["gradient"]


def cloned(value: Any, device: torch.device | None = None) -> Any:
    """Everything inside dicts, lists and tuples, with copies of the tensors on the device, as the
    tensors of a checkpoint may lie in the memory of its file."""
    if isinstance(value, Tensor):
        return value.to(device or value.device, copy=True)
    if isinstance(value, dict):
        return {key: cloned(each, device) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(cloned(each, device) for each in value)
    return value

"""Checks which models and optimizers can be stacked, and stacks losses and batches."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks
from torch.utils import _pytree as pytree

from palsgd.inner import has_step_hooks
from palsgd.optimizer import LocalOptimizer


class CannotVectorizeError(Exception):
    """A simulation cannot be stacked. The message is the reason, in one line."""


class LoopIsFasterError(CannotVectorizeError):
    """It could be, and would be slower than one worker after another."""


class UnequalBatchesError(RuntimeError):
    """The workers' batches differ in shape, so they cannot be stacked."""


class LossModule(nn.Module):
    """`loss(model, batch)` as a forward pass, so that functional_call can swap the weights in."""

    def __init__(self, model: nn.Module, loss: Callable[[nn.Module, Any], Tensor]):
        super().__init__()
        self.model, self._loss = model, loss
        # How it computes, beside the model: losses that differ take another time.
        self.likeness = str(getattr(loss, "likeness", None))

    def forward(self, batch: Any) -> Tensor:
        return self._loss(self.model, batch)


def check_stackable(model: nn.Module, opt: LocalOptimizer) -> None:
    """Refuse what the stacked program would ignore without an error."""
    inner, scheduler = opt.inner, opt._worker.inner.scheduler
    if opt._worker._syncer is not None and opt._worker.syncer.anchor.home.offloaded:
        raise CannotVectorizeError("offload=True keeps the anchor off the device")
    for name, each in (("the optimizer", opt), ("the inner optimizer", inner)):
        if has_step_hooks(each):
            raise CannotVectorizeError(f"{name} has step hooks")
    if _global_optimizer_pre_hooks or _global_optimizer_post_hooks:
        raise CannotVectorizeError("torch has step hooks for all optimizers")
    if opt.config.get("average_state"):
        raise CannotVectorizeError("average_state names tensors of the inner optimizer")
    if any(has_hooks(p) for p in model.parameters()):
        raise CannotVectorizeError("parameters have hooks")
    if len(list(model.named_modules(remove_duplicate=False))) > len(list(model.named_modules())):
        raise CannotVectorizeError("a module is registered under two names")
    if getattr(scheduler, "cycle_momentum", False):
        raise CannotVectorizeError(f"{type(scheduler).__name__} moves more than the learning rate")


def has_hooks(param: Tensor) -> bool:
    return bool(param._backward_hooks or param._post_accumulate_grad_hooks)  # type: ignore[attr-defined]


def clipped(grads: list[Tensor], max_norm: float) -> list[Tensor]:
    """Clip as torch.nn.utils.clip_grad_norm_ does, each worker by its own norm. It does not clip in
    place, as a gradient may be an expanded tensor."""
    norms = torch.stack([torch.linalg.vector_norm(g.reshape(len(g), -1), dim=1) for g in grads])
    scale = (max_norm / (torch.linalg.vector_norm(norms, dim=0) + 1e-6)).clamp(max=1.0)
    return [g * scale.to(g.dtype).view(-1, *[1] * (g.dim() - 1)) for g in grads]


def writable(gradient: Tensor) -> Tensor:
    """A gradient that rules may change: an expanded one is copied."""
    sizes = zip(gradient.shape, gradient.stride(), strict=True)
    return gradient.clone() if any(n > 1 and not s for n, s in sizes) else gradient


def first_line(error: Exception) -> str:
    return (str(error).strip() or repr(error)).splitlines()[0]


@contextmanager
def fastest_convolutions() -> Iterator[None]:
    """Inside, cuDNN tries its algorithms, as the stacked shapes never change and are unusual."""
    before = torch.backends.cudnn.benchmark
    torch.backends.cudnn.benchmark = True
    try:
        yield
    finally:
        torch.backends.cudnn.benchmark = before


def stacked_batch(batches: list[Any]) -> Any:
    """One batch whose leaves have the worker axis. It is moved to the device after stacking."""
    try:
        return pytree.tree_map(_stacked_leaf, *batches)
    except (RuntimeError, ValueError) as error:  # other shapes, or other keys
        raise UnequalBatchesError(first_line(error)) from error


def joined_batch(batches: list[Any]) -> Any:
    """One batch of batches that have the worker axis."""
    if len(batches) == 1:
        return batches[0]
    return pytree.tree_map(lambda *leaves: torch.cat(leaves), *batches)


def _stacked_leaf(*leaves: Any) -> Tensor:
    if not isinstance(leaves[0], Tensor):
        raise TypeError(f"a batch holds a {type(leaves[0]).__name__}; tensors alone can be stacked")
    return torch.stack(leaves)


def plain_attributes(module: nn.Module) -> dict[str, Any]:
    """The attributes of modules that are plain values, such as a count of calls, which a stacked
    program would increase once where K workers increase it K times."""
    return {
        f"{name}.{key}": value
        for name, each in module.named_modules()
        for key, value in vars(each).items()
        if isinstance(value, int | float | str | bool | None) and not key.startswith("__")
    }

"""The inner optimizer: several optimizers as one, and learning rates that are divided by the share
of gradient steps for one step."""

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import ReduceLROnPlateau

from palsgd.replica import Replica
from palsgd.sharding import local_tensor


class ChainedOptimizer(Optimizer):
    """Several inner optimizers as one (Muon takes matrices only, AdamW the rest). The groups and
    the state are those of the parts, in the order of the parts."""

    def __init__(self, parts: Sequence[Optimizer]):
        self.parts = list(parts)
        if not self.parts or not all(isinstance(part, Optimizer) for part in self.parts):
            kinds = ", ".join(type(part).__name__ for part in self.parts) or "none"
            raise ValueError(f"inner must be torch optimizers, got {kinds}; give one or a list")
        super().__init__([group for part in self.parts for group in part.param_groups], {})

    @property
    def state(self) -> defaultdict[Tensor, Any]:  # type: ignore[override]
        kept = {p: state for part in self.parts for p, state in part.state.items()}
        return defaultdict(dict, kept)

    @state.setter
    def state(self, value: Any) -> None:
        """Ignore the state that the base class sets, as each part has its own."""

    def step(self, closure: Callable[[], Any] | None = None) -> None:  # type: ignore[override]
        for part in self.parts:
            part.step()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        groups, first = list(state_dict["param_groups"]), 0
        if len(groups) != len(self.param_groups):
            raise ValueError(
                f"the state has {len(groups)} parameter groups, and the inner optimizers have "
                f"{len(self.param_groups)}; load it into optimizers of the same groups"
            )
        for part in self.parts:
            own = groups[first : first + len(part.param_groups)]
            keys = {key for group in own for key in group["params"]}
            state = {key: entry for key, entry in state_dict["state"].items() if key in keys}
            part.load_state_dict({"state": state, "param_groups": own})
            first += len(own)
        self.param_groups = [group for part in self.parts for group in part.param_groups]
        for hook in self._optimizer_load_state_dict_post_hooks.values():
            hook(self)

    def __repr__(self) -> str:
        return " + ".join(type(part).__name__ for part in self.parts)


class InnerStep:
    """The step of the inner optimizer, with the clipping before it and the scheduler after it."""

    def __init__(self, optimizer: Optimizer, replica: Replica, max_norm: float | None):
        self.optimizer, self.replica, self.max_norm = optimizer, replica, max_norm
        self.scheduler: Any = None  # stepped once per tick of the clock

    def rates(self) -> list[float]:
        """The learning rate of each parameter group."""
        return [float(group["lr"]) for group in self.optimizer.param_groups]

    def clip(self) -> None:
        if self.max_norm is not None:
            torch.nn.utils.clip_grad_norm_(self.replica.params, self.max_norm)

    def step(self, share: float) -> list[float]:
        """One step with the learning rates divided by `share`; returns them undivided."""
        rates = self.rates()
        if share == 1:
            self.optimizer.step()
        else:
            with divided_rates(self.optimizer, share):
                self.optimizer.step()
        return rates

    def tick(self) -> None:
        if self.scheduler is not None:
            self.scheduler.step()


def only_initialises(inner: Optimizer) -> bool:
    """Is this the step by which torch's state helpers make the state of a new optimizer: all
    learning rates 0, all gradients 0, no state yet? A schedule may begin with 0 too, but its
    gradients do not."""
    if inner.state or any(float(group["lr"]) for group in inner.param_groups):
        return False
    grads = [p.grad for group in inner.param_groups for p in group["params"] if p.requires_grad]
    return all(grad is not None and not local_tensor(grad).any() for grad in grads)


def check_scheduler(scheduler: Any, inner: Optimizer) -> None:
    """Raise for a scheduler that cannot be stepped with the clock, or that changes the learning
    rates of another optimizer."""
    if not hasattr(scheduler, "step"):
        raise ValueError(
            f"scheduler={scheduler!r} is no scheduler; give an LRScheduler or a function that "
            "makes one from the optimizer"
        )
    kind = type(scheduler).__name__
    if isinstance(scheduler, ReduceLROnPlateau):
        raise ValueError(
            f"scheduler={kind} needs a metric at every step, which the clock has not; leave it out "
            "and call its step(metric) after your evaluations"
        )
    bound = getattr(scheduler, "optimizer", None)
    own = {id(group) for group in inner.param_groups}
    if bound is not None and not own & {id(group) for group in bound.param_groups}:
        raise ValueError(
            f"scheduler={kind} is bound to another {type(bound).__name__}, whose learning rates "
            "are not those of inner; make it from the inner optimizer that is given here"
        )


# Entries of a parameter group that say how a step is computed, not what it computes, or that change
# during training.
_NO_SETTINGS = {"params", "lr", "initial_lr", "foreach", "fused", "capturable", "differentiable"}


def inner_settings(inner: Optimizer) -> list[dict[str, Any]]:
    """The hyper-parameters of each parameter group as they are at the start of training."""
    return [
        {
            "lr": float(group.get("initial_lr", group["lr"])),
            **{k: _comparable(v) for k, v in group.items() if k not in _NO_SETTINGS},
        }
        for group in inner.param_groups
    ]


def _comparable(value: Any) -> Any:
    """The value, if it is a number or a text, or numbers; else a text that describes it."""
    if isinstance(value, Tensor):
        return value.tolist()
    if isinstance(value, (list, tuple)):
        return [_comparable(each) for each in value]
    return value if value is None or isinstance(value, (bool, int, float, str)) else repr(value)


@contextmanager
def divided_rates(inner: Optimizer, share: float) -> Iterator[None]:
    """Inside, the learning rates of the groups are divided by `share`. On leaving, also by an
    error, each rate is set back, unless other code has changed it inside."""
    saved = [group["lr"] for group in inner.param_groups]
    divided = [lr / share for lr in saved]
    for group, lr in zip(inner.param_groups, divided, strict=True):
        group["lr"] = lr
    try:
        yield
    finally:
        for group, lr, inside in zip(inner.param_groups, saved, divided, strict=True):
            if group["lr"] is inside or group["lr"] == inside:
                group["lr"] = lr


def forget_nonfinite(inner: Optimizer) -> None:
    """Drop the inner state of every parameter whose state holds inf or nan, as it would make the
    next round's model inf or nan too."""
    for state in inner.state.values():
        tensors = [v for v in state.values() if isinstance(v, Tensor) and v.is_floating_point()]
        if not all(bool(t.isfinite().all()) for t in tensors):
            state.clear()

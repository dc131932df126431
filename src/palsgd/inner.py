"""The inner optimizer: several optimizers as one, and learning rates that are divided by the share
of gradient steps for one step."""

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from weakref import WeakKeyDictionary, WeakSet

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import ReduceLROnPlateau

from palsgd.replica import Replica

# Optimizers that exchange in every step: torch's own and ours. They are told by name, as importing
# torch's takes seconds.
COMMUNICATING = {"ZeroRedundancyOptimizer", "PostLocalSGDOptimizer", "LocalOptimizer"}


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

    def state_dict(self) -> dict[str, Any]:
        return {"parts": [part.state_dict() for part in self.parts]}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        for part, saved in zip(self.parts, state_dict["parts"], strict=True):
            part.load_state_dict(saved)
        self.param_groups = [group for part in self.parts for group in part.param_groups]
        for hook in self._optimizer_load_state_dict_post_hooks.values():
            hook(self)

    def __repr__(self) -> str:
        return " + ".join(type(part).__name__ for part in self.parts)


def parts_of(optimizer: Optimizer) -> list[Optimizer]:
    """The optimizers that an inner optimizer is made of."""
    return optimizer.parts if isinstance(optimizer, ChainedOptimizer) else [optimizer]


class Ownership:
    """Refuses the steps of an inner optimizer that no palsgd optimizer takes. It is shared by all
    that are built around it, and ends with the last of them."""

    def __init__(self) -> None:
        self.stepping = False  # is a palsgd optimizer taking the step?
        self.owners: WeakSet[InnerStep] = WeakSet()

    @classmethod
    def of(cls, optimizer: Optimizer) -> "Ownership":
        found = _OWNERSHIPS.get(optimizer)
        if found is None:
            found = _OWNERSHIPS[optimizer] = cls()
            optimizer.register_step_pre_hook(found.check)
        return found

    def check(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if self.stepping or not self.owners or _only_makes_state(optimizer):
            return
        kind = type(optimizer).__name__
        raise RuntimeError(
            f"the inner optimizer's own step() was called ({kind}), so the clock would stand "
            "still and nothing would be synced; call step() of the palsgd optimizer around it"
        )


_OWNERSHIPS: "WeakKeyDictionary[Optimizer, Ownership]" = WeakKeyDictionary()


def has_step_hooks(optimizer: Optimizer) -> bool:
    """Has an optimizer hooks beside the one that refuses steps by hand?"""
    hooks = [*optimizer._optimizer_step_pre_hooks.values()]
    hooks += optimizer._optimizer_step_post_hooks.values()
    return any(not isinstance(getattr(hook, "__self__", None), Ownership) for hook in hooks)


def _only_makes_state(optimizer: Optimizer) -> bool:
    """Does a step change nothing? torch's functions for distributed states take such a step, with
    learning rates of 0, to have the state made."""
    return not optimizer.state and all(float(g.get("lr", 1)) == 0 for g in optimizer.param_groups)


class InnerStep:
    """The step of the inner optimizer, with the clipping before it and the scheduler after it."""

    def __init__(self, optimizer: Optimizer, replica: Replica, max_norm: float | None):
        self.optimizer, self.replica, self.max_norm = optimizer, replica, max_norm
        self.scheduler: Any = None  # stepped once per tick of the clock
        self._owned = [Ownership.of(part) for part in parts_of(optimizer)]
        for ownership in self._owned:
            ownership.owners.add(self)

    def rates(self) -> list[float]:
        """The learning rate of each parameter group."""
        return [float(group["lr"]) for group in self.optimizer.param_groups]

    def clip(self) -> None:
        if self.max_norm is not None:
            torch.nn.utils.clip_grad_norm_(self.replica.params, self.max_norm)

    def step(self, share: float) -> list[float]:
        """One step with the learning rates divided by `share`; returns them undivided."""
        rates = self.rates()
        for ownership in self._owned:
            ownership.stepping = True
        try:
            if share == 1:
                self.optimizer.step()
            else:
                with divided_rates(self.optimizer, share):
                    self.optimizer.step()
        finally:
            for ownership in self._owned:
                ownership.stepping = False
        return rates

    def tick(self) -> None:
        if self.scheduler is not None:
            self.scheduler.step()


def check_communicates_not(inner: Optimizer) -> None:
    """Raise for an optimizer that exchanges with other workers in its step."""
    for each in getattr(inner, "parts", [inner]):
        kinds = {kind.__name__ for kind in type(each).__mro__}
        if kinds & COMMUNICATING:
            raise ValueError(
                f"inner={type(each).__name__} communicates in every step, which would undo the "
                "local steps; give the plain optimizer inside it, such as torch.optim.AdamW"
            )


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

"""The inner optimizer: several optimizers as one, and learning rates that are divided by the share
of gradient steps for one step."""

import inspect
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from copy import deepcopy
from typing import Any
from weakref import WeakKeyDictionary, WeakSet

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.optimizer import _global_optimizer_post_hooks

from palsgd.checks import in_error
from palsgd.outer import refuse_metric
from palsgd.replica import Replica
from palsgd.sharding import local_tensor

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
        self._check_apart()
        self._built = False
        super().__init__(self.param_groups, {})
        self._built = True

    def _check_apart(self) -> None:
        owner: dict[Tensor, Optimizer] = {}
        for part in self.parts:
            for p in (p for group in part.param_groups for p in group["params"]):
                if owner.setdefault(p, part) is not part:
                    raise ValueError(
                        f"some parameters appear in two inner optimizers, as one of shape "
                        f"{tuple(p.shape)} does; give each parameter to one of them"
                    )

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]
        return [group for part in self.parts for group in part.param_groups]

    @param_groups.setter
    def param_groups(self, groups: list[dict[str, Any]]) -> None:
        """Give each part its groups. The empty list that the base class sets is ignored."""
        if self._built:
            check_same_parameters(self.param_groups, groups)
            rest = iter(groups)
            for part in self.parts:
                part.param_groups = [next(rest) for _ in part.param_groups]

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        if self._built:  # the base class adds the parts' own groups
            raise ValueError(
                f"a group cannot be added to {self} as a whole; add it to one of the optimizers in "
                "the list, and build a new palsgd optimizer"
            )

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

    def __deepcopy__(self, memo: dict[int, Any]) -> "ChainedOptimizer":
        return ChainedOptimizer(deepcopy(self.parts, memo))

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
        if self.stepping or not self.owners or only_initialises(optimizer):
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


class InnerStep:
    """The step of the inner optimizer, with the clipping before it and the scheduler after it."""

    def __init__(self, optimizer: Optimizer, replica: Replica, max_norm: float | None):
        self.optimizer, self.replica, self.max_norm = optimizer, replica, max_norm
        self.scheduler: Any = None  # stepped once per tick of the clock
        self._owned = [Ownership.of(part) for part in parts_of(optimizer)]
        for ownership in self._owned:
            ownership.owners.add(self)

    def rates(self) -> list[float]:
        """The learning rate of each parameter group. A group that came after all was built has no
        tensors at a mixing step, which may be sooner than the sync that would refuse it."""
        groups = self.optimizer.param_groups
        if len(groups) != len(self.replica.initial_rates):
            self.replica.check_unchanged()
        return [float(group["lr"]) for group in groups]

    def clip(self) -> None:
        if self.max_norm is None:
            return
        params = self.replica.params
        if any(p.grad is not None and p.grad.is_sparse for p in params):
            _clip_values(params, self.max_norm)
        else:
            torch.nn.utils.clip_grad_norm_(params, self.max_norm)

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


@torch.no_grad()
def _clip_values(params: Sequence[Tensor], max_norm: float) -> None:
    """torch's clip_grad_norm_ on the values of the gradients. Older releases of torch have no norm
    of sparse gradients."""
    for param in params:
        if param.grad is not None and param.grad.is_sparse:
            param.grad = param.grad.coalesce()
    grads = [p.grad for p in params if p.grad is not None]
    values = [g._values() if g.is_sparse else g for g in grads]
    total = torch.stack([torch.linalg.vector_norm(v) for v in values]).norm()
    torch._foreach_mul_(values, (max_norm / (total + 1e-6)).clamp(max=1.0))


def checked_inner(inner: Any, wrapper: type[Optimizer]) -> Optimizer:
    """An optimizer, or a list of them, as one inner optimizer, or a ValueError that says why it
    cannot be one. `wrapper` is the class of those that have an inner optimizer themselves."""
    if isinstance(inner, (list, tuple)):
        inner = ChainedOptimizer(inner)
    if not isinstance(inner, Optimizer):
        raise ValueError(
            f"inner must be a torch optimizer, got {type(inner).__name__}; use for instance "
            "torch.optim.AdamW(model.parameters(), lr=1e-3)"
        )
    for part in parts_of(inner):
        if isinstance(part, wrapper):
            raise ValueError(
                f"inner={type(part).__name__} is a palsgd optimizer itself, so there would be two "
                "clocks and two anchors; give the torch optimizer inside it, its .inner"
            )
        closure = inspect.signature(type(part).step).parameters.get("closure")
        if closure is not None and closure.default is closure.empty:
            raise ValueError(
                f"inner={type(part).__name__} evaluates the loss several times in a step, and a "
                "step here takes the one gradient that it is given; use an optimizer whose step() "
                "needs no closure, such as torch.optim.AdamW"
            )
    check_communicates_not(inner)
    return inner


def check_communicates_not(inner: Optimizer) -> None:
    """Raise for an optimizer that exchanges with other workers in its step."""
    for each in getattr(inner, "parts", [inner]):
        kinds = {kind.__name__ for kind in type(each).__mro__}
        if kinds & COMMUNICATING:
            raise ValueError(
                f"inner={type(each).__name__} communicates in every step, which would undo the "
                "local steps; give the plain optimizer inside it, such as torch.optim.AdamW"
            )


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
    if not callable(getattr(scheduler, "step", None)):
        raise ValueError(
            f"scheduler={in_error(scheduler)} is no scheduler; give an LRScheduler or a function "
            "that makes one from the optimizer"
        )
    kind = type(scheduler).__name__
    refuse_metric("scheduler", scheduler)
    bound = getattr(scheduler, "optimizer", None)
    own = {id(group) for group in inner.param_groups}
    if bound is not None and not own & {id(group) for group in bound.param_groups}:
        raise ValueError(
            f"scheduler={kind} is bound to another {type(bound).__name__}, whose learning rates "
            "are not those of inner; make it from the inner optimizer that is given here"
        )


def check_same_parameters(
    groups: Sequence[dict[str, Any]], assigned: Sequence[dict[str, Any]]
) -> None:
    """Raise unless the assigned groups hold the parameters of the present ones, group by group."""
    mine, theirs = ([[id(p) for p in g["params"]] for g in each] for each in (groups, assigned))
    if mine != theirs:
        raise ValueError(
            f"param_groups were assigned {len(theirs)} group(s) with other parameters than the "
            f"{len(mine)} of the inner optimizer; assign groups of the same parameters, or build a "
            "new palsgd optimizer"
        )


# -- learning rates that are divided for one step ----------------------------------------------


@contextmanager
def divided_rates(inner: Optimizer, share: float) -> Iterator[None]:
    """Inside, the learning rates of the groups are divided by `share`. On leaving, also by an
    error, each rate is set back, unless other code has changed it inside."""
    divisions = [_Division(part, share) for part in getattr(inner, "parts", [inner])]
    try:
        yield
    finally:
        for division in divisions:
            division.end()


class _Division:
    """The divided learning rates of one optimizer.

    They are restored before the first hook that follows its step. A hook may step a scheduler, and
    some schedulers multiply the rate that they find in the group.
    """

    def __init__(self, optimizer: Optimizer, share: float):
        groups = optimizer.param_groups
        # each group with its rate and the divided one
        self._rates = [(group, group["lr"], group["lr"] / share) for group in groups]
        for group, _, divided in self._rates:
            group["lr"] = divided
        self._handle = None
        hooks: Any = optimizer._optimizer_step_post_hooks
        if hooks or _global_optimizer_post_hooks:
            self._handle = optimizer.register_step_post_hook(lambda *_: self._restore())
            hooks.move_to_end(self._handle.id, last=False)

    def end(self) -> None:
        self._restore()
        if self._handle is not None:
            self._handle.remove()

    def _restore(self) -> None:
        for group, lr, divided in self._rates:
            if group["lr"] is divided or group["lr"] == divided:
                group["lr"] = lr
        self._rates = []


def forget_nonfinite(inner: Optimizer) -> None:
    """Drop the inner state of every parameter whose state holds inf or nan, as it would make the
    next round's model inf or nan too."""
    for state in inner.state.values():
        tensors = [v for v in state.values() if isinstance(v, Tensor) and v.is_floating_point()]
        if not all(bool(t.isfinite().all()) for t in tensors):
            state.clear()

"""Learning-rate schedules seen from the clock: where they lead, and which of them lag behind it."""

import copy
import gc
import warnings
from collections.abc import Iterator, Mapping
from functools import wraps
from typing import Any
from weakref import ProxyType, WeakSet, proxy, ref

import torch
from torch.optim import SGD, Optimizer
from torch.optim.lr_scheduler import LRScheduler

from palsgd.checks import warn
from palsgd.inner import parts_of
from palsgd.method import Method
from palsgd.outer import described
from palsgd.schedule import Schedule

# Where a schedule stands, beside its settings.
_PROGRESS = ("last_epoch", "T_cur", "T_i")


def peak_rates(inner: Optimizer) -> list[float]:
    """The highest learning rate of each group that is known before training: the present one, and
    those that schedulers have written into the group."""
    names = ("lr", "initial_lr", "max_lr")
    return [max(float(group[n]) for n in names if n in group) for group in inner.param_groups]


def rates_ahead(scheduler: Any, opt: Optimizer, inner: Optimizer) -> Iterator[list[float]]:
    """The learning rates of the groups at this tick of the clock and at each later one, as far as a
    copy of the scheduler gives them. Without a scheduler they stay as they are."""
    groups, found = _copied_groups(inner), None
    if scheduler is not None:
        found = _copied_scheduler(scheduler, opt, inner, groups)
        if found is None:
            return
    shown = [groups[id(group)] for group in inner.param_groups]
    while True:
        yield [float(group["lr"]) for group in shown]
        if found is not None and not _stepped(found):
            return


def check_rates(
    method: Method, schedule: Schedule, clocks: range, ahead: Iterator[list[float]]
) -> None:
    """Raise if the method refuses the learning rates that a schedule leads to at these clocks."""
    for clock, rates in zip(clocks, ahead, strict=False):
        try:
            if not schedule.warms_up(clock):
                method.check_step(rates, clock, schedule.length(clock))
        except ValueError as refusal:
            raise ValueError(f"{refusal} (at clock {clock}, to which the settings lead)") from None


def _copied_groups(inner: Optimizer) -> dict[int, dict[str, Any]]:
    """Groups with the settings of the inner optimizer's, by the id of the group they stand for."""
    kept = {}
    for group in inner.param_groups:
        settings = {name: copy.deepcopy(v) for name, v in group.items() if name != "params"}
        kept[id(group)] = settings | {"params": [torch.zeros(1, requires_grad=True)]}
    return kept


def _copied_scheduler(
    scheduler: Any, opt: Optimizer, inner: Optimizer, groups: dict[int, dict[str, Any]]
) -> Any:
    """A copy of the scheduler that changes the copied groups. None if it cannot be copied."""
    stand_ins = {}
    for each in (opt, inner, *parts_of(inner)):
        stand_in = SGD([torch.zeros(1, requires_grad=True)], lr=0.0)
        stand_in.param_groups = [groups[id(group)] for group in each.param_groups]
        stand_ins[id(each)] = stand_in
    stand_ins |= {id(each.optimizer): stand_ins[id(opt)] for each in weakly_held(scheduler)}
    try:
        return copy.deepcopy(scheduler, stand_ins)
    except Exception:  # a scheduler of one's own may hold anything
        return None


def settings_in(scheduler: Any) -> str | None:
    """The settings of a schedule and of those inside it. None for one that a framework steps, and
    saves itself."""
    nested = [each for each in _nested(scheduler) if isinstance(each, LRScheduler)]
    if not nested or nested[0] is not scheduler:
        return None
    return " of ".join(str(described(each, but=_PROGRESS)) for each in nested)


def step_on(scheduler: Any, groups: list[dict[str, Any]], steps: int) -> bool:
    """Step a schedule so often, from the rates with which it stands now. Stepping alone gives the
    rates of every schedule, as some change the rate that they find. False if it ends before."""
    for group, rate in zip(groups, scheduler.get_last_lr(), strict=True):
        group["lr"] = rate
    return all(_stepped(scheduler) for _ in range(steps))


def steps_of(state: Mapping[str, Any]) -> int | None:
    """How often a schedule with this state was stepped; None if it does not say so."""
    inside = state.get("_schedulers")  # a ChainedScheduler has no count of its own
    found = state.get("last_epoch")
    if found is None and inside:
        first = inside[0]
        return steps_of(first if isinstance(first, Mapping) else first.state_dict())
    return found


def _stepped(scheduler: Any) -> bool:
    """Step a scheduler. False if it does not go on, as a OneCycleLR at its end."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            scheduler.step()
        except Exception:
            return False
    return True


def hold_weakly(scheduler: Any, opt: Optimizer) -> None:
    """Let a scheduler that an optimizer keeps refer to the optimizer by a proxy. A reference would
    close a cycle, which keeps the anchor in memory until the garbage collector runs."""
    for each in _nested(scheduler):
        if getattr(each, "optimizer", None) is opt:
            each.optimizer = proxy(opt)


def weakly_held(scheduler: Any) -> list[Any]:
    """The schedulers that refer to their optimizer by a proxy."""
    found = [each for each in _nested(scheduler) if hasattr(each, "optimizer")]
    return [each for each in found if isinstance(each.optimizer, ProxyType)]


def wrap_step(opt: Optimizer) -> None:
    """Wrap the step of a copied optimizer as torch's schedulers do, which look for that in their
    first step. Like theirs it refers to the optimizer weakly."""
    kind: Any = type(opt)
    owner = ref(opt)

    @wraps(kind.step)
    def step(*args: Any, **kwargs: Any) -> Any:
        return kind.step(owner(), *args, **kwargs)

    step._wrapped_by_lr_sched = True  # type: ignore[attr-defined]
    opt.step = step  # type: ignore[method-assign]


def _nested(scheduler: Any) -> list[Any]:
    """A scheduler and those inside it."""
    if scheduler is None:
        return []
    inside = getattr(scheduler, "_schedulers", [])
    return [scheduler, *(found for each in inside for found in _nested(each))]


class LagWatch:
    """Warns once if the loop steps a scheduler once per gradient step, so that it lags behind the
    clock, which counts steps without data too."""

    def __init__(self) -> None:
        self._bound: WeakSet[LRScheduler] | None = None
        self._next = 1  # the round after which it looks next; each time twice as far

    def look(
        self, opt: Optimizer, inner: Optimizer, *, clock: int, steps: int, rounds: int
    ) -> None:
        """`steps` are the gradient steps so far."""
        if rounds < self._next or clock == steps:
            return
        self._next = 2 * rounds
        if self._bound is None:
            self._bound = _bound_schedulers(opt, inner)
        for scheduler in self._bound:
            if _lags(scheduler, opt, inner, clock, steps):
                self._bound = WeakSet()
                warn(
                    f"{type(scheduler).__name__} was stepped {scheduler.last_epoch} times and the "
                    f"clock shows {clock}: it counts gradient steps, so it lags behind and will "
                    "end too early; give it to the palsgd optimizer as scheduler=, which steps it "
                    "once per step of the clock, and do not step it in the loop"
                )
                return


def _bound_schedulers(opt: Optimizer, inner: Optimizer) -> "WeakSet[LRScheduler]":
    """The schedulers of these optimizers. They know their optimizer, and the optimizer does not
    know them: it only shows that there is one, by a step() that it wrapped."""
    owners = [opt, inner, *parts_of(inner)]
    if not any(hasattr(vars(each).get("step"), "_wrapped_by_lr_sched") for each in owners):
        return WeakSet()
    # by type(), as some objects of torch warn when they are asked for their class
    found = (each for each in gc.get_objects() if issubclass(type(each), LRScheduler))
    return WeakSet(s for s in found if any(s.optimizer is each for each in owners))


def _lags(scheduler: Any, opt: Optimizer, inner: Optimizer, clock: int, steps: int) -> bool:
    """Was it stepped about as often as there were gradient steps (not once per epoch), and would
    other rates hold if it had been stepped with the clock? The step that the loop is about to take
    is counted in. A schedule that reads the clock itself gives the same rates either way."""
    taken = scheduler.last_epoch
    if not max(2, steps - 2) <= taken < clock - 1:
        return False
    ahead = list(zip(range(1 + clock - taken), rates_ahead(scheduler, opt, inner), strict=False))
    return len(ahead) > 2 and ahead[1][1] != ahead[-1][1]

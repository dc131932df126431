"""Outer optimizers, which change the anchor at a sync by the mean displacement."""

import inspect
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from palsgd.checks import below, check_number, in_error

OuterFactory = Callable[[Iterable[torch.nn.Parameter]], Optimizer]
OuterScheduler = LRScheduler | Callable[[Optimizer], LRScheduler]


def nesterov(lr: float = 0.7, momentum: float = 0.5) -> OuterFactory:
    """SGD with Nesterov momentum, the outer optimizer of DiLoCo and PALSGD.

    Args:
        lr: the outer learning rate.
        momentum: the outer momentum; with 0 it is plain SGD.

    Returns:
        A function that makes the optimizer from the anchor's parameters, for `outer=`.

    Raises:
        ValueError: `lr` or `momentum` is no number >= 0.

    Example:
        >>> import torch, palsgd
        >>> palsgd.nesterov(lr=0.2)([torch.nn.Parameter(torch.zeros(2))]).defaults["lr"]
        0.2
    """
    lr = check_number("lr", lr, "a number >= 0", low=below(0.0))
    momentum = check_number("momentum", momentum, "a number >= 0", low=below(0.0))
    # torch refuses nesterov=True without momentum, where both kinds of momentum are plain SGD
    return lambda params: torch.optim.SGD(
        params, lr=lr, momentum=momentum, nesterov=momentum != 0, fused=True
    )


def plain_average() -> OuterFactory:
    """SGD with learning rate 1: the new global model is the mean of the local ones (Local SGD)."""
    return lambda params: torch.optim.SGD(params, lr=1.0, fused=True)


# -- the schedule of the outer learning rate -------------------------------------------------------


def bound_scheduler(given: Any, outer: Optimizer) -> Any:
    """The scheduler of the outer learning rate: what `given` makes from the outer optimizer, or
    `given` itself if it is bound to that optimizer."""
    if given is None:
        return None
    is_one = callable(getattr(given, "step", None)) and not isinstance(given, type)
    made = given if is_one or not callable(given) else given(outer)
    bound = getattr(made, "optimizer", None)
    if not callable(getattr(made, "step", None)):
        raise ValueError(
            f"outer_scheduler={in_error(given)} gave {in_error(made)}, which is no scheduler; give "
            "a function such as "
            "lambda outer: torch.optim.lr_scheduler.CosineAnnealingLR(outer, T_max=100)"
        )
    if bound is not None and bound is not outer:
        raise ValueError(
            f"outer_scheduler={type(made).__name__} is bound to another {type(bound).__name__}; "
            "give a function that makes it from the outer optimizer, such as "
            f"lambda outer: {type(made).__name__}(outer, ...)"
        )
    refuse_metric("outer_scheduler", made)
    outer._opt_called = True  # type: ignore[attr-defined]  # it is stepped inside a sync
    return made


def refuse_metric(option: str, scheduler: Any) -> None:
    """Raise for a scheduler that cannot be stepped with a clock; also for one inside a SequentialLR
    or a ChainedScheduler."""
    for each in (scheduler, *getattr(scheduler, "_schedulers", ())):
        if takes_metric(each):
            raise ValueError(
                f"{option}={type(each).__name__} needs a metric at every step, which the clock "
                "has not; leave it out and call its step(metric) after your evaluations"
            )


def takes_metric(scheduler: Any) -> bool:
    """Does its `step` need an argument, as that of ReduceLROnPlateau?"""
    return any(
        parameter.kind in (parameter.POSITIONAL_ONLY, parameter.POSITIONAL_OR_KEYWORD)
        and parameter.default is parameter.empty
        for parameter in inspect.signature(scheduler.step).parameters.values()
    )


def described(scheduler: Any, *, but: Sequence[str] = ("last_epoch",)) -> str | None:
    """A scheduler's class and settings, as far as they are plain numbers."""
    if scheduler is None:
        return None
    kinds = (int, float, str, bool)
    plain = {
        name: value
        for name, value in sorted(vars(scheduler).items())
        if not name.startswith("_")
        and name not in but
        and (isinstance(value, kinds) or _numbers(value))
    }
    return f"{type(scheduler).__name__}({', '.join(f'{k}={v}' for k, v in plain.items())})"


def _numbers(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(each, (int, float)) for each in value)

"""Outer optimizers, which change the anchor at a sync by the mean displacement."""

from collections.abc import Callable, Iterable

import torch
from torch.optim import Optimizer

OuterFactory = Callable[[Iterable[torch.nn.Parameter]], Optimizer]


def nesterov(lr: float = 0.7, momentum: float = 0.5) -> OuterFactory:
    """SGD with Nesterov momentum, the outer optimizer of DiLoCo and PALSGD.

    Args:
        lr: the outer learning rate.
        momentum: the outer momentum; with 0 it is plain SGD.

    Returns:
        A function that makes the optimizer from the anchor's parameters, for `outer=`.

    Example:
        >>> import torch, palsgd
        >>> palsgd.nesterov(lr=0.2)([torch.nn.Parameter(torch.zeros(2))]).defaults["lr"]
        0.2
    """
    # torch refuses nesterov=True without momentum, where both kinds of momentum are plain SGD
    return lambda params: torch.optim.SGD(
        params, lr=lr, momentum=momentum, nesterov=momentum != 0, fused=True
    )


def plain_average() -> OuterFactory:
    """SGD with learning rate 1: the new global model is the mean of the local ones (Local SGD)."""
    return lambda params: torch.optim.SGD(params, lr=1.0, fused=True)

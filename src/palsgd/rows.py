"""A few numbers of every worker in one mean.

Each worker fills its own row of a matrix of zeros, so the mean over K workers holds the rows of all
of them, divided by K. K times a float32 mean is off by at most one part in 2^23, so rounding gives
back any integer below 2^16 exactly. A 32-bit number is sent as two halves.
"""

from collections.abc import Sequence

import torch
from torch import Tensor


def own_row(worker: int, workers: int, numbers: Sequence[float], like: Tensor) -> Tensor:
    """The flat matrix that a worker sends."""
    rows = like.new_zeros(workers, len(numbers))
    rows[worker] = torch.tensor(numbers, dtype=like.dtype)
    return rows.view(-1)


def rows_of_all(mean: Tensor, workers: int) -> list[list[float]]:
    """The numbers of each worker, from the mean."""
    return (mean.double() * workers).view(workers, -1).tolist()


def halves(number: int) -> tuple[int, int]:
    """The lower and the upper 16 bits of a 32-bit number."""
    return number & 0xFFFF, number >> 16 & 0xFFFF


def joined(low: float, high: float) -> int:
    """The number whose halves were sent."""
    return round(low) + (round(high) << 16)

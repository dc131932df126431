"""The few numbers every worker adds to a sync so that all can judge it before applying it."""

from collections import Counter
from dataclasses import dataclass

import torch
from torch import Tensor

from palsgd.errors import ConsensusError, NonFiniteError
from palsgd.interval import Costs


@dataclass(frozen=True)
class Attendance:
    """One worker's line."""

    digest: int  # of its anchor, 32 bits
    finite: bool  # is its local model?
    seconds: float  # its last exchange took, waiting included
    sync_s: float = 0.0  # its last sync took, that exchange included
    step_s: float = 0.0  # a gradient step takes it


class RollCall:
    """A payload section of a few numbers per worker: each fills its own, the mean has them all.

    The 32-bit digest travels as two 16-bit halves. K times a float32 mean over K workers is off
    by at most one part in 2^23, so rounding gives back any integer below 2^16 exactly.
    """

    def __init__(self, workers: int, *, with_costs: bool = False):
        self._workers = workers
        self._fields = 6 if with_costs else 4
        self.size = self._fields * workers

    def encode(self, worker: int, mine: Attendance, like: Tensor) -> Tensor:
        section = like.new_zeros(self.size)
        line = [mine.digest & 0xFFFF, mine.digest >> 16, float(not mine.finite)]
        line += [mine.seconds, mine.sync_s, mine.step_s]
        own = section[self._fields * worker : self._fields * (worker + 1)]
        own.copy_(torch.tensor(line[: self._fields], dtype=like.dtype))
        return section

    def decode(self, mean: Tensor) -> list[Attendance]:
        lines = (mean.double() * self._workers).view(self._workers, self._fields).tolist()
        return [
            Attendance(round(low) + (round(high) << 16), round(broken) == 0, *seconds)
            for low, high, broken, *seconds in lines
        ]


def check_consensus(attendance: list[Attendance], where: str) -> None:
    """Raise on every worker alike if not all anchors are the same."""
    common = Counter(line.digest for line in attendance).most_common(1)[0][0]
    odd = [worker for worker, line in enumerate(attendance) if line.digest != common]
    if odd:
        raise ConsensusError(
            f"{_workers(odd)} of {len(attendance)} hold another global model than the rest at "
            f"{where}; nothing was averaged. Start every worker from the same weights (same seed, "
            "or wrap the model in DistributedDataParallel, which sends worker 0's), or resume all "
            "from one checkpoint"
        )


def check_finite(attendance: list[Attendance], where: str, skip: bool) -> int:
    """How many workers take part in the mean; raise on every worker alike if some may not."""
    broken = [worker for worker, line in enumerate(attendance) if not line.finite]
    if broken and not (skip and len(broken) < len(attendance)):
        raise NonFiniteError(
            f"the model of {_workers(broken)} of {len(attendance)} has inf or nan at {where}; "
            "nothing was averaged. Lower the learning rate or clip gradients, or pass "
            "on_nonfinite='skip' to leave such workers out of the mean"
        )
    return len(attendance) - len(broken)


def waiting(attendance: list[Attendance], worker: int) -> float:
    """How long this worker waited in the last exchange: the last to arrive did not wait at
    all, so the shortest exchange is what sending takes, and the rest of ours was waiting."""
    return max(0.0, attendance[worker].seconds - min(line.seconds for line in attendance))


def costs(attendance: list[Attendance]) -> Costs:
    """Of the last sync, without waiting, and of a gradient step: those of the slowest worker."""
    quickest = min(line.seconds for line in attendance)
    return Costs(
        max(line.sync_s - (line.seconds - quickest) for line in attendance),
        max(line.step_s for line in attendance),
    )


def _workers(indices: list[int]) -> str:
    return ("worker " if len(indices) == 1 else "workers ") + ", ".join(map(str, indices))

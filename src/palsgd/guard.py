"""The header of a sync, and what all workers check in it before they change anything.

Each worker puts a few numbers about itself into the first message of a sync, such as a digest of
its anchor. Every worker reads the headers of all of them.
"""

from collections import Counter
from dataclasses import dataclass

import torch
from torch import Tensor

from palsgd.auto_interval import Costs
from palsgd.errors import ConsensusError, NonFiniteError
from palsgd.meter import Meter
from palsgd.payload import REPORT, REPORT_WITH_COSTS
from palsgd.transports.transport import Transport

_MASK = 0xFFFFFFFF


@dataclass(frozen=True)
class WorkerReport:
    """One worker's part of the header."""

    digest: int = 0  # 32 bits of its anchor
    finite: bool = True  # is its local model finite?
    finished: bool = False  # has its training loop come to its end?
    seconds: float = 0.0  # seconds of its last exchange, waiting included
    gradient: int = 0  # 32 bits of the first gradient of its local phase; 0: none to compare
    model: int = 0  # 32 bits of its local model; 0: equal to the anchor, or not compared
    steps: int = 0  # its gradient steps so far, modulo 2^16
    sync_s: float = 0.0  # seconds of its last sync, that exchange included
    step_s: float = 0.0  # seconds of one of its gradient steps


class Header:
    """A few numbers per worker. Each worker fills its own place and sends zeros in all other
    places, so the mean holds the numbers of all workers, divided by K.

    A 32-bit digest is sent as two 16-bit halves. K times a float32 mean over K workers is off by
    at most one part in 2^23, so rounding gives back any integer below 2^16 exactly.
    """

    def __init__(self, workers: int, *, with_costs: bool = False):
        self._workers = workers
        self._fields = REPORT_WITH_COSTS if with_costs else REPORT
        self.size = self._fields * workers

    def encode(self, worker: int, mine: WorkerReport, like: Tensor) -> Tensor:
        section = like.new_zeros(self.size)
        flags = (not mine.finite) + 2 * mine.finished
        line = [*_halves(mine.digest), flags, mine.seconds, *_halves(mine.gradient)]
        line += [*_halves(mine.model), mine.steps % 2**16, mine.sync_s, mine.step_s]
        own = section[self._fields * worker : self._fields * (worker + 1)]
        own.copy_(torch.tensor(line[: self._fields], dtype=like.dtype))
        return section

    def decode(self, mean: Tensor) -> list[WorkerReport]:
        lines = (mean.double() * self._workers).view(self._workers, self._fields).tolist()
        return [_report(line) for line in lines]


def _halves(digest: int) -> tuple[int, int]:
    return digest & 0xFFFF, digest >> 16


def _report(line: list[float]) -> WorkerReport:
    whole = [round(number) for number in line[:9]]
    return WorkerReport(
        digest=whole[0] + (whole[1] << 16),
        finite=not whole[2] & 1,
        finished=bool(whole[2] & 2),
        seconds=line[3],
        gradient=whole[4] + (whole[5] << 16),
        model=whole[6] + (whole[7] << 16),
        steps=whole[8],
        **dict(zip(("sync_s", "step_s"), line[9:], strict=False)),
    )


class Guard:
    """Makes this worker's report, and checks the reports of all workers."""

    def __init__(
        self, transport: Transport, *, with_costs: bool, compares: bool, skip_nonfinite: bool
    ):
        self.worker, self.workers = transport.worker, transport.workers
        self.header = Header(transport.workers, with_costs=with_costs)
        self.compares = compares  # must all workers hold the same anchor?
        self.skip_nonfinite = skip_nonfinite
        self.gradient = 0  # 32 bits of the first gradient of the local phase, until a sync has them
        self._combine = transport.combine

    def report(
        self,
        digest: int,
        *,
        finite: bool,
        meter: Meter,
        device: torch.device,
        model: int = 0,
        steps: int = 0,
        step_s: float = 0.0,
    ) -> WorkerReport:
        """This worker's report. If the worker has several ranks, all of them make the same
        report."""
        whole = torch.tensor([digest, not finite, self.gradient, model], device=device)
        self._combine(whole)
        digest, broken, gradient, model = whole.tolist()
        return WorkerReport(
            digest=digest & _MASK,
            finite=not broken,
            seconds=meter.exchange_s,
            gradient=gradient & _MASK,
            model=0 if broken else model & _MASK,
            steps=steps,
            sync_s=meter.sync_s,
            step_s=step_s,
        )

    def encode(self, mine: WorkerReport, like: Tensor) -> Tensor:
        return self.header.encode(self.worker, mine, like)

    def check_alike(self, header: Tensor, where: str) -> None:
        """Raise unless all workers hold the same model."""
        if self.compares:
            check_consensus(self.header.decode(header), where)

    def check(self, header: Tensor, where: str) -> "Verdict":
        """Raise unless the sync may go ahead."""
        reports = self.header.decode(header)
        if self.compares:
            check_consensus(reports, where)
        return Verdict(check_finite(reports, where, self.skip_nonfinite), reports)


@dataclass(frozen=True)
class Verdict:
    """A sync may go ahead."""

    contributors: int  # workers whose model is in the mean
    reports: list[WorkerReport]


def check_consensus(reports: list[WorkerReport], where: str) -> None:
    """Raise the same error on every worker if the anchors differ."""
    common = Counter(line.digest for line in reports).most_common(1)[0][0]
    odd = [worker for worker, line in enumerate(reports) if line.digest != common]
    if odd:
        raise ConsensusError(
            f"{_workers(odd)} of {len(reports)} hold another global model than the rest at "
            f"{where}; nothing was averaged. Start every worker from the same weights (same seed, "
            "or wrap the model in DistributedDataParallel, which sends worker 0's), or resume all "
            "from one checkpoint"
        )


def check_finite(reports: list[WorkerReport], where: str, skip: bool) -> int:
    """The number of workers that take part in the mean. Raise the same error on every worker if
    some model is not finite, unless `skip` is set and some other model is finite."""
    broken = [worker for worker, line in enumerate(reports) if not line.finite]
    if broken and not (skip and len(broken) < len(reports)):
        raise NonFiniteError(
            f"the model of {_workers(broken)} of {len(reports)} has inf or nan at {where}; "
            "nothing was averaged. Lower the learning rate or clip gradients, or pass "
            "on_nonfinite='skip' to leave such workers out of the mean"
        )
    return len(reports) - len(broken)


def waiting(reports: list[WorkerReport], worker: int) -> float:
    """The seconds that this worker waited in the last exchange. The last worker to begin the
    exchange did not wait, so the shortest exchange is the time of sending. The rest of this
    worker's exchange was waiting."""
    return max(0.0, reports[worker].seconds - min(line.seconds for line in reports))


def costs(reports: list[WorkerReport]) -> Costs:
    """The seconds of the last sync without waiting, and of a gradient step, of the slowest
    worker."""
    quickest = min(line.seconds for line in reports)
    return Costs(
        max(line.sync_s - (line.seconds - quickest) for line in reports),
        max(line.step_s for line in reports),
    )


def _workers(indices: list[int]) -> str:
    return ("worker " if len(indices) == 1 else "workers ") + ", ".join(map(str, indices))

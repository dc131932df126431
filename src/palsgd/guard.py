"""The header of a sync, and what all workers check in it before they change anything.

Each worker puts a few numbers about itself into the first message of a sync, such as a digest of
its anchor. Every worker reads the headers of all of them.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from palsgd.auto_interval import Costs
from palsgd.digest import chained, digest_of
from palsgd.errors import ConsensusError, NonFiniteError
from palsgd.finite import all_finite
from palsgd.meter import Meter
from palsgd.payload import REPORT, REPORT_WITH_COSTS
from palsgd.rows import halves, joined, own_row, rows_of_all
from palsgd.transports.transport import Transport

_MASK = 0xFFFFFFFF
# From this bit on, a report's flags have the number of a buffer.
_BUFFER_SHIFT, _MOST_BUFFERS = 8, 255


@dataclass(frozen=True)
class WorkerReport:
    """One worker's part of the header."""

    worker: int = 0  # its number
    digest: int = 0  # 32 bits of its anchor
    finite: bool = True  # is its local model finite?
    finished: bool = False  # has its training loop come to its end?
    idle: bool = False  # has it finished and taken no step since the last sync?
    leaving: bool = False  # was it asked to leave?
    seconds: float = 0.0  # seconds of its last exchange, waiting included
    gradient: int = 0  # 32 bits of the first gradient of its local phase; 0: none to compare
    model: int = 0  # 32 bits of its local model; 0: equal to the anchor, or not compared
    steps: int = 0  # its gradient steps so far, modulo 2^16
    sync_s: float = 0.0  # seconds of its last sync, that exchange included
    step_s: float = 0.0  # seconds of one of its gradient steps
    alike: bool = True  # do its ranks hold the same model?
    buffer: int = 0  # the number, from 1, of a buffer of it that is not finite


class Header:
    """The reports of all workers, as rows of numbers."""

    def __init__(self, workers: int, *, with_costs: bool = False):
        self._workers = workers
        self._fields = REPORT_WITH_COSTS if with_costs else REPORT
        self.size = self._fields * workers

    def encode(self, worker: int, mine: WorkerReport, like: Tensor) -> Tensor:
        flags = (not mine.finite) + 2 * mine.finished + 4 * (not mine.alike) + 8 * mine.idle
        flags += 16 * mine.leaving
        flags += min(mine.buffer, _MOST_BUFFERS) << _BUFFER_SHIFT
        line = [*halves(mine.digest), flags, mine.seconds, *halves(mine.gradient)]
        line += [*halves(mine.model), mine.steps % 2**16, mine.sync_s, mine.step_s]
        return own_row(worker, self._workers, line[: self._fields], like)

    def decode(self, mean: Tensor, members: Sequence[int]) -> list[WorkerReport]:
        """The reports of the workers with these numbers."""
        rows = rows_of_all(mean, self._workers)
        return [_report(number, line) for number, line in zip(members, rows, strict=True)]


def _report(worker: int, line: list[float]) -> WorkerReport:
    flags, costs = round(line[2]), line[9:] or [0.0, 0.0]
    return WorkerReport(
        worker=worker,
        digest=joined(*line[:2]),
        finite=not flags & 1,
        finished=bool(flags & 2),
        alike=not flags & 4,
        idle=bool(flags & 8),
        leaving=bool(flags & 16),
        seconds=line[3],
        gradient=joined(*line[4:6]),
        model=joined(*line[6:8]),
        steps=round(line[8]),
        sync_s=costs[0],
        step_s=costs[1],
        buffer=flags >> _BUFFER_SHIFT,
    )


class Guard:
    """Makes this worker's report, and checks the reports of all workers."""

    def __init__(
        self,
        transport: Transport,
        *,
        with_costs: bool,
        compares: bool,
        skip_nonfinite: bool,
        same_data: bool,
        buffers: Sequence[str] = (),
    ):
        self._with_costs = with_costs
        self.compares = compares  # must all workers hold the same anchor?
        self.skip_nonfinite = skip_nonfinite
        self._buffers = buffers  # the names of those that are averaged
        self.finished = False  # is the sync that is sent the one of finish()?
        self.leaving = False  # was this worker asked to leave?
        # Must no two workers compute the same?
        self.compares_work = not same_data and (transport.workers > 1 or transport.elastic)
        self.awaits_gradient = self.compares_work  # the next gradient is to be compared
        self.gradient = 0  # 32 bits of the gradient that the next sync compares
        self._transport = transport

    @property
    def compares_models(self) -> bool:
        """Must no two workers have the same local model? Without a common anchor equal
        displacements are no equal models."""
        return self.compares and self.compares_work

    # Workers may leave and come, so the transport is asked each time.

    @property
    def elastic(self) -> bool:
        return self._transport.elastic

    @property
    def awaits_newcomers(self) -> bool:
        return self._transport.awaits_newcomers

    @property
    def members(self) -> tuple[int, ...]:
        """The numbers of the workers that take part."""
        return self._transport.members

    @property
    def worker(self) -> int:
        """The number of this worker."""
        return self._transport.worker

    @property
    def place(self) -> int:
        """Which of the members this worker is."""
        return self._transport.place

    @property
    def workers(self) -> int:
        return self._transport.workers

    @property
    def header(self) -> Header:
        return Header(self.workers, with_costs=self._with_costs)

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
        buffer: int = 0,
        idle: bool = False,
    ) -> WorkerReport:
        """This worker's report. If the worker has several ranks, all of them make the same
        report. `buffer` is the number of a buffer that is not finite; 0: none."""
        exact = [digest & _MASK, not finite or buffer > 0, self.gradient & _MASK, model & _MASK]
        row = [*exact, buffer, self.leaving, meter.exchange_s, meter.sync_s, step_s]
        digests, broken, gradients, models, *others = self._rows_inside(row, device)
        numbers, leaving, *seconds = others
        sharded = self._transport.sharded
        exchange_s, sync_s, step_s = map(max, seconds)
        return WorkerReport(
            worker=self.worker,
            digest=_whole(digests, sharded),
            finite=not any(broken),
            seconds=exchange_s,
            gradient=_whole(gradients, sharded),
            model=0 if any(broken) else _whole(models, sharded),
            steps=steps,
            finished=self.finished,
            idle=self.finished and idle,
            leaving=any(leaving),
            sync_s=sync_s,
            step_s=step_s,
            alike=sharded or any(broken) or len(set(zip(digests, models, strict=True))) == 1,
            buffer=int(max(numbers)),
        )

    def _rows_inside(self, row: list[float], device: torch.device) -> list[list[float]]:
        """Each number of `row` as all ranks of this worker have it. float64 holds 32 bits."""
        if self._transport.inside is None:
            return [[number] for number in row]
        own = torch.tensor(row, dtype=torch.float64, device=device)
        return self._transport.gather_inside(own).T.tolist()

    def encode(self, mine: WorkerReport, like: Tensor) -> Tensor:
        return self.header.encode(self.place, mine, like)

    def check(self, header: Tensor, where: str) -> "Verdict":
        """Raise unless the sync may go ahead."""
        reports = self.header.decode(header, self.members)
        check_ranks(reports, where)
        check_finished(reports, where)
        if self.compares:
            check_consensus(reports, where)
        contributors = check_finite(reports, where, self.skip_nonfinite, self._buffers)
        if self.compares_work:
            check_own_work(reports, where)
            if reports[self.place].gradient:
                self.gradient = 0  # it is compared once
        return Verdict(contributors, reports)

    def await_gradient(self) -> None:
        """Compare the next gradient too: from now on something else may average."""
        self.awaits_gradient = self.compares_work

    def saw_gradient(self, grads: list[Tensor]) -> None:
        """Keep a digest of the first gradient of the local phase, for the next sync. A gradient
        that is zero or not finite shows nothing."""
        self.awaits_gradient = False
        # adding zero makes -0 zero
        self.gradient = digest_of(g + 0.0 for g in grads) if all_finite(grads) else 0

    def check_step(self, header: Tensor, where: str) -> "Verdict":
        """Raise unless all workers hold the same model. A gradient that is not finite raises too,
        unless such steps are skipped. The step may be taken if all workers are contributors."""
        reports = self.header.decode(header, self.members)
        check_ranks(reports, where)
        if self.compares:
            check_consensus(reports, where)
        broken = [line.worker for line in reports if not line.finite]
        if broken and not self.skip_nonfinite:
            named = _broken_buffer(reports, self._buffers) or "gradient"
            whose = f"the {named} of {named_workers(broken)} of {len(reports)}"
            raise nonfinite_step(whose, where)
        return Verdict(len(reports) - len(broken), reports)


@dataclass(frozen=True)
class Verdict:
    """A sync may go ahead."""

    contributors: int  # workers whose model is in the mean
    reports: list[WorkerReport]

    @property
    def changes_nothing(self) -> bool:
        """Have all workers finished, and none taken a step since the last sync?"""
        return all(line.idle for line in self.reports)

    @property
    def leaving(self) -> bool:
        """Was some worker asked to leave? Then all leave."""
        return someone_leaves(self.reports)


def someone_leaves(reports: list[WorkerReport]) -> bool:
    return any(line.leaving for line in reports)


def check_finished(reports: list[WorkerReport], where: str) -> None:
    """Raise the same error on every worker if some have finished and others have not."""
    done = [line.worker for line in reports if line.finished]
    others = [line.worker for line in reports if not line.finished]
    if done and others:
        raise ConsensusError(
            f"{named_workers(done)} of {len(reports)} called finish() while "
            f"{named_workers(others)} came to "
            f"{where}; nothing was averaged. Their loops differ in length: end them all at one "
            "clock with palsgd.until(), or give every worker equally many batches"
        )


def _whole(digests: list[float], sharded: bool) -> int:
    """The digest of a worker's model from those of its ranks: chained if they hold parts of the
    model, the first one's if they hold copies. 0 if all are 0."""
    found = [int(each) for each in digests]
    return chained(found) & _MASK if sharded and any(found) else found[0]


def check_consensus(reports: list[WorkerReport], where: str) -> None:
    """Raise the same error on every worker if the anchors differ."""
    common = Counter(line.digest for line in reports).most_common(1)[0][0]
    odd = [line.worker for line in reports if line.digest != common]
    if odd:
        raise ConsensusError(
            f"{named_workers(odd)} of {len(reports)} hold{'s' * (len(odd) == 1)} another global "
            "model than the rest at "
            f"{where}; nothing was averaged. Start every worker from the same weights (same seed, "
            "or wrap the model in DistributedDataParallel, which sends worker 0's), or resume all "
            "from one checkpoint"
        )


def check_own_work(reports: list[WorkerReport], where: str) -> None:
    """Raise the same error on every worker if two workers have computed the same."""
    what = "had the same first gradient in the local phase"
    same = _equal({line.worker: line.gradient for line in reports})
    if not same:
        what = "have the same local model"
        same = _equal({line.worker: line.model for line in reports})
    if same:
        raise ConsensusError(
            f"{named_workers(same)} of {len(reports)} {what} at {where}; nothing was averaged. "
            "Either "
            "something else averages in every step: if a DistributedDataParallel was put around "
            "the model after the optimizer was built, call opt.attach(model), and use no inner "
            "optimizer that communicates. Or these workers train on the same data: give each its "
            "own, for example by a DistributedSampler, or pass same_data=True if that is meant"
        )


def _equal(digests: dict[int, int]) -> list[int]:
    """The workers with the most common digest, if at least two have it; 0 is no digest."""
    counts = Counter(digest for digest in digests.values() if digest)
    common, count = counts.most_common(1)[0] if counts else (0, 0)
    return [worker for worker, digest in digests.items() if digest == common and count > 1]


def check_ranks(reports: list[WorkerReport], where: str) -> None:
    """Raise the same error on every rank if the ranks of a worker hold different models."""
    odd = [line.worker for line in reports if not line.alike]
    if odd:
        raise ConsensusError(
            f"the ranks of {named_workers(odd)} of {len(reports)} hold different models at "
            f"{where}; "
            "nothing was averaged. Train the ranks of a worker through one "
            'DistributedDataParallel(net, process_group=m["inside"].get_group())'
        )


def check_finite(
    reports: list[WorkerReport], where: str, skip: bool, buffers: Sequence[str] = ()
) -> int:
    """The number of workers that take part in the mean. Raise the same error on every worker if
    some model is not finite, unless `skip` is set and some other model is finite."""
    broken = [line.worker for line in reports if not line.finite]
    if broken and not (skip and len(broken) < len(reports)):
        raise NonFiniteError(
            f"the {_broken_buffer(reports, buffers) or 'model'} of {named_workers(broken)} "
            f"of {len(reports)} has inf or nan at {where}; "
            "nothing was averaged. Lower the learning rate or clip gradients, or pass "
            "on_nonfinite='skip' to leave such workers out of the mean"
        )
    return len(reports) - len(broken)


def nonfinite_step(whose: str, where: str) -> NonFiniteError:
    return NonFiniteError(
        f"{whose} has inf or nan at {where}; no worker took the step. Lower the learning rate or "
        "clip gradients, or pass on_nonfinite='skip' to skip such steps on all workers"
    )


def _broken_buffer(reports: list[WorkerReport], names: Sequence[str]) -> str:
    """What is not finite on the first worker that is not, if it is a buffer, by its name; else
    empty."""
    number = next(line.buffer for line in reports if not line.finite)
    known = 0 < number <= len(names) and number < _MOST_BUFFERS
    return f"buffer {names[number - 1]!r}" if known else ""


def waiting(reports: list[WorkerReport], place: int) -> float:
    """The seconds that this worker waited in the last exchange. The last worker to begin the
    exchange did not wait, so the shortest exchange is the time of sending. The rest of this
    worker's exchange was waiting."""
    return max(0.0, reports[place].seconds - min(line.seconds for line in reports))


def costs(reports: list[WorkerReport]) -> Costs:
    """The seconds of the last sync without waiting, and of a gradient step, of the slowest
    worker."""
    quickest = min(line.seconds for line in reports)
    return Costs(
        max(line.sync_s - (line.seconds - quickest) for line in reports),
        max(line.step_s for line in reports),
    )


def named_workers(numbers: Sequence[int]) -> str:
    return ("worker " if len(numbers) == 1 else "workers ") + ", ".join(map(str, numbers))

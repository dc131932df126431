"""Worker processes: started here, on this machine, or found under torchrun."""

import functools
import gc
import itertools
import logging
import os
import signal
import sys
import tempfile
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import palsgd
from palsgd import interrupts
from palsgd.errors import NonFiniteError
from palsgd.lab.elastic_trainer import ElasticTrainer
from palsgd.lab.folder_lock import locked
from palsgd.lab.forecast import work_of
from palsgd.lab.links.link import Link
from palsgd.lab.links.network import Network
from palsgd.lab.links.processes import (
    AskedToLeaveError,
    Finished,
    WorkerError,
    module_path,
    run_on_loopback,
)
from palsgd.lab.order import GoingOn, Job, Order, failure_of, first_failure, forget_failure
from palsgd.lab.run_folder import RunFolder
from palsgd.lab.settings import Settings
from palsgd.lab.timing import record
from palsgd.lab.timing.measure import can_be_timed, measure
from palsgd.lab.torchrun import restarted, under_torchrun
from palsgd.lab.trainer import LeftError, Trainer
from palsgd.lab.workload import Workload
from palsgd.lab.workloads import data_settings, load
from palsgd.leaving import EXIT_CODE
from palsgd.process_groups import device_and_backend, join
from palsgd.progress import Whole
from palsgd.transports.json_exchange import gathered
from palsgd.transports.transport import check_agreement
from palsgd.transports.waiting import barrier

log = logging.getLogger("palsgd")

LEAVE_S = 30.0  # workers have so long after SIGTERM, of which they take 25 s at most
SETTLE_S = 60.0  # workers end together; one that is so late does not end by itself
LINK_S = 3600.0  # workers behind an emulated link have so long


class StoppedError(Exception):
    """Ctrl-C, or a signal that means the same. `code` is the exit code that says so."""

    def __init__(self, code: int = 128 + signal.SIGINT):
        super().__init__(f"exit code {code}")
        self.code = code


# -- starting ------------------------------------------------------------------------------------


def run_jobs(order: Order, *, restarts: int = 0) -> None:
    """Do the jobs one after another in the same processes, as starting processes takes longer than
    a short run. Workers of which one fails are started again so many times, and go on from the last
    checkpoint. Under torchrun this process is a worker, and torchrun starts it again."""
    if under_torchrun():
        try:
            work(order)
        except LeftError:
            raise StoppedError(EXIT_CODE) from None
        return
    if order.going_on is not None:
        _run_going_on(order, restarts)
        return
    for attempt in itertools.count():
        try:
            _start(order, attempt)
            return
        except _FailedError as failed:
            if all(job.done for job in order.jobs):
                log.warning("palsgd: %s, after everything was done", failed)
                return
            if failed.final or attempt == restarts:
                raise failed.as_raised_here() from failed
            log.warning(
                "palsgd: %s; all workers start again from the last checkpoint (%d of %d)",
                failed, attempt + 1, restarts,
            )  # fmt: skip


def run_over_link(order: Order) -> None:
    """Do the jobs with each worker in a network namespace of its own, behind the order's link."""
    assert order.link is not None
    workers, echo = order.jobs[0].settings.processes, not order.jobs[0].quiet
    with tempfile.TemporaryDirectory() as folder:
        command = _command(order, Path(folder))
        try:
            with Network(workers, Link.parse(order.link)) as network:
                network.run(command, timeout=LINK_S, echo=echo)
        except WorkerError as failed:
            raise _FailedError(failed, Path(folder)).as_raised_here() from failed


def _run_going_on(order: Order, restarts: int) -> None:
    """Do the job without workers that die. Each is started again, and joins the others at their
    next sync, while restarts are left."""
    (job,) = order.jobs
    losses = _Losses(job, restarts)
    try:
        _start(order, 0, losses)
    except _FailedError as failed:
        raise failed.as_raised_here() from failed
    losses.tell()


def _start(order: Order, attempt: int, losses: "_Losses | None" = None) -> None:
    order = order if attempt == 0 else _what_is_left(order)
    with tempfile.TemporaryDirectory() as folder:
        command = _command(order, Path(folder))
        processes = order.jobs[0].settings.processes
        lost = None if losses is None else functools.partial(losses.again, Path(folder))
        try:
            run_on_loopback(
                command, processes, echo="all", env=_environment(attempt), leave_s=LEAVE_S,
                settle_s=SETTLE_S, lost=lost,
            )  # fmt: skip
        except KeyboardInterrupt:
            raise StoppedError from None
        except AskedToLeaveError as asked:
            raise StoppedError(128 + asked.signal) from None
        except WorkerError as failed:
            if failed.returncode == -signal.SIGINT:  # Ctrl-C for that worker alone
                raise StoppedError from None
            raise _FailedError(failed, Path(folder)) from failed


def _command(order: Order, folder: Path) -> list[str]:
    order.write(folder / "order.json", sys.argv)
    return [sys.executable, "-m", "palsgd.lab.worker_main", str(folder / "order.json")]


def _environment(attempt: int) -> dict[str, str]:
    return {
        "PYTHONPATH": module_path(),
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1"),
        "TORCHELASTIC_RESTART_COUNT": str(attempt),
    }


def _what_is_left(order: Order) -> Order:
    """The order without the jobs that are done."""
    done = [job for job in order.jobs if job.done]
    whole = order.whole and order.whole.after(len(done), work_of(job.settings for job in done))
    return replace(order, jobs=[job for job in order.jobs if job not in done], whole=whole)


class _Losses:
    """The workers that a run has lost and goes on without."""

    def __init__(self, job: Job, restarts: int):
        self._job, self._restarts, self._again = job, restarts, 0
        self._untold: list[str] = []

    def again(self, folder: Path, finished: Finished) -> bool:
        """Is this worker started again? A failure that the others have too ends the run, so what is
        said of it is said at the end."""
        failed = _FailedError(finished.as_error(), folder, alone=True)
        if failed.final or finished.returncode == -signal.SIGINT:
            finished.check()
        if failed.is_common:
            self._untold.append(str(failed))
            return False
        forget_failure(folder, finished.worker)
        starts = self._again < self._restarts and not self._job.done
        self._again += starts
        then = f"it starts again ({self._again} of {self._restarts}) and joins them at a sync"
        log.warning("palsgd: %s; the others go on without it%s", failed,
                    f", and {then}" if starts else "")  # fmt: skip
        return starts

    def tell(self) -> None:
        """After a run that others have finished."""
        for failed in self._untold:
            log.warning("palsgd: %s; the others went on without it", failed)


class _FailedError(Exception):
    """A worker failed, and all were ended. `alone`: the others were not."""

    def __init__(self, failed: WorkerError, folder: Path, *, alone: bool = False):
        self._failure, rank = None, failed.worker
        code = failed.returncode
        self._left = code in (EXIT_CODE, -signal.SIGTERM)
        if code is None:
            text = str(failed)
        elif code < 0:
            text = f"worker {rank} failed: {signal.Signals(-code).name} ended it"
        elif self._left:
            text = f"worker {rank} was asked to leave by SIGTERM"
        else:
            text = f"worker {rank} failed with exit code {code}"
            found = failure_of(folder, rank) if alone else first_failure(folder)
            if found is not None:
                rank, self._failure = found
                text = f"{self._failure.kind}: {self._failure.message}"
                if not self._failure.names_worker:
                    text = f"worker {rank} failed: {text}"
        super().__init__(text)

    @property
    def final(self) -> bool:
        """Would it happen again?"""
        return self._failure is not None and self._failure.refuses_input

    @property
    def is_common(self) -> bool:
        """Do the other workers end in the same way? They leave together, and too few are too few
        for all."""
        return self._left or (self._failure is not None and self._failure.lost_another)

    def as_raised_here(self) -> Exception:
        """As this process raises it: an error about the user's input, or a line on what went wrong.
        Only an error in this program has its traceback."""
        if self._left:
            return StoppedError(EXIT_CODE)
        if self._failure is None:
            return RuntimeError(str(self))
        if self._failure.refuses_input:
            return ValueError(self._failure.message)
        if not self._failure.expected:
            print(self._failure.trace, file=sys.stderr)
        return RuntimeError(str(self))


# -- in a worker process -------------------------------------------------------------------------


def work(order: Order) -> None:
    """Time and run the jobs in a worker process."""
    interrupts.leave_to_parent()
    interrupts.end_with_parent()
    if not under_torchrun() or int(os.environ["LOCAL_WORLD_SIZE"]) > 1:
        torch.set_num_threads(max(1, (os.cpu_count() or 1) // int(os.environ["LOCAL_WORLD_SIZE"])))
    device, backend = _place(order.device)
    if order.going_on is not None:
        _go_on(order, order.going_on, device)
        return
    join(backend, timeout_s=order.timeout_s)
    loaded = functools.lru_cache(maxsize=1)(load)  # the methods of a comparison share their data
    jobs = _as_rank_0_has_them(order.jobs)
    time_jobs(jobs, device, loaded, order.link)
    for job in [each for each in jobs if each.trains]:
        try:
            _work_on(job, device, loaded, order.whole)
        except NonFiniteError as error:  # all ranks raise it, so all go on with the next job
            if dist.get_rank() == 0:
                RunFolder(job.folder).write_failure(error)
    # Not after an error: it would close this rank's links before the error is told.
    dist.destroy_process_group()


def _go_on(order: Order, how: GoingOn, device: torch.device) -> None:
    """Run the job with workers that may leave and come, hence without a process group."""
    (job,) = order.jobs
    workload = _workload(job, device, load)
    transport = palsgd.ElasticTransport(
        min_workers=how.min_workers, deadline=how.deadline_s, timeout=order.timeout_s
    )
    folder = RunFolder(job.folder)
    try:
        ElasticTrainer(
            job.settings, workload, folder, transport, resume=job.resume, quiet=job.quiet
        ).train(order.whole)
    except NonFiniteError as error:  # all workers raise it
        folder.write_failure(error)


def time_jobs(
    jobs: list[Job],
    device: torch.device,
    load: Callable[..., Workload],
    link: str | None = None,
) -> None:
    """Time the steps of all jobs that are compared, in turn, before the first one is trained. What
    a collection has timed already is not timed again, so that a resumed one keeps its seconds."""
    if len(jobs) < 2:
        return
    left = [job for job in jobs if can_be_timed(job.settings)]
    left = _as_rank_0_has_them([job for job in left if record.session_of(job.folder) is None])
    for alike in _by(left, lambda job: (job.settings.workload, job.settings.context)):
        runs = {job.folder.name: job.settings for job in alike}
        session = measure(runs, _workload(alike[0], device, load), link=link)
        if dist.get_rank() == 0:
            record.add(alike[0].folder.parent, session)
    gc.collect()  # the programs that were timed, and their memory
    barrier()


def _by(jobs: list[Job], key: Callable[[Job], Any]) -> list[list[Job]]:
    found: dict[Any, list[Job]] = {}
    for job in jobs:
        found.setdefault(key(job), []).append(job)
    return list(found.values())


def _work_on(
    job: Job, device: torch.device, load: Callable[..., Workload], whole: Whole | None
) -> None:
    folder = RunFolder(job.folder)
    workload = _workload(job, device, load)
    gc.collect()  # an optimizer of the run before, still alive, would cost a message per exchange
    resume = job.resume or restarted()
    with locked(job.folder) if dist.get_rank() == 0 else nullcontext():
        Trainer(
            job.settings, workload, folder, resume=resume, elastic=job.elastic, quiet=job.quiet,
            link=job.link, twin_of=job.twin_of,
        ).train(whole)  # fmt: skip


def _workload(job: Job, device: torch.device, load: Callable[..., Workload]) -> Workload:
    own = data_settings(job.settings)
    return load(job.settings.workload, data=job.data, device=device, download=job.download, **own)


def _as_rank_0_has_them(jobs: list[Job]) -> list[Job]:
    """The jobs that rank 0 has. Another machine with its own disk may not see which runs are
    finished. Ranks that were started with other settings are refused."""
    everyone = gathered(
        [job.as_json() for job in jobs], read=lambda found: [Job.read(each) for each in found]
    )
    for rank, theirs in enumerate(everyone):
        for ours, other in _alike(everyone[0], theirs):
            check_agreement(
                [ours.settings.as_dict(), other.settings.as_dict()], ["rank 0", f"rank {rank}"]
            )
    return everyone[0]


def _alike(jobs: list[Job], others: list[Job]) -> list[tuple[Job, Job]]:
    """The jobs of two ranks that are the same run. Folders may be called after the second in which
    a rank was started; where a rank has fewer runs left to do, their folders tell."""
    if len(jobs) == len(others):
        return list(zip(jobs, others, strict=True))
    named = {job.folder.name: job for job in others}
    return [(job, named[job.folder.name]) for job in jobs if job.folder.name in named]


def _place(wanted: str) -> tuple[torch.device, str]:
    """This process's device, and the backend of its messages."""
    return (torch.device("cpu"), "gloo") if wanted == "cpu" else device_and_backend()


def as_started(settings: Settings) -> Settings:
    """The settings with as many workers as torchrun has started. Another number of processes than
    workers have is left to `check_world`."""
    workers, left = divmod(int(os.environ["WORLD_SIZE"]), settings.ranks_per_worker)
    return settings if left or not workers else replace(settings, workers=workers)


def check_world(settings: Settings) -> None:
    """Raise unless torchrun has started as many processes as the run has."""
    world, ranks = int(os.environ["WORLD_SIZE"]), settings.ranks_per_worker
    if settings.processes == world:
        return
    each = f" with --ranks-per-worker {ranks}" if ranks > 1 else ""
    remedy = f"start {settings.processes}" if world % ranks else f"use --workers {world // ranks}"
    if not world % ranks:
        remedy += ", or --elastic to go on with whatever number there is"
    raise ValueError(
        f"--workers {settings.workers}{each}, but torchrun started {world} processes; {remedy}"
    )

"""Worker processes: started here through torch's elastic launcher, or found under torchrun."""

import builtins
import functools
import gc
import logging
import os
import signal
import sys
import uuid
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from palsgd import interrupts
from palsgd.errors import NonFiniteError
from palsgd.lab.device import worker_device
from palsgd.lab.run_folder import RunFolder
from palsgd.lab.settings import Settings
from palsgd.lab.timing import record
from palsgd.lab.timing.measure import can_be_timed, measure
from palsgd.lab.trainer import Trainer
from palsgd.lab.workload import Workload
from palsgd.lab.workloads import data_settings, load
from palsgd.progress import Whole

_HANDLED = [
    getattr(signal, name)
    for name in ("SIGINT", "SIGTERM", "SIGHUP", "SIGQUIT")
    if hasattr(signal, name)
]


class StoppedError(Exception):
    """Ctrl-C, or a signal that means the same."""


@dataclass(frozen=True, kw_only=True)
class Job:
    """A run for worker processes to do. All jobs of a launch have equally many processes."""

    settings: Settings
    folder: Path
    data: str | None
    download: bool
    resume: bool
    quiet: bool
    link: str | None = None  # the emulated one that its workers communicate over
    trains: bool = True  # False: its steps are timed, and that is all


def under_torchrun() -> bool:
    return "TORCHELASTIC_RUN_ID" in os.environ and "RANK" in os.environ


def first_rank() -> bool:
    """Is this the process that writes and prints for all: rank 0 under torchrun, or the
    launcher?"""
    return not under_torchrun() or os.environ["RANK"] == "0"


def run_jobs(jobs: list[Job], device: str, whole: Whole | None = None) -> None:
    """Run the jobs one after another in the same processes, as starting processes takes longer than
    a short run. `whole` is what they are part of."""
    if under_torchrun():
        work(jobs, device, whole)
        return
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=jobs[0].settings.processes,
        run_id=uuid.uuid4().hex,
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        max_restarts=0,
        monitor_interval=0.1,
    )
    try:
        with _environment(), interrupts.starting_children():
            elastic_launch(config, work)(jobs, device, whole)
    except (SignalException, KeyboardInterrupt):
        raise StoppedError from None
    except ChildFailedError as error:
        rank, failure = error.get_first_failure()
        if failure.exitcode == -signal.SIGINT:  # the worker received Ctrl-C before this process did
            raise StoppedError from None
        raise _as_raised_here(rank, failure) from error


def _as_raised_here(rank: int, failure: Any) -> Exception:
    """A worker's exception as this process raises it: an error about the user's input, or a line on
    what went wrong. Only an error in this program has its traceback."""
    said, trace = failure.message, ""
    if not isinstance(said, str):
        said, trace = said["message"], said.get("extraInfo", {}).get("py_callstack", "")
    last = said.strip().splitlines()[-1]
    name, _, message = last.partition(": ")
    if name == "ValueError":
        return ValueError(message)
    kind = getattr(builtins, name, RuntimeError)
    if not issubclass(kind, RuntimeError | OSError):
        print(trace, file=sys.stderr)
    return RuntimeError(f"worker {rank} failed: {last}")


def work(
    jobs: list[Job],
    wanted: str,
    whole: Whole | None = None,
    link: str | None = None,
) -> None:
    """Time and run the jobs in a worker process. `whole` is what they are part of, `link` the
    emulated one between the workers."""
    interrupts.leave_to_parent()
    if sys.platform == "linux":  # by default a launcher that is killed leaves its workers running
        torch.multiprocessing._prctl_pr_set_pdeathsig(signal.SIGKILL)  # type: ignore[attr-defined]
    if not under_torchrun() or int(os.environ["LOCAL_WORLD_SIZE"]) > 1:
        torch.set_num_threads(max(1, (os.cpu_count() or 1) // int(os.environ["LOCAL_WORLD_SIZE"])))
    device, backend = _place(wanted)
    dist.init_process_group(backend)
    loaded = functools.lru_cache(maxsize=1)(load)  # the methods of a comparison share their data
    try:
        jobs = _as_rank_0_has_them(jobs)
        time_jobs(jobs, device, loaded, link)
        for job in (job for job in jobs if job.trains):
            try:
                _work_on(job, device, loaded, whole)
            except NonFiniteError as error:  # all ranks raise it, so all go on with the next job
                if dist.get_rank() == 0:
                    RunFolder(job.folder).write_failure(error)
    finally:
        dist.destroy_process_group()


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
    dist.barrier()


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
    Trainer(
        job.settings, workload, folder, resume=job.resume, quiet=job.quiet, link=job.link
    ).train(whole)


def _workload(job: Job, device: torch.device, load: Callable[..., Workload]) -> Workload:
    own = data_settings(job.settings)
    return load(job.settings.workload, data=job.data, device=device, download=job.download, **own)


def _as_rank_0_has_them(jobs: list[Job]) -> list[Job]:
    """The jobs that rank 0 has. Another machine with its own disk may not see which runs are
    finished."""
    found = [jobs]
    dist.broadcast_object_list(found, src=0)
    return found[0]


def _place(wanted: str) -> tuple[torch.device, str]:
    """This process's device, and the backend of its messages. NCCL needs a GPU for each worker."""
    device = worker_device(wanted, int(os.environ["LOCAL_RANK"]))
    if device.type == "cpu":
        return device, "gloo"
    torch.cuda.set_device(device)
    one_each = int(os.environ["LOCAL_WORLD_SIZE"]) <= torch.cuda.device_count()
    return device, "nccl" if one_each else "gloo"


def check_world(settings: Settings) -> None:
    """Raise unless torchrun has started as many processes as the run has."""
    world, ranks = int(os.environ["WORLD_SIZE"]), settings.ranks_per_worker
    if settings.processes == world:
        return
    each = f" with --ranks-per-worker {ranks}" if ranks > 1 else ""
    remedy = f"start {settings.processes}" if world % ranks else f"use --workers {world // ranks}"
    raise ValueError(
        f"--workers {settings.workers}{each}, but torchrun started {world} processes; {remedy}"
    )


@contextmanager
def _environment() -> Iterator[None]:
    """Inside, workers of one machine use its loopback interface, whatever its name resolves to."""
    changes: dict[str, Any] = {
        "GLOO_SOCKET_IFNAME": "lo0" if sys.platform == "darwin" else "lo",
        "OMP_NUM_THREADS": "1",
        "TORCH_CPP_LOG_LEVEL": "ERROR",
    }
    added = {key: value for key, value in changes.items() if key not in os.environ}
    os.environ.update(added)
    # torch's launcher leaves its own handlers behind, which raise what nobody catches later.
    handlers = {number: signal.getsignal(number) for number in _HANDLED}
    silent = logging.root.manager.disable
    logging.disable(logging.ERROR)  # torch's launcher would log the error that is raised here again
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            yield
        finally:
            logging.disable(silent)
            for number, handler in handlers.items():
                signal.signal(number, handler)
            for key in added:
                del os.environ[key]

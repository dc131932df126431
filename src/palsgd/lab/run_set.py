"""Several runs in one folder. Finished runs are skipped, the others are run, and all are
compared."""

import functools
import itertools
import logging
import os
import random
import shutil
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from torch import nn

from palsgd import references
from palsgd.checks import check_choice, check_flag, check_int, check_number, check_path
from palsgd.lab.at_once import WARMUPS, Share, simulate_at_once
from palsgd.lab.collection import write_collection
from palsgd.lab.device import check_device, chosen_device
from palsgd.lab.factory import build_optimizer
from palsgd.lab.folder_lock import NAME as LOCK
from palsgd.lab.folder_lock import locked
from palsgd.lab.forecast import work_of
from palsgd.lab.going_on import check_going_on
from palsgd.lab.launcher import as_started, check_world, run_jobs
from palsgd.lab.methods import method_of
from palsgd.lab.order import GoingOn, Job, Order
from palsgd.lab.programs import first_of_each
from palsgd.lab.resuming import Resuming, left_to_do, was_changed
from palsgd.lab.run_folder import RunFolder
from palsgd.lab.settings import TIMEOUT_S, Settings, parsed
from palsgd.lab.simulated_program import check_time, grouped, simulate_runs
from palsgd.lab.simulated_run import SimulatedRun
from palsgd.lab.torchrun import first_rank, restarted, under_torchrun
from palsgd.lab.warmups import SharedWarmUps
from palsgd.lab.workload import Workload
from palsgd.lab.workloads import check as check_workload
from palsgd.lab.workloads import data_settings, kind, load
from palsgd.progress import Whole, file_progress
from palsgd.transports.in_memory import SimulatedTransport
from palsgd.transports.transport import ambient

log = logging.getLogger("palsgd")

_FLAGS = (
    "simulate", "download", "force", "resume", "elastic", "quiet", "share_program", "go_on",
)  # fmt: skip
OWN = ("workload", "method")  # settings whose values may be references, with paths in them


@dataclass(frozen=True, kw_only=True)
class Options:
    """The options of how runs are done. `Settings` define the runs themselves."""

    simulate: bool = False
    data: str | None = None
    download: bool = False
    device: str = "auto"
    force: bool = False
    resume: bool = False
    elastic: bool = False  # runs may be resumed by another number of workers
    keep_batch: str = "worker"  # whose batch then stays the same: a worker's, or the "global" one
    quiet: bool = False
    vectorize: bool | str = "auto"
    share_program: bool = True  # simulated runs of equal shape; their seconds are then joint
    at_once: int = 1  # simulated programs, in as many processes
    restarts: int = 0  # of all workers, if one of them fails
    timeout_s: float = TIMEOUT_S  # of an exchange between workers
    go_on: bool = False  # without workers that die, which `restarts` starts again alone
    min_workers: int | None = None  # with go_on: how many must be left; None: one
    deadline_s: float | None = None  # with go_on: of a sync, from the first worker's arrival
    # Of simulated runs, as time.monotonic() has it: the first pause after it ends the command, and
    # is the only one at which their states are saved. None: all runs are done.
    until: float | None = None

    def __post_init__(self) -> None:
        for name in _FLAGS:
            check_flag(name, getattr(self, name))
        check_choice("keep_batch", self.keep_batch, ("worker", "global"))
        check_int("restarts", self.restarts)
        check_int("at_once", self.at_once, least=1)
        check_number("timeout", self.timeout_s, "a number of seconds > 0", low=0.0)
        if self.min_workers is not None:
            check_int("min_workers", self.min_workers, least=1)
        if self.deadline_s is not None:
            check_number("deadline", self.deadline_s, "a number of seconds > 0", low=0.0)
        if self.until is not None:
            check_number("until", self.until, "a time as time.monotonic() has it")
        if self.data is not None:
            object.__setattr__(self, "data", str(check_path("data", self.data)))
        check_device(self.device)


def check_folder(out: Path, options: Options) -> None:
    """Refuse a folder that is not empty, unless the options allow it, and one that cannot be made.
    It is made with the first file of a run, hence not for a run that cannot begin."""
    there = next(path for path in (out, *out.absolute().parents) if path.exists())
    if there != out and not (there.is_dir() and os.access(there, os.W_OK)):
        raise OSError(f"{out} cannot be made: {there} is no folder to write in; use another --out")
    if is_used(out) and not (options.force or options.resume):
        raise ValueError(
            f"{out} exists and is not empty; add --resume to go on with it, --force to start over, "
            "or choose another --out"
        )


def clear_all(out: Path) -> None:
    """Remove what runs in the folder wrote, and nothing else."""
    folders = [RunFolder(path) for path in out.iterdir() if path.is_dir()]
    for folder in folders:
        if (folder.path / "config.yaml").exists() or folder.saved_steps:
            folder.clear()


def is_used(out: Path) -> bool:
    """Is there anything but the lock of a command?"""
    return out.exists() and (not out.is_dir() or any(path.name != LOCK for path in out.iterdir()))


def check_data(runs: Mapping[str, Settings], options: Options) -> None:
    """Raise if files are missing, before anything is started or written; or fetch them, once for
    all workers."""
    for workload in dict.fromkeys(settings.workload for settings in runs.values()):
        kind(workload).require(
            options.data, download=options.download, progress=file_progress(options.quiet)
        )


def check_method(settings: Settings) -> None:
    """Raise if the optimizer refuses the settings. It is called for all runs before the first one
    begins, and builds the optimizer of a worker for a small model. Epochs are those of the
    published data, as no data are loaded yet."""
    settings = settings.in_steps(kind(settings.workload).examples)
    method_of(settings).check([settings.lr])
    with ambient(SimulatedTransport(0, settings.workers, [])), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the run itself warns
        build_optimizer(settings, settings.total_steps(1), nn.Linear(64, 64))


def accepted(
    runs: Mapping[str, Settings], *, skip: bool
) -> tuple[dict[str, Settings], dict[str, str]]:
    """The runs whose settings can work, and the reasons of the others. Without `skip`, and if none
    can work, the first reason is raised."""
    kept, refused, first = {}, {}, None
    for name, settings in runs.items():
        try:
            check_workload(settings)
            check_method(settings)
            kept[name] = settings
        except ValueError as error:
            first = first or error
            refused[name] = str(error)
    if first is not None and not (skip and kept):
        raise first
    for name, reason in refused.items():
        log.warning("palsgd: %s is skipped: %s", name, reason)
    return kept, refused


def check_simulated(runs: Sequence[Settings]) -> None:
    several = [run.ranks_per_worker for run in runs if run.ranks_per_worker > 1]
    if several:
        raise ValueError(
            f"--ranks-per-worker {several[0]} is for real processes, a simulated worker computes "
            "its whole batch at once; leave it out, or leave out --simulate"
        )


def check_importable(runs: Sequence[Settings]) -> None:
    """Refuse what other processes cannot import."""
    named = [getattr(run, name) for run in runs for name in OWN]
    if here := [value for value in named if value.startswith("__main__:")]:
        raise ValueError(
            f"{here[0]} is of the program that runs, and other processes cannot import it; move it "
            "into a file of its own, or leave out at_once"
        )


def run_all(
    runs: Mapping[str, Settings], out: Path, options: Options, swept: Sequence[str] = ()
) -> dict[str, Any]:
    """Do the runs that are not finished, each in a folder of its name; then compare them all. The
    records of the collection also have the `swept` fields. Points of a sweep whose settings cannot
    work are skipped; the error that names them is raised at the end."""
    if restarted():  # whatever the first start was asked to do with the folder
        options = replace(options, resume=True, force=False)
    if options.elastic and under_torchrun():
        runs = {name: as_started(settings) for name, settings in runs.items()}
    runs, refused = accepted(runs, skip=bool(swept))
    _check(list(runs.values()), options)
    check_folder(out, options)
    # Under torchrun the first rank writes for all.
    with locked(out) if first_rank() else nullcontext():
        check_folder(out, options)  # again, as another command may have been faster
        runs = _run_missing(runs, out, options)
        return finish(runs, out, swept, refused) if first_rank() else {}


def _check(runs: Sequence[Settings], options: Options) -> None:
    """Refuse what cannot be run here, before anything is written."""
    _check_restarts(options)
    check_going_on(
        runs, go_on=options.go_on, simulate=options.simulate, min_workers=options.min_workers,
        deadline_s=options.deadline_s,
    )  # fmt: skip
    for settings in runs:
        if under_torchrun():
            check_world(settings)
    if under_torchrun() and options.simulate:
        raise ValueError("--simulate needs one process; start it without torchrun")
    if options.simulate:
        check_simulated(runs)
    elif options.until is not None:
        raise ValueError(
            f"until={options.until:g} ends simulated runs, real workers are stopped by SIGTERM; "
            "leave it out"
        )
    if options.at_once > 1 and not options.simulate:
        raise ValueError(
            f"--at-once {options.at_once} is for simulated programs, real workers are processes "
            "already; add --simulate, or leave it out"
        )
    if options.at_once > 1:
        check_importable(runs)
    check_device(options.device)
    told = [settings.cluster for settings in runs if settings.cluster is not None]
    if told and not options.simulate:
        raise ValueError(
            f"cluster={told[0]} is for simulated workers, real ones have a time of their own; add "
            "--simulate, or leave it out"
        )


def _run_missing(runs: Mapping[str, Settings], out: Path, options: Options) -> dict[str, Settings]:
    """Do the runs that are not done. Returns all of them, as they are done."""
    origins = first_of_each(runs)  # a program is run once, whatever it is called
    how = Resuming(
        simulate=options.simulate,
        elastic=options.elastic,
        keep_batch=options.keep_batch,
        go_on=options.go_on,
    )
    waiting: dict[str, Settings] = {}
    for name, settings in runs.items():
        if origins[name] == name:
            left = settings if options.force else left_to_do(RunFolder(out / name), settings, how)
            waiting |= {} if left is None else {name: left}
    check_data(waiting, options)
    if options.force and first_rank():
        clear_all(out)
    if options.simulate:
        _simulate(runs, list(waiting), out, options)
    else:
        _launch(waiting, out, options)
    return {**runs, **waiting}


def _check_restarts(options: Options) -> None:
    if options.restarts and (options.simulate or under_torchrun()):
        instead = "leave it out" if options.simulate else "use torchrun --max-restarts"
        raise ValueError(
            f"--restarts {options.restarts} is for worker processes that are started here; "
            f"{instead}"
        )


def finish(
    runs: Mapping[str, Settings],
    out: Path,
    swept: Sequence[str] = (),
    refused: Mapping[str, str] | None = None,
) -> dict[str, Any]:
    """summary.json of every run and of the collection. The error about runs that failed, and about
    those that were refused, is raised after all others are written."""
    for name, origin in first_of_each(runs).items():
        if name != origin:
            RunFolder(out / name).link(RunFolder(out / origin), origin, runs[name].as_dict())
    failed = {name: reason for name in runs if (reason := RunFolder(out / name).failure)}
    done = {name: settings for name, settings in runs.items() if name not in failed}
    for name in done:
        if not RunFolder(out / name).finished:
            raise RuntimeError(f"{out / name} has no summary.json; go on with the run by --resume")
    found = write_collection(done, out, swept) if done else {}
    if failed or refused:
        raise FailedRunsError(failed, refused)
    return found


class FailedRunsError(RuntimeError):
    """Some runs ended early by themselves, or were refused; the others are done."""

    def __init__(
        self, failed: Mapping[str, str | None], refused: Mapping[str, str | None] | None = None
    ):
        self.reasons = {**failed, **(refused or {})}
        kinds = (("failed", failed), ("were refused and skipped", refused or {}))
        super().__init__("; ".join(_counted(what, runs) for what, runs in kinds if runs))


def _counted(what: str, reasons: Mapping[str, str | None]) -> str:
    lines = "; ".join(f"{name}: {reason}" for name, reason in reasons.items())
    return f"{len(reasons)} of the runs {what} ({lines})"


def _launch(runs: Mapping[str, Settings], out: Path, options: Options) -> None:
    """Runs with equally many processes share them."""
    jobs = [
        Job(
            settings=settings,
            folder=out / name,
            data=options.data,
            download=options.download,
            resume=options.resume,
            elastic=options.elastic or was_changed(RunFolder(out / name)),
            quiet=options.quiet,
        )
        for name, settings in runs.items()
    ]
    whole = Whole(runs=len(runs), work=work_of(runs.values()))
    going_on = GoingOn(min_workers=options.min_workers or 1, deadline_s=options.deadline_s)
    order = Order(
        jobs=jobs, device=options.device, whole=whole, timeout_s=options.timeout_s,
        going_on=going_on if options.go_on else None,
    )  # fmt: skip
    if under_torchrun():  # rank 0 decides which runs are left to do
        run_jobs(order)
        return
    jobs.sort(key=lambda job: job.settings.processes)
    for _, each in itertools.groupby(jobs, key=lambda job: job.settings.processes):
        group = list(each)
        run_jobs(replace(order, jobs=group, whole=whole), restarts=options.restarts)
        whole = whole.after(len(group), work_of(job.settings for job in group))


def _simulate(
    runs: Mapping[str, Settings], waiting: Sequence[str], out: Path, options: Options
) -> None:
    """Runs of equal shape share a program. `runs` has the finished ones too, as others may have
    shared a program with them."""
    groups = grouped(
        runs,
        waiting,
        out,
        resume=options.resume,
        share=options.share_program,
        vectorize=options.vectorize,
    )
    share = Share(
        runs=runs, waiting=waiting, groups=groups, out=out, data=options.data,
        download=options.download, device=options.device, quiet=options.quiet, until=options.until,
    )  # fmt: skip
    shutil.rmtree(out / WARMUPS, ignore_errors=True)  # of a command that was killed
    parts = share.parts() if options.at_once > 1 else []
    if len(parts) > 1:
        simulate_at_once(parts, options.at_once, quiet=options.quiet)
    else:
        simulate(share)


def simulate(share: Share, loaded: Callable[..., Workload] | None = None) -> None:
    """Train the programs of a share one after another, in this process. `loaded` loads data, and
    keeps them for runs that have the same."""
    runs, loaded = share.runs, loaded or functools.cache(load)
    origin = {"data": share.data, "device": chosen_device(share.device), "download": share.download}
    warmups = SharedWarmUps((runs[name] for name in share.waiting), share.warmups)

    def simulated(name: str) -> SimulatedRun:
        run = runs[name]
        data = loaded(run.workload, **origin, **data_settings(run))
        warmup = warmups.of(run) if name in share.waiting else None
        return SimulatedRun(run, data, RunFolder(share.out / name), warmup)

    whole = Whole(runs=len(share.waiting), work=work_of(runs[name] for name in share.waiting))
    for names, vectorize, resumed in share.groups:
        check_time(share.until)
        simulate_runs(
            [simulated(name) for name in names],
            quiet=share.quiet,
            vectorize=vectorize,
            resume=resumed,
            whole=whole,
            until=share.until,
        )


def grid_of(settings: Settings, values: Mapping[str, list[Any]]) -> dict[str, Settings]:
    """All combinations, by the name of their run."""
    points: dict[str, Settings] = {}
    varied = [name for name, choices in values.items() if len(choices) > 1] or list(values)
    for combination in itertools.product(*values.values()):
        changes = dict(zip(values, combination, strict=True))
        name = name_of({field: changes[field] for field in varied})
        point = settings.changed(changes)
        if points.setdefault(name, point) != point:
            raise ValueError(f"two points would both be called {name!r}; rename a class")
    return points


def random_points(
    settings: Settings, ranges: Mapping[str, list[Any]], count: int, seed: int
) -> dict[str, Settings]:
    """`count` points, each field drawn by itself: from a list evenly, from `low..high` evenly in
    the logarithm."""
    if count < 1:
        raise ValueError(f"{count} random points are none; ask for at least 1")
    rng = random.Random(seed)
    points: dict[str, Settings] = {}
    for _ in range(100 * count):  # a point that is drawn again adds none
        changes = {name: _draw(name, choices, rng) for name, choices in ranges.items()}
        points.setdefault(name_of(changes), settings.changed(changes))
        if len(points) == count:
            break
    return points


def _draw(name: str, choices: list[Any], rng: random.Random) -> Any:
    chosen = rng.choice(choices)
    if not (isinstance(chosen, str) and ".." in chosen) or ":" in chosen or name in OWN:
        return chosen
    try:
        low, high = (float(end) for end in chosen.split("..", 1))
    except ValueError:
        low, high = 0.0, 0.0
    if not 0 < low < high:
        raise ValueError(f"{name}={chosen} is no range; give low..high with 0 < low < high")
    value = low * (high / low) ** rng.random()
    return round(value) if isinstance(parsed(name, "1"), int) else float(f"{value:.4g}")


def name_of(changes: Mapping[str, Any]) -> str:
    shown = {name: value if name not in OWN else references.short(value)
             for name, value in changes.items()}  # fmt: skip
    return ",".join(f"{name}={value}" for name, value in shown.items())

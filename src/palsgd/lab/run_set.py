"""Several runs in one folder. Finished runs are skipped, the others are run, and all are
compared."""

import functools
import itertools
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from palsgd.lab.comparison import compared
from palsgd.lab.device import check_device, chosen_device
from palsgd.lab.launcher import Job, check_world, first_rank, run_jobs, under_torchrun
from palsgd.lab.methods import method_of
from palsgd.lab.run_folder import RunFolder, write_json
from palsgd.lab.settings import FIELDS, IN_EPOCHS, Settings, parsed, setting_name
from palsgd.lab.simulated_run import SimulatedRun, shape_of, simulate_runs
from palsgd.lab.workload import Workload
from palsgd.lab.workloads import data_settings, load


@dataclass(frozen=True, kw_only=True)
class Options:
    """The options of how runs are done. `Settings` define the runs themselves."""

    simulate: bool = False
    data: str | None = None
    download: bool = False
    device: str = "auto"
    force: bool = False
    resume: bool = False
    quiet: bool = False
    vectorize: bool | str = "auto"
    share_program: bool = True  # simulated runs of equal shape; their seconds are then joint


def check_folder(out: Path, options: Options) -> None:
    """Refuse a folder that is not empty, unless the options allow it."""
    used = out.exists() and (not out.is_dir() or any(out.iterdir()))
    if used and not (options.force or options.resume):
        raise ValueError(
            f"{out} exists and is not empty; add --resume to go on with it, --force to start over, "
            "or choose another --out"
        )


def check_method(settings: Settings) -> None:
    """Raise if the method cannot work with its settings and the learning rate. It is called for all
    runs before the first one begins."""
    method_of(settings).check([settings.lr])


def check_simulated(runs: Sequence[Settings]) -> None:
    several = [run.ranks_per_worker for run in runs if run.ranks_per_worker > 1]
    if several:
        raise ValueError(
            f"--ranks-per-worker {several[0]} is for real processes, a simulated worker computes "
            "its whole batch at once; leave it out, or leave out --simulate"
        )


def run_all(
    runs: Mapping[str, Settings], out: Path, options: Options, swept: Sequence[str] = ()
) -> dict[str, Any]:
    """Do the runs that are not finished, each in a folder of its name; then compare them all. The
    records of the collection also have the `swept` fields."""
    for settings in runs.values():
        check_method(settings)
        if under_torchrun():
            check_world(settings)
    if under_torchrun() and options.simulate:
        raise ValueError("--simulate needs one process; start it without torchrun")
    if options.simulate:
        check_simulated(list(runs.values()))
    check_device(options.device)
    check_folder(out, options)
    out.mkdir(parents=True, exist_ok=True)
    if options.force and first_rank():
        for config in list(out.glob("*/config.yaml")):
            RunFolder(config.parent).clear()
    waiting = {
        name: settings
        for name, settings in runs.items()
        if not _is_done(RunFolder(out / name), name, settings, options)
    }
    told = [settings.cluster for settings in runs.values() if settings.cluster is not None]
    if told and not options.simulate:
        raise ValueError(
            f"cluster={told[0]} is for simulated workers, real ones have a time of their own; add "
            "--simulate, or leave it out"
        )
    if options.simulate:
        _simulate(waiting, out, options)
    else:
        _launch(waiting, out, options)
    return finish(runs, out, swept) if first_rank() else {}


def _is_done(folder: RunFolder, name: str, settings: Settings, options: Options) -> bool:
    """Is the run in the folder finished with these settings? A run with other settings is an error
    and is not overwritten."""
    if not (folder.path / "config.yaml").exists():
        return False
    before, wanted = folder.config(), settings.as_dict() | {"simulated": options.simulate}
    for name, in_epochs in IN_EPOCHS:  # what is given in epochs is resolved in the file
        if wanted[in_epochs] and not wanted[name]:
            del wanted[name]
    for key, value in wanted.items():
        then = before.get(key, _default(key))
        if then != value and key not in ("checkpoint_every",):
            raise ValueError(
                f"{folder.path} was run with {key}={then}, now it is {value}; "
                "use the old value, --force to start over, or another --out"
            )
    return folder.finished or folder.failure is not None


def _default(key: str) -> Any:
    """The value of a setting in a folder that is older than the setting."""
    return FIELDS[key].default if key in FIELDS else None


def finish(runs: Mapping[str, Settings], out: Path, swept: Sequence[str] = ()) -> dict[str, Any]:
    """summary.json of every run and of the collection. The error about failed runs is raised after
    all others are written."""
    folders = {name: RunFolder(out / name) for name in runs}
    failed = {name: folder.failure for name, folder in folders.items() if folder.failure}
    folders = {name: folder for name, folder in folders.items() if name not in failed}
    if not folders:
        raise FailedRunsError(failed)
    records = {name: _record(folder) for name, folder in folders.items()}
    better = {name: folder.config()["higher_is_better"] for name, folder in folders.items()}
    lines = {name: folder.lines() for name, folder in folders.items()}
    settings = {name: runs[name].as_dict() for name in folders}
    found = compared(records, lines, next(iter(better.values())), settings)
    for name, folder in folders.items():
        folder.write_summary(found[name])
    found = {
        name: {field: runs[name].as_dict()[setting_name(field)] for field in swept} | record
        for name, record in found.items()
    }
    write_json(out / "summary.json", found)
    if failed:
        raise FailedRunsError(failed)
    return found


def _record(folder: RunFolder) -> dict[str, Any]:
    found = folder.summary()
    if found is None:
        raise RuntimeError(f"{folder.path} has no summary.json; go on with the run by --resume")
    return found


class FailedRunsError(RuntimeError):
    """Some runs ended early by themselves; the others are done."""

    def __init__(self, reasons: Mapping[str, str | None]):
        lines = "; ".join(f"{name}: {reason}" for name, reason in reasons.items())
        super().__init__(f"{len(reasons)} of the runs failed ({lines})")


def _launch(runs: Mapping[str, Settings], out: Path, options: Options) -> None:
    """Runs with equally many processes share them."""
    jobs = [
        Job(
            settings=settings,
            folder=out / name,
            data=options.data,
            download=options.download,
            resume=options.resume,
            quiet=options.quiet,
        )
        for name, settings in runs.items()
    ]
    if under_torchrun():  # rank 0 decides which runs are left to do
        run_jobs(jobs, options.device)
        return
    jobs.sort(key=lambda job: job.settings.processes)
    for _, group in itertools.groupby(jobs, key=lambda job: job.settings.processes):
        run_jobs(list(group), options.device)


def _simulate(runs: Mapping[str, Settings], out: Path, options: Options) -> None:
    """Runs of equal shape share a program."""
    device = chosen_device(options.device)

    @functools.cache  # runs with the same data share it
    def loaded(workload: str, **own: Any) -> Workload:
        return load(workload, data=options.data, device=device, download=options.download, **own)

    shapes: dict[tuple[Any, ...], list[str]] = {}
    for name, settings in runs.items():
        alone = () if options.share_program else (name,)
        shapes.setdefault(shape_of(settings) + alone, []).append(name)
    for names in shapes.values():
        simulate_runs(
            [
                SimulatedRun(run, loaded(run.workload, **data_settings(run)), RunFolder(out / name))
                for name, run in ((name, runs[name]) for name in names)
            ],
            quiet=options.quiet,
            vectorize=options.vectorize,
        )


def grid_of(settings: Settings, values: Mapping[str, list[Any]]) -> dict[str, Settings]:
    """All combinations, by the name of their run."""
    points = {}
    varied = [name for name, choices in values.items() if len(choices) > 1] or list(values)
    for combination in itertools.product(*values.values()):
        changes = dict(zip(values, combination, strict=True))
        name = name_of({field: changes[field] for field in varied})
        points[name] = settings.changed(changes)
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
    if not (isinstance(chosen, str) and ".." in chosen) or ":" in chosen:
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
    return ",".join(f"{name}={value}" for name, value in changes.items())

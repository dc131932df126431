"""`palsgd demo`: over a link like mine, what do I gain, and what do I lose?

Digits, tuned for every method, in real processes. Where this machine can emulate the link (Linux,
root), steps are timed over it, and runs are trained over it as long as that is quick; all other
runs are trained over loopback, since a link changes how long a sync takes and not what it computes.
Elsewhere the cluster's model projects the steps that were measured here. Seeds and settings stand
in this file and in the recipe's tuned settings: both were fixed before the test images were read.
"""

import contextlib
import threading
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from palsgd.lab.folder_lock import locked
from palsgd.lab.forecast import work_of
from palsgd.lab.launcher import StoppedError, affordable, run_jobs, run_over_link
from palsgd.lab.links import Link, unavailable
from palsgd.lab.methods import default_names, mixing
from palsgd.lab.order import Job, Order
from palsgd.lab.run_folder import RunFolder
from palsgd.lab.run_list import compared_runs
from palsgd.lab.run_set import Options, check_folder, run_all
from palsgd.lab.settings import Settings
from palsgd.lab.timing import record
from palsgd.lab.workloads import recipe
from palsgd.progress import Whole

RECIPE = "digits"
LINK = "100mbit,20ms"
SEEDS = 5
FIRST_SEED = 1
OVER_LINK_S = 40.0  # of training over the emulated link


def demo_runs() -> dict[str, Settings]:
    """Every method with its tuned settings and all seeds, seed by seed. The mixing method is first,
    which is what the demo is about: it is the first to be trained over the link."""
    # checkpoints would be waited for over the link; the whole demo is done again as quickly
    base = recipe(RECIPE).changed({"seed": FIRST_SEED, "checkpoint_every": 10**6})
    names = sorted(default_names(), key=lambda name: name != mixing().name)
    wanted = {name: base.changed({"method": name}) for name in names}
    runs, _ = compared_runs(wanted, recipe=RECIPE, seeds=SEEDS)
    return dict(sorted(runs.items(), key=lambda run: run[1].seed))


def run_demo(
    out: Path, link: str, options: Options, runs: Mapping[str, Settings] | None = None
) -> str | None:
    """Time, train and write everything into `out`. Returns why the link could not be emulated, so
    that its seconds are projections; None if it was."""
    runs = demo_runs() if runs is None else runs
    Link.parse(link)  # refused before anything is written
    check_folder(out, options)
    with locked(out):
        reason = unavailable()
        if reason is None:
            _over_link(runs, out, link, quiet=options.quiet)
        # all runs where there is no link, else those that are missing; and what they come to
        run_all(runs, out, Options(device="cpu", quiet=options.quiet, resume=True))
    return reason


def _over_link(runs: Mapping[str, Settings], out: Path, link: str, *, quiet: bool) -> None:
    """Time all runs over the link, then train some over it and the others beside them: workers
    behind a slow link hardly compute."""
    jobs = [
        Job(settings=settings, folder=out / name, data=None, download=False, resume=True,
            quiet=quiet)
        for name, settings in runs.items()
        if not RunFolder(out / name).finished
    ]  # fmt: skip
    if not jobs:
        return
    # A daemon, and its workers end with this process: Ctrl-C waits for nobody.
    beside = threading.Thread(target=_train_beside, args=(jobs,), daemon=True)
    beside.start()
    timed = [replace(job, link=link) for job in jobs]
    run_over_link(_order(timed, link=link, within_s=OVER_LINK_S))
    beside.join()


def _train_beside(jobs: list[Job]) -> None:
    """Train over loopback what is not trained over the link, once everything has been timed."""
    while any(record.session_of(job.folder) is None for job in jobs):
        time.sleep(0.2)
    over_link = affordable(jobs, OVER_LINK_S)
    others = [replace(job, quiet=True) for job in jobs if job not in over_link]
    if others:
        # what is missing is done again, and says why
        with contextlib.suppress(RuntimeError, StoppedError):
            run_jobs(_order(others, gives_way=True))


def _order(jobs: list[Job], **how: Any) -> Order:
    whole = Whole(runs=len(jobs), work=work_of(job.settings for job in jobs))
    return Order(jobs=jobs, device="cpu", whole=whole, **how)

"""`palsgd demo`: over a link like mine, what do I gain, and what do I lose?

Digits, tuned for every method. What a step takes is timed in real processes, over the link where
this machine can emulate it (Linux, root); elsewhere the cluster's model projects the steps that
were measured here. What a step is worth takes many seeds. They are trained by simulated workers,
who compute what real ones do: a link changes how long a sync takes and not what it computes. Seeds
and settings stand in this file and in the recipe's tuned settings: both were fixed before the test
images were read.
"""

from collections.abc import Mapping
from pathlib import Path

from palsgd.lab.folder_lock import locked
from palsgd.lab.launcher import run_jobs, run_over_link
from palsgd.lab.links import Link, unavailable
from palsgd.lab.methods import default_names
from palsgd.lab.order import Job, Order
from palsgd.lab.run_list import compared_runs
from palsgd.lab.run_set import Options, check_folder, run_all
from palsgd.lab.settings import Settings
from palsgd.lab.timing import record
from palsgd.lab.workloads import recipe

RECIPE = "digits"
LINK = "100mbit,20ms"
SEEDS = 16
FIRST_SEED = 1


def demo_runs() -> dict[str, Settings]:
    """Every method with its tuned settings and all seeds."""
    base = recipe(RECIPE).changed({"seed": FIRST_SEED})
    wanted = {name: base.changed({"method": name}) for name in default_names()}
    return compared_runs(wanted, recipe=RECIPE, seeds=SEEDS)[0]


def run_demo(
    out: Path, link: str, options: Options, runs: Mapping[str, Settings] | None = None
) -> str | None:
    """Time, train and write everything into `out`. Returns why the link could not be emulated, so
    that its seconds are projections; None if it was."""
    runs = demo_runs() if runs is None else runs
    Link.parse(link)  # refused before anything is written
    check_folder(out, options)
    reason = unavailable()
    with locked(out):
        if options.force:
            (out / record.NAME).unlink(missing_ok=True)
        _time(runs, out, link if reason is None else None, quiet=options.quiet)
        run_all(
            runs, out,
            Options(device="cpu", simulate=True, quiet=options.quiet, force=options.force,
                    resume=not options.force),
        )  # fmt: skip
    return reason


def _time(runs: Mapping[str, Settings], out: Path, link: str | None, *, quiet: bool) -> None:
    """The steps of all runs, in real processes; over the network as it is without a link."""
    jobs = [
        Job(settings=settings, folder=out / name, data=None, download=False, resume=False,
            quiet=quiet)
        for name, settings in runs.items()
        if record.session_of(out / name) is None
    ]  # fmt: skip
    order = Order(jobs=jobs, device="cpu", link=link, trains=False)
    if jobs:
        (run_jobs if link is None else run_over_link)(order)

"""`palsgd demo`: over a link like mine, what do I gain, and what do I lose?

Digits, tuned for every method, in real processes. Where this machine can emulate the link (Linux,
root), steps are timed over it, and runs are trained over it as long as that is quick; all other
runs are trained over loopback, since a link changes how long a sync takes and not what it computes.
Elsewhere the cluster's model projects the steps that were measured here. Seeds and settings stand
in this file and in the recipe's tuned settings: both were fixed before the test images were read.
"""

from collections.abc import Mapping
from pathlib import Path

from palsgd.lab.launcher import Job
from palsgd.lab.links import Link, job_main, unavailable
from palsgd.lab.methods import default_names, mixing
from palsgd.lab.run_list import with_seeds, with_tuned
from palsgd.lab.run_set import Options, check_folder, run_all
from palsgd.lab.settings import Settings
from palsgd.lab.tuning.tuned_file import shipped
from palsgd.lab.workloads import recipe

RECIPE = "digits"
LINK = "100mbit,20ms"
SEEDS = 5
FIRST_SEED = 1
OVER_LINK_S = 40.0  # of training over the emulated link


def demo_runs(steps: int | None = None) -> dict[str, Settings]:
    """Every method with its tuned settings and all seeds, the mixing method first, which is what
    the demo is about and is the first to be trained over the link."""
    # checkpoints would be waited for over the link; the whole demo is done again as quickly
    base = recipe(RECIPE).changed({"seed": FIRST_SEED, "checkpoint_every": 10**6})
    names = sorted(default_names(), key=lambda name: name != mixing().name)
    chosen = {name: base.changed({"method": name}) for name in names}
    if RECIPE in shipped():
        chosen, _ = with_tuned(chosen, RECIPE)
    if steps is not None:
        chosen = {name: each.changed({"steps": steps}) for name, each in chosen.items()}
    runs = with_seeds(chosen, SEEDS)
    return dict(sorted(runs.items(), key=lambda run: run[1].seed))  # seed by seed


def run_demo(
    out: Path, link: str, options: Options, runs: Mapping[str, Settings] | None = None
) -> str | None:
    """Time, train and write everything into `out`. Returns why the link could not be emulated, so
    that its seconds are projections; None if it was."""
    runs = demo_runs() if runs is None else runs
    Link.parse(link)  # refused before anything is written
    check_folder(out, options)
    out.mkdir(parents=True, exist_ok=True)
    reason = unavailable()
    if reason is None:
        _over_link(runs, out, link, options)
    run_all(runs, out, Options(device="cpu", quiet=options.quiet, resume=True))
    return reason


def _over_link(runs: Mapping[str, Settings], out: Path, link: str, options: Options) -> None:
    """All runs are timed; those are trained that fit into the seconds there are."""
    jobs = [
        Job(settings=settings, folder=out / name, data=None, download=False, resume=options.resume,
            quiet=options.quiet)
        for name, settings in runs.items()
        if not (out / name / "summary.json").exists()
    ]  # fmt: skip
    if jobs:
        job_main.run(jobs, "cpu", link, within_s=OVER_LINK_S)

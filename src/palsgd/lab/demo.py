"""`palsgd demo`: over a link like mine, what do I gain, and what do I lose?

Digits, tuned for every method. Real processes time the steps of every method in turn, and then
train its first seed to the end, over the link where this machine can emulate it (Linux, root);
elsewhere over the network as it is, and the cluster's model projects the steps that were measured.
One seed decides nothing. All seeds are trained by simulated workers, who compute what real ones do:
a link changes how long a sync takes and not what it computes. The seed that both have trained shows
whether that is so, and whether its run takes what its steps were timed to take. Seeds and settings
stand in this file and in the recipe's tuned settings: both were fixed before the test images were
read.
"""

from collections.abc import Mapping
from pathlib import Path

from palsgd.lab.folder_lock import locked
from palsgd.lab.launcher import run_jobs, run_over_link
from palsgd.lab.links import Link, unavailable
from palsgd.lab.methods import default_names
from palsgd.lab.order import Job, Order
from palsgd.lab.run_list import compared_runs
from palsgd.lab.run_set import Options, check_folder, clear_all, run_all
from palsgd.lab.settings import Settings
from palsgd.lab.timing import record
from palsgd.lab.workloads import recipe

RECIPE = "digits"
LINK = "100mbit,2ms"
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
            clear_all(out)
            (out / record.NAME).unlink(missing_ok=True)
        emulated = link if reason is None else None
        _check_link(out, emulated)
        _work(runs, out, emulated, quiet=options.quiet)
        simulated = Options(device="cpu", simulate=True, quiet=options.quiet, resume=True)
        run_all(runs, out, simulated)
    return reason


def _check_link(out: Path, link: str | None) -> None:
    """Refuse to go on over another link than the one that steps were timed over."""
    for session in record.read(out):
        if session.link != link:
            raise ValueError(
                f"{out} was timed over {_network(session.link)}, now it is {_network(link)}; use "
                "the old --link, --force to start over, or another --out"
            )


def _network(link: str | None) -> str:
    return "no emulated link" if link is None else f"--link {link}"


def _work(runs: Mapping[str, Settings], out: Path, link: str | None, *, quiet: bool) -> None:
    """In real processes: the steps of all runs, and the first seed of each method to its end; over
    the network as it is without a link."""
    jobs = [*_to_time(runs, out, quiet=quiet), *_to_train(runs, out, link, quiet=quiet)]
    order = Order(jobs=jobs, device="cpu", link=link)
    if jobs:
        (run_jobs if link is None else run_over_link)(order)


def _to_time(runs: Mapping[str, Settings], out: Path, *, quiet: bool) -> list[Job]:
    return [
        Job(settings=settings, folder=out / name, data=None, download=False, resume=False,
            quiet=quiet, trains=False)
        for name, settings in runs.items()
        if record.session_of(out / name) is None
    ]  # fmt: skip


def _to_train(
    runs: Mapping[str, Settings], out: Path, link: str | None, *, quiet: bool
) -> list[Job]:
    """The twins that are not done. They write no checkpoints on the way: over a slow link these
    take longer than what a run of a minute could lose."""
    first: dict[str, str] = {}
    for name, settings in runs.items():
        first.setdefault(settings.method, name)
    jobs = [
        Job(settings=runs[name].changed({"checkpoint_every": runs[name].steps}),
            folder=out / f"{name},processes", data=None, download=False, resume=True, quiet=quiet,
            link=link, twin_of=name)
        for name in first.values()
    ]  # fmt: skip
    return [job for job in jobs if not job.done]

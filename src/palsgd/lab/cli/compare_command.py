"""`palsgd compare`: several methods beside each other."""

import typer

from palsgd.lab.cli.common_options import (
    Changes,
    Controls,
    Data,
    Device,
    Download,
    Force,
    Methods,
    MixProb,
    MixRate,
    OnCluster,
    OnLink,
    Out,
    Pull,
    Quiet,
    RanksPerWorker,
    Recipe,
    Report,
    Resume,
    Seed,
    Seeds,
    Simulate,
    Steps,
    SyncEvery,
    Workers,
    cluster_fields,
    method_names,
    new_folder,
    settings_from,
)
from palsgd.lab.cli.running import run_and_show


def compare(
    recipe: Recipe,
    changes: Changes = None,
    methods: Methods = None,
    workers: Workers = None,
    ranks_per_worker: RanksPerWorker = None,
    simulate: Simulate = False,
    cluster: OnCluster = None,
    link: OnLink = None,
    steps: Steps = None,
    sync_every: SyncEvery = None,
    mix_prob: MixProb = None,
    mix_rate: MixRate = None,
    pull: Pull = None,
    seed: Seed = None,
    seeds: Seeds = 1,
    controls: Controls = False,
    out: Out = None,
    data: Data = None,
    download: Download = False,
    device: Device = "auto",
    force: Force = False,
    resume: Resume = False,
    quiet: Quiet = False,
    report: Report = True,
) -> None:
    """Run several methods on the same data and seeds, and say what may be said of them.

    Verdicts need several seeds, and settings that were tuned for each method.

    Example: palsgd compare digits --simulate --seeds 5 --controls
    """
    from palsgd.lab.run_list import with_controls, with_seeds

    names = method_names(methods)  # first: settings may be those of a user's own method
    settings = settings_from(
        recipe, changes, workers=workers, ranks_per_worker=ranks_per_worker, steps=steps,
        sync_every=sync_every, mix_prob=mix_prob, mix_rate=mix_rate, pull=pull, seed=seed,
        cluster=cluster_fields(cluster),
    )  # fmt: skip
    runs = {method: settings.changed({"method": method}) for method in names}
    if controls:
        runs, left_out = with_controls(runs, seeds=seeds)
        for name, reason in left_out.items():
            typer.echo(f"left out: the control {name}, as {reason}", err=True)
    run_and_show(with_seeds(runs, seeds), out or new_folder(recipe), report, simulate=simulate,
             data=data, download=download, device=device, force=force, resume=resume,
             quiet=quiet, link=link)  # fmt: skip

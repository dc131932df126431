"""`palsgd compare`: several methods beside each other."""

from palsgd.lab.cli.common_options import (
    Changes,
    Data,
    Device,
    Download,
    Force,
    Methods,
    MixProb,
    MixRate,
    OnCluster,
    Out,
    Pull,
    Quiet,
    RanksPerWorker,
    Recipe,
    Report,
    Resume,
    Seed,
    Simulate,
    Steps,
    SyncEvery,
    Workers,
    cluster_fields,
    method_names,
    settings_from,
)
from palsgd.lab.cli.running import run_compared


def compare(
    recipe: Recipe,
    changes: Changes = None,
    methods: Methods = None,
    workers: Workers = None,
    ranks_per_worker: RanksPerWorker = None,
    simulate: Simulate = False,
    cluster: OnCluster = None,
    steps: Steps = None,
    sync_every: SyncEvery = None,
    mix_prob: MixProb = None,
    mix_rate: MixRate = None,
    pull: Pull = None,
    seed: Seed = None,
    out: Out = None,
    data: Data = None,
    download: Download = False,
    device: Device = "auto",
    force: Force = False,
    resume: Resume = False,
    quiet: Quiet = False,
    report: Report = True,
) -> None:
    """Run several methods on the same data and seeds; the target is what DDP reaches.

    Example: palsgd compare stories --workers 4 --simulate --steps 1000
    """
    names = method_names(methods)
    settings = settings_from(
        recipe, changes, workers=workers, ranks_per_worker=ranks_per_worker, steps=steps,
        sync_every=sync_every, mix_prob=mix_prob, mix_rate=mix_rate, pull=pull, seed=seed,
        cluster=cluster_fields(cluster),
    )  # fmt: skip
    run_compared(settings, names, out, recipe, report=report, simulate=simulate,
             data=data, download=download, device=device, force=force, resume=resume,
             quiet=quiet)  # fmt: skip

"""`palsgd train`: one run."""

from palsgd.lab.cli.common_options import (
    Changes,
    Data,
    Deadline,
    Device,
    Download,
    Elastic,
    Force,
    GoOn,
    KeepBatch,
    MethodName,
    MinWorkers,
    MixProb,
    MixRate,
    OnCluster,
    Out,
    Pull,
    Quiet,
    RanksPerWorker,
    Recipe,
    Report,
    Restarts,
    Resume,
    Seed,
    Simulate,
    Steps,
    SyncEvery,
    Timeout,
    Workers,
    cluster_fields,
    is_elastic,
    new_folder,
    settings_from,
)
from palsgd.lab.cli.running import run_and_show
from palsgd.lab.settings import TIMEOUT_S


def train(
    recipe: Recipe,
    changes: Changes = None,
    method: MethodName = None,
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
    elastic: Elastic = False,
    keep_batch: KeepBatch = "worker",
    restarts: Restarts = 0,
    go_on: GoOn = False,
    min_workers: MinWorkers = None,
    deadline: Deadline = None,
    timeout: Timeout = TIMEOUT_S,
    quiet: Quiet = False,
    report: Report = True,
) -> None:
    """Train one workload with one method.

    Workers are processes that are started here or by torchrun, or they are simulated.

    Example: palsgd train stories --method palsgd --workers 2 --steps 900
    """
    settings = settings_from(
        recipe, changes, method=method, workers=workers, ranks_per_worker=ranks_per_worker,
        steps=steps, sync_every=sync_every, mix_prob=mix_prob, mix_rate=mix_rate, pull=pull,
        seed=seed, cluster=cluster_fields(cluster),
    )  # fmt: skip
    from palsgd.lab.methods import runs_of

    runs = runs_of(settings, (settings.method,))
    run_and_show(runs, out or new_folder(recipe), report, simulate=simulate,
         data=data, download=download, device=device, force=force, resume=resume,
         elastic=is_elastic(elastic, resume=resume, workers=workers, changes=changes),
         keep_batch=keep_batch, quiet=quiet, restarts=restarts, timeout_s=timeout, go_on=go_on,
         min_workers=min_workers, deadline_s=deadline)  # fmt: skip

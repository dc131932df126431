"""`palsgd compare`: several methods beside each other."""

import typer

from palsgd.lab.cli.common_options import (
    AtOnce,
    Changes,
    Controls,
    Data,
    Device,
    Download,
    Elastic,
    Force,
    KeepBatch,
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
    Restarts,
    Resume,
    Seed,
    Seeds,
    Simulate,
    Steps,
    SyncEvery,
    Timeout,
    Tuned,
    Workers,
    cluster_fields,
    is_elastic,
    method_names,
    new_folder,
    settings_from,
)
from palsgd.lab.cli.running import run_and_show
from palsgd.lab.settings import TIMEOUT_S, assignments


def compare(
    recipe: Recipe,
    changes: Changes = None,
    methods: Methods = None,
    workers: Workers = None,
    ranks_per_worker: RanksPerWorker = None,
    simulate: Simulate = False,
    at_once: AtOnce = 1,
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
    tuned: Tuned = None,
    out: Out = None,
    data: Data = None,
    download: Download = False,
    device: Device = "auto",
    force: Force = False,
    resume: Resume = False,
    elastic: Elastic = False,
    keep_batch: KeepBatch = "worker",
    restarts: Restarts = 0,
    timeout: Timeout = TIMEOUT_S,
    quiet: Quiet = False,
    report: Report = True,
) -> None:
    """Compare methods on the same data and seeds. Say who ends better or worse.

    Verdicts need several seeds, and settings that were tuned for each method.

    Example: palsgd compare digits --simulate --seeds 5 --controls
    """
    from palsgd.lab.methods import runs_of
    from palsgd.lab.run_list import compared_runs

    flags = {
        "workers": workers, "ranks_per_worker": ranks_per_worker, "steps": steps,
        "sync_every": sync_every, "mix_prob": mix_prob, "mix_rate": mix_rate, "pull": pull,
        "seed": seed, "cluster": cluster_fields(cluster),
    }  # fmt: skip
    names = method_names(methods)  # first: settings may be those of a user's own method
    settings = settings_from(recipe, changes, **flags)
    given = {name for name, value in flags.items() if value is not None}
    runs, remarks = compared_runs(
        runs_of(settings, names), recipe=recipe, seeds=seeds, controls=controls, tuned=tuned,
        given=given | assignments(changes or []).keys(),
    )  # fmt: skip
    run_and_show(runs, out or new_folder(recipe), report, simulate=simulate, at_once=at_once,
         data=data, download=download, device=device, force=force, resume=resume,
         elastic=is_elastic(elastic, resume=resume, workers=workers, changes=changes),
         keep_batch=keep_batch, quiet=quiet, link=link, restarts=restarts,
         timeout_s=timeout)  # fmt: skip
    for remark in remarks:  # last: bad input gets one line
        typer.echo(remark, err=True)

"""`palsgd bench link`."""

from typing import Annotated

import typer

from palsgd.interrupts import exit_code
from palsgd.lab.cli.common_options import (
    Changes,
    Data,
    Device,
    Download,
    Force,
    Methods,
    MixProb,
    MixRate,
    Out,
    Pull,
    Quiet,
    Seed,
    Workers,
    method_names,
    new_folder,
    settings_from,
)
from palsgd.lab.cli.output import fail, print_parts


def link(
    recipe: Annotated[
        str, typer.Argument(help="A workload or recipe; `palsgd recipes` lists them.")
    ] = "stories",
    changes: Changes = None,
    rate: Annotated[
        str,
        typer.Option(help="Rate of every worker's link, each way, e.g. 10mbit or 1gbit; or none."),
    ] = "100mbit",
    latency: Annotated[
        str, typer.Option(help="Latency of every packet, one way: milliseconds, or e.g. 50us.")
    ] = "0",
    loss: Annotated[float, typer.Option(help="Share of the packets that every link drops.")] = 0.0,
    slow_worker: Annotated[
        str | None, typer.Option(help="Rate of the last worker's link, if it differs, e.g. 10mbit.")
    ] = None,
    lossy: Annotated[
        float | None, typer.Option(help="Share of the packets that the last worker's link drops.")
    ] = None,
    methods: Methods = None,
    workers: Workers = None,
    steps: Annotated[
        int | None, typer.Option(help="Steps of the clock.", show_default="64")
    ] = None,
    sync_every: Annotated[
        int | None, typer.Option(help="H, the steps between two syncs.", show_default="16")
    ] = None,
    mix_prob: MixProb = None,
    mix_rate: MixRate = None,
    pull: Pull = None,
    seed: Seed = None,
    out: Out = None,
    data: Data = None,
    download: Download = False,
    device: Device = "auto",
    force: Force = False,
    quiet: Quiet = False,
) -> None:
    """Run methods over emulated links: each worker has a network namespace and a shaped interface.

    This needs Linux and root. Elsewhere times are projected from a run over loopback.

    Example: palsgd bench link stories --workers 4 --rate 100mbit --latency 20
    """
    from palsgd.lab import bench_link
    from palsgd.lab.links import unavailable
    from palsgd.lab.methods import runs_of
    from palsgd.lab.run_set import Options

    if "=" in recipe:  # no workload named, only settings
        recipe, changes = "stories", [recipe, *(changes or [])]
    names = method_names(methods)
    settings = settings_from(
        recipe, bench_link.with_defaults(changes or []), workers=workers, steps=steps,
        sync_every=sync_every, mix_prob=mix_prob, mix_rate=mix_rate, pull=pull, seed=seed,
    )  # fmt: skip
    links = bench_link.links_of(workers=settings.workers, rate=rate, latency=latency, loss=loss,
                                slow=slow_worker, lossy=lossy)  # fmt: skip
    runs = runs_of(settings, names)
    out = out or new_folder(recipe, "-link")
    options = Options(data=data, download=download, device=device, force=force, quiet=quiet)
    bench_link.check(runs, out, options)
    if reason := unavailable():
        typer.echo(f"{reason}. Times are projected from a run over loopback instead.", err=True)
    try:
        result = bench_link.bench(runs, links, out, options)
    except KeyboardInterrupt as stopped:
        fail(f"stopped; what is done is in {out}", exit_code(stopped))
    print_parts(bench_link.tables(result))
    typer.echo(f"results: {out}")

"""`palsgd plan`."""

from typing import Annotated

import typer

from palsgd import units
from palsgd.lab.cli.common_options import (
    Data,
    Device,
    MixProb,
    Out,
    Steps,
    Workers,
    new_folder,
    settings_from,
)
from palsgd.lab.cli.output import print_parts


def plan(
    recipe: Annotated[
        str | None,
        typer.Argument(help="A recipe to measure; not needed with --step-ms and --parameters."),
    ] = None,
    workers: Workers = None,
    rate: Annotated[str, typer.Option(help="Of a worker's (or node's) link, each way.")] = "1gbit",
    latency: Annotated[str, typer.Option(help="One way: milliseconds, or e.g. 50us.")] = "1",
    step_ms: Annotated[
        float | None, typer.Option(help="Of a gradient step.", show_default="measured")
    ] = None,
    parameters: Annotated[
        str | None, typer.Option(help="E.g. 8M or 70B.", show_default="the recipe's")
    ] = None,
    steps: Steps = None,
    mix_prob: MixProb = None,
    extra_steps: Annotated[
        float, typer.Option(help="The share of steps that local methods need beyond DDP's.")
    ] = 0.0,
    spread: Annotated[str, typer.Option(help="Of steps: constant, lognormal, heavy-tail.")] = (
        "constant"
    ),
    cv: Annotated[float, typer.Option(help="Deviation over mean of lognormal steps.")] = 0.1,
    straggler: Annotated[float, typer.Option(help="How much slower one worker is.")] = 1.0,
    per_node: Annotated[int, typer.Option(help="Workers that share a fast node.")] = 1,
    node_rate: Annotated[str, typer.Option(help="Inside a node.")] = "1200gbit",
    all_reduce: Annotated[str, typer.Option(help="auto, ring, tree, two-level, or gloo.")] = "auto",
    overlap: Annotated[
        float, typer.Option(help="Share of a step behind which DDP hides its all-reduces.")
    ] = 2 / 3,
    paper_clusters: Annotated[
        bool, typer.Option("--paper-clusters", help="The paper's clusters and speed-ups instead.")
    ] = False,
    scale_study: Annotated[
        bool, typer.Option("--scale-study", help="8 to 10,000 workers, 8M to 70B, instead.")
    ] = False,
    data: Data = None,
    device: Device = "auto",
    out: Out = None,
) -> None:
    """Say what pays on a cluster: H, overlap, compression, workers; time, bytes and memory.

    Example: palsgd plan --step-ms 50 --parameters 8M --rate 100mbit
    """
    from palsgd.lab.device import check_device
    from palsgd.lab.plan import command

    if paper_clusters:
        from palsgd.lab.plan.paper import paper_parts

        print_parts(paper_parts())
        return
    folder = out or new_folder("plan")
    if scale_study:
        from palsgd.lab.plan.scale import scale_parts

        print_parts(scale_parts(folder))
        return
    check_device(device)
    settings = None if recipe is None else settings_from(recipe, None)
    number = workers or (4 if settings is None else settings.workers)
    cluster, task = command.prepare(
        settings, step_ms=step_ms, parameters=parameters, steps=steps, mix_prob=mix_prob,
        extra_steps=extra_steps, data=data, device=device, workers=number, rate=rate,
        latency=units.milliseconds("latency", latency, zero=True) / 1e3, spread=spread, cv=cv,
        straggler=straggler, per_node=per_node, node_rate=node_rate, all_reduce=all_reduce,
        overlap=overlap,
    )  # fmt: skip
    print_parts(command.plan(cluster, task, folder))

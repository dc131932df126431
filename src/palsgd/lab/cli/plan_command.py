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
        typer.Argument(help="The recipe to measure. --step-ms and --parameters replace it."),
    ] = None,
    workers: Workers = None,
    rate: Annotated[
        str, typer.Option(help="Rate of a worker's (or node's) link, each way.")
    ] = "1gbit",
    latency: Annotated[
        str, typer.Option(help="Latency, one way: milliseconds, or e.g. 50us.")
    ] = "1",
    step_ms: Annotated[
        float | None, typer.Option(help="Milliseconds of a gradient step.", show_default="measured")
    ] = None,
    parameters: Annotated[
        str | None,
        typer.Option(help="Size of the model, e.g. 100K, 8M or 70B.", show_default="the recipe's"),
    ] = None,
    steps: Steps = None,
    mix_prob: MixProb = None,
    extra_steps: Annotated[
        float | None,
        typer.Option(
            help="Steps that methods with rounds need beyond DDP's, as a share of DDP's.",
            show_default="as measured",
        ),
    ] = None,
    slow_link: Annotated[
        str | None, typer.Option(help="Rate of the slowest worker's link, if links are uneven.")
    ] = None,
    spread: Annotated[
        str, typer.Option(help="How step times vary: constant, lognormal, heavy-tail.")
    ] = "constant",
    cv: Annotated[
        float, typer.Option(help="Standard deviation of lognormal step times over their mean.")
    ] = 0.1,
    straggler: Annotated[float, typer.Option(help="Factor by which stragglers are slower.")] = 1.0,
    stragglers: Annotated[int, typer.Option(help="Number of stragglers.")] = 1,
    per_node: Annotated[
        int, typer.Option(help="Workers per node. Links inside a node are fast.")
    ] = 1,
    ranks_per_worker: Annotated[
        int, typer.Option(help="Devices per worker. They average every gradient.")
    ] = 1,
    node_rate: Annotated[
        str, typer.Option(help="Rate inside a node, or between the ranks of a worker.")
    ] = "1200gbit",
    node_latency: Annotated[str, typer.Option(help="Latency there, e.g. 5us.")] = "5us",
    all_reduce: Annotated[
        str, typer.Option(help="Algorithm: auto, ring, tree, two-level or gloo.")
    ] = "auto",
    overlap: Annotated[
        float, typer.Option(help="Share of a step behind which DDP hides its all-reduces.")
    ] = 2 / 3,
    coding_ns: Annotated[
        float | None,
        typer.Option(help="Nanoseconds to code a number.", show_default="measured, or a core's"),
    ] = None,
    paper_clusters: Annotated[
        bool,
        typer.Option("--paper-clusters", help="Show the paper's clusters and speed-ups instead."),
    ] = False,
    scale_study: Annotated[
        bool, typer.Option("--scale-study", help="Show 8 to 10,000 workers and 8M to 70B instead.")
    ] = False,
    data: Data = None,
    device: Device = "auto",
    out: Out = None,
) -> None:
    """Say what pays on a cluster: method, H, delay, codec.

    That is what reaches DDP's quality soonest.

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
    usual = 4 if settings is None else settings.workers
    number = usual if workers is None else workers
    cluster, task, measured = command.prepare(
        settings, step_ms=step_ms, parameters=parameters, steps=steps, mix_prob=mix_prob,
        extra_steps=extra_steps, data=data, device=device, workers=number, rate=rate,
        latency=units.milliseconds("latency", latency, zero=True) / 1e3, spread=spread, cv=cv,
        slow_rate=slow_link, straggler=straggler, stragglers=stragglers, per_node=per_node,
        ranks_per_worker=ranks_per_worker, node_rate=node_rate, overlap=overlap,
        node_latency=units.milliseconds("node_latency", node_latency, zero=True) / 1e3,
        all_reduce=all_reduce, coding_ns=coding_ns,
    )  # fmt: skip
    print_parts(command.plan(cluster, task, folder, measured))

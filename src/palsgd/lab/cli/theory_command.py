"""`palsgd theory`."""

from typing import Annotated

import typer

from palsgd.lab.cli.common_options import (
    Force,
    Out,
    Quiet,
    new_folder,
)
from palsgd.lab.cli.output import print_parts


def theory(
    problem: Annotated[str, typer.Option(help="quadratic, logistic or bent.")] = "quadratic",
    dim: Annotated[int, typer.Option(help="Dimensions.")] = 4,
    smoothness: Annotated[float, typer.Option("--l", help="L.")] = 1.0,
    mu: Annotated[float, typer.Option(help="Strong convexity.")] = 0.5,
    sigma: Annotated[
        float | None,
        typer.Option(help="Noise of a gradient at x*.", show_default="2; logistic: the data's"),
    ] = None,
    spectrum: Annotated[
        str, typer.Option(help="Of the quadratic: geometric, linear or ends.")
    ] = "geometric",
    distance: Annotated[float, typer.Option(help="From the start to x*.")] = 1.0,
    workers: Annotated[int, typer.Option(help="K.")] = 4,
    steps: Annotated[int, typer.Option(help="T.")] = 6144,
    sync_every: Annotated[int, typer.Option(help="H.")] = 4,
    mix_prob: Annotated[float, typer.Option(help="p.")] = 0.5,
    lr: Annotated[float | None, typer.Option(help="alpha.", show_default="the theorem's")] = None,
    mix_rate: Annotated[
        float | None, typer.Option(help="eta.", show_default="the theorem's")
    ] = None,
    pull: Annotated[
        float | None,
        typer.Option(help="Instead of eta: the share of a round's displacement taken back."),
    ] = None,
    draws: Annotated[str, typer.Option(help="independent, balanced or shared.")] = "independent",
    seeds: Annotated[
        int, typer.Option(help="Runs at once; sweeps take a quarter. 800: a minute.")
    ] = 800,
    seed: Annotated[int, typer.Option(help="Of all of them together.")] = 0,
    device: Annotated[str, typer.Option(help="cpu, cuda, or auto.")] = "cpu",
    out: Out = None,
    force: Force = False,
    quiet: Quiet = False,
) -> None:
    """Measure Theorem 2: error against the bound, exponents, other draws, p and eta, each lemma.

    Ends with a conclusion; all its verdicts together are wrong with a chance of at most 5%.

    Example: palsgd theory --problem logistic --mu 0.25 --workers 8 --out runs/theory
    """
    from palsgd.lab.theory_report.command import run_theory
    from palsgd.lab.theory_report.terminal import parts

    results, page = run_theory(
        problem=problem, dim=dim, mu=mu, smoothness=smoothness, sigma=sigma, curvatures=spectrum,
        distance=distance, workers=workers, steps=steps, sync_every=sync_every,
        mix_prob=mix_prob, lr=lr, mix_rate=mix_rate, pull=pull, draws=draws, seeds=seeds, seed=seed,
        device=device, out=out or new_folder("theory"), force=force, quiet=quiet,
    )  # fmt: skip
    print_parts(parts(results))
    typer.echo(f"page: {page}")

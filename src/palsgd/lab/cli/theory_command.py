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
    problem: Annotated[
        str, typer.Option(help="The problem: quadratic, logistic or bent.")
    ] = "quadratic",
    dim: Annotated[int, typer.Option(help="Number of dimensions.")] = 4,
    smoothness: Annotated[float, typer.Option("--l", help="L, the smoothness.")] = 1.0,
    mu: Annotated[float, typer.Option(help="mu, the strong convexity.")] = 0.5,
    sigma: Annotated[
        float | None,
        typer.Option(
            help="sigma, the noise of a gradient at x*.", show_default="2; logistic: the data's"
        ),
    ] = None,
    spectrum: Annotated[
        str, typer.Option(help="Curvatures of the quadratic: geometric, linear or ends.")
    ] = "geometric",
    distance: Annotated[float, typer.Option(help="Distance from the start to x*.")] = 1.0,
    workers: Annotated[int, typer.Option(help="K, the number of workers.")] = 4,
    steps: Annotated[int, typer.Option(help="T, the number of steps.")] = 6144,
    sync_every: Annotated[int, typer.Option(help="H, the steps between two syncs.")] = 4,
    mix_prob: Annotated[float, typer.Option(help="p, the share of steps that mix.")] = 0.5,
    lr: Annotated[
        float | None, typer.Option(help="alpha, the learning rate.", show_default="the theorem's")
    ] = None,
    mix_rate: Annotated[
        float | None,
        typer.Option(help="eta, the strength of mixing.", show_default="the theorem's"),
    ] = None,
    pull: Annotated[
        float | None,
        typer.Option(help="In place of eta: the share of a round's displacement taken back."),
    ] = None,
    draws: Annotated[
        str, typer.Option(help="The draws: independent, balanced or shared.")
    ] = "independent",
    seeds: Annotated[
        int, typer.Option(help="Number of runs. Sweeps take a quarter. 800 take a minute.")
    ] = 800,
    seed: Annotated[int, typer.Option(help="Seed of all runs together.")] = 0,
    device: Annotated[str, typer.Option(help="cpu, cuda or auto.")] = "cpu",
    out: Out = None,
    force: Force = False,
    quiet: Quiet = False,
) -> None:
    """Measure Theorem 2 and its lemmas.

    That is the error against the bound, exponents, other draws, p and eta, and each lemma.
    The conclusion comes last. The chance that any of its verdicts is wrong is at most 5%.

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

"""`palsgd tune`: settings for each method, chosen on data that are not the test set."""

from pathlib import Path
from typing import Annotated

import typer

from palsgd.interrupts import exit_code
from palsgd.lab.cli.common_options import (
    AtOnce,
    Changes,
    Data,
    Device,
    Download,
    Force,
    Methods,
    Quiet,
    Recipe,
    Resume,
    Seed,
    Workers,
    method_names,
    new_folder,
    settings_from,
)
from palsgd.lab.settings import assignments


def tune(
    recipe: Recipe,
    changes: Changes = None,
    methods: Methods = None,
    trials: Annotated[
        int, typer.Option(help="Points of the search space that each method tries.")
    ] = 16,
    seeds: Annotated[
        int,
        typer.Option(
            help="Seeds for the better half of the points. Fresh seeds confirm the best two."
        ),
    ] = 4,
    simulate: Annotated[
        bool,
        typer.Option(
            "--simulate/--processes", help="All workers in this process, or real processes."
        ),
    ] = True,
    at_once: AtOnce = 1,
    workers: Workers = None,
    steps: Annotated[
        int | None,
        typer.Option(
            help="Gradients that each worker takes in a run.", show_default="the recipe's"
        ),
    ] = None,
    seed: Seed = None,
    out: Annotated[
        Path | None,
        typer.Option(help="File for the results.", show_default="runs/NAME-TIME/tuned.yaml"),
    ] = None,
    data: Data = None,
    download: Download = False,
    device: Device = "auto",
    force: Force = False,
    resume: Resume = False,
    quiet: Quiet = False,
) -> None:
    """Choose settings for each method.

    All methods have equally many trials and gradient examples, and are judged on held out data.
    Settings that are given are not searched. `palsgd compare --tuned FILE` uses the result.

    Example: palsgd tune digits --trials 16 --seeds 4 --out tuned.yaml
    """
    from palsgd.lab.cli.running import stop
    from palsgd.lab.launcher import StoppedError
    from palsgd.lab.run_set import Options
    from palsgd.lab.tuning.api import run_tuning

    out = out or new_folder(recipe, "-tune") / "tuned.yaml"
    names = method_names(methods)
    base = settings_from(recipe, changes, workers=workers, steps=steps, seed=seed)
    options = Options(
        simulate=simulate, data=data, download=download, device=device, force=force,
        resume=resume, quiet=quiet, at_once=at_once,
    )  # fmt: skip
    try:
        found = run_tuning(
            recipe, base, names, out, options, trials=trials, seeds=seeds,
            given=assignments(changes or []),
        )  # fmt: skip
    except StoppedError as stopped:
        stop(out, stopped.code)
    except KeyboardInterrupt as stopped:
        stop(out, exit_code(stopped))
    for sentence in found.verdicts:
        typer.echo(sentence)
    typer.echo(f"tuned: {found.path}")

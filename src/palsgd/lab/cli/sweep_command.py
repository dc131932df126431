"""`palsgd sweep`: a grid over any fields."""

from typing import Annotated, Any

import typer

from palsgd.lab.cli.common_options import (
    AtOnce,
    Data,
    Device,
    Download,
    Force,
    Out,
    Quiet,
    Recipe,
    Report,
    Resume,
    Seeds,
    Simulate,
    import_method,
    new_folder,
    settings_from,
)
from palsgd.lab.cli.running import run_and_show
from palsgd.lab.clock_values import separated
from palsgd.lab.settings import assignments


def sweep(
    recipe: Recipe,
    values: Annotated[
        list[str],
        typer.Argument(
            help="Fields and their values, e.g. sync_every=32,64,128 seed=2022,2023,2024, or the "
            "name of a grid, e.g. cifar10-vgg16/H.",
            show_default=False,
        ),
    ],
    random: Annotated[
        int | None,
        typer.Option(
            help="Number of random points. Values may then be ranges, e.g. lr=1e-4..1e-1."
        ),
    ] = None,
    seeds: Seeds = 1,
    simulate: Simulate = False,
    at_once: AtOnce = 1,
    out: Out = None,
    data: Data = None,
    download: Download = False,
    device: Device = "auto",
    force: Force = False,
    resume: Resume = False,
    quiet: Quiet = False,
    report: Report = True,
) -> None:
    """Run a grid, or random points, over any fields. Finished points are not run again.

    Example: palsgd sweep digits method=ddp,palsgd lr=1e-3,2e-3 --seeds 3 --simulate
    """
    from palsgd.lab.run_list import with_seeds
    from palsgd.lab.run_set import grid_of, random_points

    import_method(None, *values)
    base, fields = settings_from(recipe, None), _swept(values)
    points = (
        grid_of(base, fields)
        if random is None
        else random_points(base, fields, random, seed=base.seed)
    )
    if "seed" in fields and seeds > 1:
        raise ValueError(f"--seeds {seeds} and seed={fields['seed']} both name seeds; give one")
    if not quiet:
        typer.echo(f"{len(points)} points", err=True)
    run_and_show(with_seeds(points, seeds), out or new_folder(recipe, "-sweep"), report,
         swept=tuple(fields), simulate=simulate, at_once=at_once, data=data,
         download=download, device=device, force=force, resume=resume, quiet=quiet)  # fmt: skip


def _swept(values: list[str]) -> dict[str, list[Any]]:
    from palsgd.lab import workloads

    found: dict[str, list[Any]] = {}
    for text in values:
        if "=" not in text:
            found |= workloads.grid(text)
        else:
            found |= {name: separated(value) for name, value in assignments([text]).items()}
    return found

"""`palsgd recipes`: what there is to train."""

from palsgd.lab.settings import Settings, shown


def recipes() -> None:
    """List workloads, recipes and grids.

    Example: palsgd recipes
    """
    from rich.console import Console
    from rich.table import Table

    from palsgd.lab import workloads

    table = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0))  # fits 80 columns
    table.add_column("recipe", no_wrap=True)  # a name that is cut is of no use
    for name in ("K", "H", "p", "eta", "inner", "length", "batch"):
        table.add_column(name, overflow="fold")
    for name, each in workloads.recipes().items():
        length = f"{each.epochs:g} epochs" if each.steps is None else f"{each.steps} steps"
        table.add_row(name, str(each.workers), str(each.sync_every), f"{each.mix_prob:g}",
                      _strength(each), f"{each.inner} {each.lr:g}", length,
                      str(each.batch_size))  # fmt: skip
    console = Console()
    console.print(table)
    console.print("\nGrids, for palsgd sweep RECIPE GRID:")
    for name, fields in workloads.grids().items():
        console.print(
            f"  {name}: " + "; ".join(f"{k} = {', '.join(map(str, v))}" for k, v in fields.items())
        )


def _strength(settings: Settings) -> str:
    """What sets the weight of a mixing step."""
    if settings.mix_rate is not None:
        return shown(settings.mix_rate)
    return "the default" if settings.pull is None else f"pull {shown(settings.pull)}"

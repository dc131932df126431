"""`palsgd report`: the page of runs that are done."""

from pathlib import Path
from typing import Annotated

import typer

from palsgd.lab.cli.common_options import OnLink
from palsgd.lab.cli.output import print_table


def report(
    runs: Annotated[list[Path], typer.Argument(help="Folders that train, compare or sweep wrote.")],
    out: Annotated[Path | None, typer.Option(help="The page.")] = None,
    link: OnLink = None,
    tensorboard: Annotated[
        Path | None, typer.Option(help="Also write TensorBoard event files into this folder.")
    ] = None,
) -> None:
    """Make one self-contained HTML page of any runs, with its figures as SVG and PNG beside it.

    One set of runs gives the time over any link: --link 100mbit,20ms takes a gradient step from
    what the runs measured, --link 100mbit,20ms,step=50ms from you.

    Example: palsgd report runs/digits-20260101-120000 --link 100mbit,20ms
    """
    from palsgd.lab.report import write_report, write_tensorboard

    for folder in runs:
        if not folder.is_dir():
            raise ValueError(f"there is no folder {folder}; give one that palsgd compare wrote")
    page = write_report(runs, out or runs[0] / "report.html", link=link)
    print_table(runs, link)
    typer.echo(f"report: {page}")
    if tensorboard is not None:
        typer.echo(f"TensorBoard files: {write_tensorboard(runs, tensorboard)}")

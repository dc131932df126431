"""`palsgd report`: the page of runs that are done."""

from pathlib import Path
from typing import Annotated

import typer

from palsgd.lab.cli.common_options import OnLink
from palsgd.lab.cli.output import print_table


def report(
    runs: Annotated[list[Path], typer.Argument(help="Folders that train, compare or sweep wrote.")],
    out: Annotated[
        Path | None,
        typer.Option(help="File of the page.", show_default="report.html in the first folder"),
    ] = None,
    link: OnLink = None,
    tensorboard: Annotated[
        Path | None, typer.Option(help="Also write TensorBoard event files into this folder.")
    ] = None,
) -> None:
    """Make one HTML page of any runs. Its figures lie beside it as SVG and PNG too.

    The same runs give the time over any link. --link 100mbit,20ms takes the time of a gradient
    step from the runs, --link 100mbit,20ms,step=50ms takes yours.

    Example: palsgd report runs/digits-20260101-120000 --link 100mbit,20ms
    """
    from palsgd.lab.report import write_report, write_tensorboard

    for folder in runs:
        if not folder.is_dir():
            raise ValueError(f"there is no folder {folder}; give one that palsgd compare wrote")
    if tensorboard is not None:  # first, as its library may be missing
        typer.echo(f"TensorBoard files: {write_tensorboard(runs, tensorboard)}")
    page = write_report(runs, out or runs[0] / "report.html", link=link)
    print_table(runs, link)
    typer.echo(f"report: {page}")

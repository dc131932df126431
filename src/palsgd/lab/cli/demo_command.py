"""`palsgd demo`."""

from pathlib import Path
from typing import Annotated

import typer

from palsgd.interrupts import exit_code
from palsgd.lab.cli.common_options import Force, Out, Quiet, Resume, new_folder
from palsgd.lab.cli.output import print_table
from palsgd.lab.cli.running import stop


def demo(
    link: Annotated[
        str, typer.Option(help="Rate and latency of every worker's link, e.g. 10mbit,50ms.")
    ] = "100mbit,2ms",
    picture: Annotated[
        Path | None, typer.Option(help="Also write the top of the report as a PNG file.")
    ] = None,
    out: Out = None,
    quiet: Quiet = False,
    force: Force = False,
    resume: Resume = False,
) -> None:
    """Say what you gain and lose over your link. It takes about two minutes.

    Real processes time the steps of each method and train one seed of it to the end. They do so
    over an emulated link on Linux as root. Elsewhere there is no emulated link, and seconds are
    projected. Simulated workers train many seeds, that one too, and the two are compared. More
    latency makes the demo longer, as DDP exchanges gradients 600 times.

    Example: palsgd demo --link 100mbit,20ms
    """
    from palsgd.lab.demo import run_demo
    from palsgd.lab.launcher import StoppedError
    from palsgd.lab.report import write_report
    from palsgd.lab.run_set import Options

    out = out or new_folder("demo")
    try:
        reason = run_demo(out, link, Options(quiet=quiet, force=force, resume=resume))
    except StoppedError as stopped:
        stop(out, stopped.code)
    except KeyboardInterrupt as stopped:
        stop(out, exit_code(stopped))
    shown = None if reason is None else link  # what was emulated is measured
    print_table([out], shown)
    if reason is not None:
        typer.echo(f"Times are projected on that link, not measured: {reason}.")
    # `palsgd report` writes the figures as files too, which takes several times as long
    page = write_report([out], out / "report.html", figures=False, link=shown)
    typer.echo(f"results: {out}\nreport: {page}")
    if picture is not None:
        from palsgd.lab.report.screenshot import take_screenshot

        typer.echo(f"picture: {take_screenshot(page, picture)}")

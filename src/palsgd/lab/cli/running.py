"""What commands that train share: run, show, and stop."""

import shlex
import sys
from pathlib import Path
from typing import Any, NoReturn

import typer

from palsgd.interrupts import exit_code
from palsgd.lab.cli.output import fail, print_table
from palsgd.lab.settings import Settings
from palsgd.lab.torchrun import first_rank


def run_and_show(
    runs: dict[str, Settings], out: Path, report: bool, *, swept: tuple[str, ...] = (),
    link: str | None = None, **options: Any,
) -> None:  # fmt: skip
    """`link`: what the report and the table project seconds on."""
    from palsgd.lab.launcher import StoppedError
    from palsgd.lab.run_set import FailedRunsError, Options, run_all

    failure = None
    try:
        run_all(runs, out, Options(**options), swept)
    except StoppedError as stopped:
        stop(out, stopped.code)
    except KeyboardInterrupt as stopped:
        stop(out, exit_code(stopped))
    except FailedRunsError as error:
        failure = error
    if first_rank():
        show(out, report, link)
    if failure is not None:
        raise failure


def show(out: Path, report: bool, link: str | None = None) -> None:
    """What the runs in a folder say, as far as they went."""
    from palsgd.lab.report import write_report

    print_table([out], link)
    typer.echo(f"results: {out}")
    if report:
        typer.echo(f"report: {write_report([out], out / 'report.html', link=link)}")


def stop(out: Path, code: int) -> NoReturn:
    """After Ctrl-C, or a signal that means the same: say what is in the folder, and how to go
    on."""
    from palsgd.lab.kept import kept

    if not first_rank():
        sys.exit(code)
    words = [word for word in sys.argv[1:] if word not in ("--force", "--resume")]
    named = any(word == "--out" or word.startswith("--out=") for word in words)
    flags = ["--resume"] if named else ["--out", str(out), "--resume"]
    again = shlex.join(["palsgd", *words, *flags])
    fail(f"stopped; {kept(out)}. Go on with: {again}", code)

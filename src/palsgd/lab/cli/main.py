"""The command line: its commands, and what becomes of their errors.

No module of this package imports torch before a command runs, so that help comes at once.
"""

import sys
from typing import Any

import typer

from palsgd.lab.cli import run_commands
from palsgd.lab.cli.bench_command import link
from palsgd.lab.cli.output import fail
from palsgd.lab.cli.plan_command import plan
from palsgd.lab.cli.theory_command import theory

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    help="Train data-parallel over links too slow for an all-reduce at every step: compare "
    "methods, see what they gain.",
)
for command in (
    run_commands.demo,
    run_commands.train,
    run_commands.compare,
    run_commands.sweep,
    run_commands.report,
    run_commands.explain,
    theory,
    plan,
    run_commands.recipes,
):
    app.command()(command)
data_app = typer.Typer(no_args_is_help=True, rich_markup_mode=None, help="Prepare data.")
data_app.command()(run_commands.prepare)
app.add_typer(data_app, name="data")
bench_app = typer.Typer(no_args_is_help=True, rich_markup_mode=None, help="Measure.")
bench_app.command()(link)
app.add_typer(bench_app, name="bench")

# click's, or that of the click which newer versions of typer bring along
_UsageError: Any = typer.BadParameter.__base__


def main() -> None:
    """Exit code 2 and one line for what the user can mend."""
    try:
        sys.exit(app(standalone_mode=False))
    except _UsageError as error:
        if type(error).__name__ == "NoArgsIsHelpError":  # `palsgd` alone
            error.show()
            sys.exit(2)
        fail(error.format_message(), 2)
    except (typer.Abort, KeyboardInterrupt):
        fail("stopped", 130)
    except ValueError as error:
        fail(str(error), 2)
    except (RuntimeError, OSError) as error:
        fail(f"{error}", 1)

"""The command line: its commands, and what becomes of their errors.

No module of this package imports torch before a command runs, so that help comes at once.
"""

import sys
from typing import Any

import typer

from palsgd.lab.cli.bench_command import link
from palsgd.lab.cli.compare_command import compare
from palsgd.lab.cli.data_commands import prepare
from palsgd.lab.cli.demo_command import demo
from palsgd.lab.cli.explain_command import explain
from palsgd.lab.cli.output import fail
from palsgd.lab.cli.plan_command import plan
from palsgd.lab.cli.recipes_command import recipes
from palsgd.lab.cli.report_command import report
from palsgd.lab.cli.sweep_command import sweep
from palsgd.lab.cli.theory_command import theory
from palsgd.lab.cli.train_command import train
from palsgd.lab.cli.tune_command import tune

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    help="Train data-parallel over links too slow for an all-reduce at every step: compare "
    "methods, see what they gain.",
)
for command in (
    demo,
    train,
    compare,
    tune,
    sweep,
    report,
    explain,
    theory,
    plan,
    recipes,
):
    app.command()(command)
data_app = typer.Typer(no_args_is_help=True, rich_markup_mode=None, help="Prepare data.")
data_app.command()(prepare)
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

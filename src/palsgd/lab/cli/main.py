"""The command line: its commands, and what becomes of their errors.

No module of this package imports torch or numpy before a command runs, so that help comes at once.
"""

import functools
import sys
from collections.abc import Callable
from typing import Annotated, Any

import typer

from palsgd import interrupts
from palsgd.checks import nearest
from palsgd.lab.cli.bench_command import link
from palsgd.lab.cli.compare_command import compare
from palsgd.lab.cli.data_commands import check, data_list, fetch, prepare
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
from palsgd.lab.extras import missing
from palsgd.lab.torchrun import under_torchrun
from palsgd.lab.user_errors import in_users_file

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    help="Train data-parallel over links that are too slow for an all-reduce at every step. "
    "Compare methods, and see what they gain and lose.",
)
data_app = typer.Typer(
    no_args_is_help=True, rich_markup_mode=None, help="The files that workloads read."
)
bench_app = typer.Typer(
    no_args_is_help=True, rich_markup_mode=None, help="Measure methods on this machine."
)


def _stoppable(command: Callable[..., None]) -> Callable[..., None]:
    """The command, whose Ctrl-C is caught here: click would print an empty line before ours. So is
    SIGTERM, except in a worker of torchrun, whose exchanges wait for others while no handler of
    Python runs."""

    @functools.wraps(command)
    def run(*args: Any, **options: Any) -> None:
        with interrupts.awaited(ending=not under_torchrun()):
            try:
                command(*args, **options)
            except KeyboardInterrupt as stopped:
                fail("stopped", interrupts.exit_code(stopped))

    return run


_COMMANDS: dict[typer.Typer, tuple[Callable[..., None], ...]] = {
    app: (demo, train, compare, tune, sweep, report, explain, theory, plan, recipes),
    data_app: (data_list, fetch, check, prepare),
    bench_app: (link,),
}
for group, commands in _COMMANDS.items():
    for command in commands:
        name = command.__name__.removeprefix("data_")
        group.command(name)(_stoppable(command))
app.add_typer(data_app, name="data")
app.add_typer(bench_app, name="bench")

# click's, or that of the click which newer versions of typer bring along
_UsageError: Any = typer.BadParameter.__base__


def _say_version(wanted: bool) -> None:
    if wanted:
        from palsgd.lab.provenance import version_line

        typer.echo(version_line())
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool,
        typer.Option(
            "--version",
            callback=_say_version,
            is_eager=True,
            help="Show versions and commit, and exit.",
        ),
    ] = False,
) -> None:
    pass


def _usage_line(error: Any) -> str:
    """What click says of the words, with the nearest name for one that is unknown."""
    said, context = error.format_message(), error.ctx
    if said.startswith("No such option"):
        params = context.command.get_params(context)
        known = [name for param in params for name in (*param.opts, *param.secondary_opts)]
        word = error.option_name
        return f"there is no option {word}; did you mean {nearest(word, known)}?"
    if said.startswith("No such command"):
        word, known = said.split("'")[1], context.command.list_commands(context)
        return (
            f"there is no command {word!r}; did you mean {nearest(word, known)!r}? There are "
            f"{', '.join(known)}"
        )
    return said


def main() -> None:
    """Exit code 2 and one line for what the user can mend."""
    try:
        sys.exit(app(standalone_mode=False))
    except _UsageError as error:
        if type(error).__name__ == "NoArgsIsHelpError":  # `palsgd` alone
            error.show()
            sys.exit(2)
        fail(_usage_line(error), 2)
    except (typer.Abort, KeyboardInterrupt):
        fail("stopped", 130)
    except ValueError as error:
        fail(in_users_file(error) or str(error), 2)
    except ModuleNotFoundError as error:
        fail(missing(error), 1)
    except (RuntimeError, OSError) as error:
        fail(in_users_file(error) or f"{error}", 1)
    except Exception as error:
        said = in_users_file(error)
        if said is None:  # of this program, whose traceback is needed
            raise
        fail(said, 1)

"""What commands say: tables, progress, and the one line that bad input gets."""

import sys
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NoReturn

from palsgd.lab.torchrun import first_of_machine

# Seconds in which the first process of a machine, however busy that is, finds what another found.
HEAD_START = 60.0


def print_table(folders: list[Path], link: str | None = None) -> None:
    from palsgd.lab.report import terminal_table

    print_parts([terminal_table(folders, link)])


def print_parts(parts: Iterable[Any]) -> None:
    """In a file or pipe nothing forces tables to be folded, so there they may be wide."""
    from rich.console import Console

    console = Console()
    wide = console if console.is_terminal else Console(width=400)
    for part in parts:
        wide.print(part, highlight=False)


def fail(message: str, code: int) -> NoReturn:
    """Say it in one line, and exit. torchrun's processes all find the same fault in the input; the
    first of each machine says so. torchrun ends all when one has ended: a second process that
    ended before the first had spoken would end it in silence. So it waits, and if nobody ends it,
    the first has found no fault, and it speaks itself."""
    if code == 2 and not first_of_machine():
        time.sleep(HEAD_START)
    print(f"palsgd: {' '.join(message.split())}", file=sys.stderr)
    sys.exit(code)

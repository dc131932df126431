"""What commands say: tables, progress, and the one line that bad input gets."""

import os
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NoReturn


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
    """torchrun's processes all find the same fault in the input; one of each machine says so."""
    if code != 2 or os.environ.get("LOCAL_RANK", "0") == "0":
        print(f"palsgd: {' '.join(message.split())}", file=sys.stderr)
    sys.exit(code)

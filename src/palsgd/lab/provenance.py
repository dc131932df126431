"""Where a run comes from: the commit of this program, and the command that started it."""

import os
import shlex
import subprocess
import sys
from collections.abc import Sequence
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any

import palsgd

_HERE = Path(__file__).parent


def provenance(command: Sequence[str] | None = None) -> dict[str, Any]:
    """`commit`, `dirty` and `command`. The first two are None where this program is not a checkout
    or there is no git. `command` is by default that of this process."""
    commit, dirty = checkout()
    words = list(sys.argv if command is None else command)
    shown = shlex.join([_name(words[0]), *words[1:]]) if words else None
    return {"commit": commit, "dirty": dirty, "command": shown}


@cache
def checkout(folder: Path = _HERE) -> tuple[str | None, bool | None]:
    """The commit that `folder` is checked out at, and whether a tracked file differs from it. On a
    machine that has the files without their history, or with an older one, PALSGD_COMMIT says which
    commit they are of."""
    if told := os.environ.get("PALSGD_COMMIT"):
        return told, None
    if not _git(folder, "ls-files", "."):  # a package that is installed into another's checkout
        return None, None
    commit = _git(folder, "rev-parse", "HEAD")
    changes = _git(folder, "status", "--porcelain", "--untracked-files=no")
    if commit is None or changes is None:
        return None, None
    return commit, bool(changes)


def _git(folder: Path, *words: str) -> str | None:
    """What git says; None where it fails, is missing, or takes too long."""
    try:
        done = subprocess.run(
            ["git", "-C", str(folder), *words], capture_output=True, text=True, timeout=30
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def without_folders(word: str, home: Path) -> str:
    """A word of a command for readers on other machines: paths are those inside `home`, or names
    alone."""
    path = Path(word)
    if not path.is_absolute():
        return word
    path = path.resolve()
    return str(path.relative_to(home)) if path.is_relative_to(home) else f".../{path.name}"


def _name(program: str) -> str:
    """`palsgd` however it was started: as a script, or as `python -m palsgd`."""
    path = Path(program)
    return path.parent.name if path.name == "__main__.py" else path.name


def version_line() -> str:
    """Versions of palsgd and torch, and the commit where it is known. torch's is that of the
    installed package, as importing torch takes a second."""
    commit, dirty = checkout()
    of = "" if commit is None else f" (commit {commit[:12]}{', changed' if dirty else ''})"
    try:
        torch = metadata.version("torch")
    except metadata.PackageNotFoundError:
        torch = "not installed"
    return f"palsgd {palsgd.__version__}{of}, torch {torch}"

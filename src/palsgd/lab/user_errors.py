"""Errors that a file of the user's own raised: one line with the place in that file."""

import sys
import traceback
from pathlib import Path

import palsgd

_OURS = str(Path(palsgd.__file__).parent)


def in_users_file(error: BaseException) -> str | None:
    """The error with the line of the user's file that raised it, or that called what did; None for
    an error of palsgd's own, also where the user's code led to it."""
    if isinstance(error, ModuleNotFoundError) or type(error).__module__.startswith("palsgd."):
        return None
    files = _users_files()
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        if frame.filename in files:
            place = f"{Path(frame.filename).name}, line {frame.lineno}"
            return f"{place}: {type(error).__name__}: {error}"
        if frame.filename.startswith(_OURS):
            return None
    return None


def _users_files() -> set[str]:
    """Those of the workloads and methods that were imported by a reference."""
    from palsgd import references

    places = {text.rpartition(":")[0] or text for text in references._KNOWN}
    modules = (getattr(sys.modules.get(place), "__file__", None) for place in places)
    return {place for place in places if place.endswith(".py")} | {f for f in modules if f}

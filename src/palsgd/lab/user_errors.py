"""Errors that a file of the user's own raised: one line with the place in that file."""

import traceback
from pathlib import Path

import palsgd
from palsgd import references

_OURS = str(Path(palsgd.__file__).parent)


def in_users_file(error: BaseException) -> str | None:
    """The error with the line of the user's file that raised it, or that called what did; None for
    an error of palsgd's own, also where the user's code led to it, and for a refusal."""
    if isinstance(error, ModuleNotFoundError) or type(error).__module__.startswith("palsgd."):
        return None
    files, frames = references.files(), traceback.extract_tb(error.__traceback__)
    if isinstance(error, ValueError) and frames and frames[-1].filename in files:
        return None  # it refuses something in words of its own
    for frame in reversed(frames):
        if frame.filename in files:
            place = f"{Path(frame.filename).name}, line {frame.lineno}"
            return f"{place}: {type(error).__name__}: {error}"
        if frame.filename.startswith(_OURS):
            return None
    return None

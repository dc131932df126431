"""What every file that must survive needs: to be forced onto the disk, and errors with its name."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


def force(path: Path) -> None:
    """Force a file, or the names in a folder, onto the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


@contextmanager
def naming(path: Path) -> Iterator[None]:
    """Inside, an error of the disk has the name of the file. By itself one that happens while
    writing, such as that of a full disk, has none."""
    try:
        yield
    except OSError as error:
        if error.filename is not None or error.errno is None:
            raise
        raise OSError(error.errno, error.strerror, str(path)) from error

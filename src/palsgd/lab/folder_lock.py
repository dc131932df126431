"""One command at a time writes into a folder.

The lock is the kernel's, on an open file: it ends with the process that has it, however that ends.
The file says who that is.
"""

import os
import socket
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

NAME = "running.lock"
_MOST_READ = 200  # characters of a lock file that an error repeats
_held: set[Path] = set()  # folders that this process has locked


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Inside, no other process may lock the folder. It is made if it is missing, and is gone again
    if nothing was put into it. The process that has it may lock it again.

    Raises:
        ValueError: another process has it.

    Example:
        >>> import tempfile
        >>> folder = Path(tempfile.mkdtemp())
        >>> with locked(folder), locked(folder):
        ...     (folder / NAME).exists()
        True
        >>> (folder / NAME).exists()
        False
    """
    place = folder.resolve()
    if place in _held:
        yield
        return
    made = [each for each in (place, *place.parents) if not each.exists()]
    handle = _taken(place)
    _held.add(place)
    try:
        yield
    finally:
        _held.remove(place)
        _give_back(place / NAME, handle)
        with suppress(OSError):  # it is not empty, as it should be
            for each in made:
                each.rmdir()


def _taken(folder: Path) -> int | None:
    """The open lock file; None on a disk that has no locks."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / NAME
    while True:
        handle = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
        if not _lock(handle, path):
            return None
        if _is_still_there(handle, path):
            break
        os.close(handle)  # the process that had it removed the file after we opened it
    os.truncate(handle, 0)
    os.write(handle, _owner().encode())
    return handle


def _lock(handle: int, path: Path) -> bool:
    """Lock the file; False on a disk that has no locks."""
    try:
        import fcntl

        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return True
    except BlockingIOError:
        owner = os.read(handle, _MOST_READ).decode(errors="replace").strip()
        os.close(handle)
        raise ValueError(
            f"{path.parent} is in use by {owner or 'another process'}; wait until it has ended, "
            "stop it, or use another --out"
        ) from None
    except (ImportError, OSError) as error:
        os.close(handle)
        path.unlink(missing_ok=True)
        warnings.warn(
            f"{path.parent} is on a disk that has no locks ({error}): nothing notices a second run "
            "that writes there; start only one",
            stacklevel=5,
        )
        return False


def _is_still_there(handle: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(handle), os.stat(path))
    except FileNotFoundError:
        return False


def _give_back(path: Path, handle: int | None) -> None:
    """Removed before it is unlocked, so that nobody locks a file that is about to go."""
    if handle is not None:
        path.unlink(missing_ok=True)
        os.close(handle)


def _owner() -> str:
    since = time.strftime("%Y-%m-%d %H:%M:%S")
    return f"process {os.getpid()} on {socket.gethostname()} since {since}\n"

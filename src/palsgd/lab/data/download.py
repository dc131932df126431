"""Finding, fetching and writing files."""

import os
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.client import HTTPException
from pathlib import Path
from typing import BinaryIO

Progress = Callable[[str, int, int], None]  # what is being read, bytes so far, bytes in all


def place_of(data: Path | str | None, name: str) -> Path:
    """The folder `name` in `data` (by default ./data), or `data` itself where it has none."""
    if data is None:
        return Path("data") / name
    inside = Path(data) / name
    return inside if inside.is_dir() else Path(data)


@contextmanager
def written_whole(path: Path) -> Iterator[BinaryIO]:
    """A file that takes its name only when it is complete."""
    part = path.with_name(f"{path.name}.{os.getpid()}.part")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with open(part, "wb") as file:
            yield file
        os.replace(part, path)
    finally:
        part.unlink(missing_ok=True)


def fetch(url: str, path: Path, progress: Progress | None = None) -> None:
    """Download `url` to `path`, unless it is there already."""
    if path.exists():
        return
    try:
        with urllib.request.urlopen(url, timeout=60) as answer, written_whole(path) as file:
            total, done = int(answer.headers.get("Content-Length") or 0), 0
            while block := answer.read(2**20):
                file.write(block)
                done += len(block)
                if progress:
                    progress(path.name, done, total)
            if done < total:
                raise OSError(f"the connection broke off after {done} of {total} bytes")
    except (OSError, HTTPException) as error:
        raise ValueError(
            f"could not download {url} ({error}); fetch it by hand into {path.parent}"
        ) from error

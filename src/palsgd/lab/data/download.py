"""Finding and fetching files."""

import urllib.request
from collections.abc import Callable
from http.client import HTTPException
from pathlib import Path
from typing import Any

from palsgd.lab.atomic import atomic_path

Data = Path | str | None  # the folder of --data; None: ./data
Progress = Callable[[str, int, int], None]  # what is being read, bytes so far, bytes in all


def place_of(data: Data, name: str) -> Path:
    """The folder `name` in `data` (by default ./data), or `data` itself where it has none."""
    if data is None:
        return Path("data") / name
    inside = Path(data) / name
    return inside if inside.is_dir() else Path(data)


def fetch(url: str, path: Path, progress: Progress | None = None) -> None:
    """Download `url` to `path`, unless it is there already."""
    if path.exists():
        return
    try:
        with urllib.request.urlopen(url, timeout=60) as answer, atomic_path(path) as part:
            _copy(answer, part, path.name, progress)
    except (OSError, HTTPException) as error:
        raise ValueError(
            f"could not download {url} ({error}); fetch it by hand into {path.parent}"
        ) from error


def _copy(answer: Any, part: Path, name: str, progress: Progress | None) -> None:
    total, done = int(answer.headers.get("Content-Length") or 0), 0
    with open(part, "wb") as file:
        while block := answer.read(2**20):
            file.write(block)
            done += len(block)
            if progress:
                progress(name, done, total)
    if done < total:
        raise OSError(f"the connection broke off after {done} of {total} bytes")

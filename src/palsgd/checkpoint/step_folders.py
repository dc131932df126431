"""The saves in a folder: how one appears whole or not at all, and which of them are whole.

A save is a folder `step-N` with a file for every rank and `manifest.json`, which has the size and
the checksum of each. It is written under a name that ends in `.part`, forced onto the disk, and
then renamed. An old one is renamed to such a name before it is deleted. So whatever ends in `.part`
is not whole, and the next save removes it.
"""

import hashlib
import json
import math
import os
import re
import shutil
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from palsgd.disk import force

SCHEMA = 1
MANIFEST = "manifest.json"
_KEYS = {"id", "order", "step", "workers", "ranks", "at_stop", "files", "here"}
_PART = ".part"
_NAME = re.compile(r"step-(\d{1,18})(?:-(\d{1,9}))?")


@dataclass(frozen=True)
class Saved:
    """One save on this disk, as its names and its manifest have it. Tensors are not read.

    Attributes:
        path: its folder.
        step: the clock of the worker that was ahead when it was saved.
        whole: are the manifest, and the sizes of the files that belong on this disk, as written?
        why: what is wrong, if it is not whole.
        workers: how many workers saved it; 0 if the manifest cannot be read.
        manifest: what the manifest says.
    """

    path: Path
    step: int
    whole: bool = True
    why: str = ""
    workers: int = 0
    manifest: dict[str, Any] = field(default_factory=dict, repr=False)

    @property
    def order(self) -> float:
        """Later saves have a higher one, whatever their clocks. One whose manifest cannot be read
        might be the last."""
        return self.manifest.get("order", math.inf)


def find(folder: str | Path) -> list[Saved]:
    """The saves in `folder`, or the one that `folder` itself is, newest first.

    Only names, sizes and manifests are read, so damage inside a file is not seen here;
    `palsgd.checkpoint.load` sees it.

    Args:
        folder: what `palsgd.checkpoint.save` was given, or what it returned.

    Example:
        >>> import tempfile, palsgd
        >>> palsgd.checkpoint.find(tempfile.mkdtemp())
        []
    """
    folder = Path(folder)
    if _NAME.fullmatch(folder.name) and (folder / MANIFEST).exists():
        return [_read(folder)]
    if not folder.is_dir():
        return []
    found = [_read(path) for path in folder.iterdir() if _NAME.fullmatch(path.name)]
    return sorted(found, key=lambda saved: (saved.order, saved.step, saved.path.name), reverse=True)


def _read(path: Path) -> Saved:
    match = _NAME.fullmatch(path.name)
    assert match is not None
    step = int(match[1])
    try:
        manifest = _manifest(path / MANIFEST)
    except (ValueError, OSError) as error:
        return Saved(path, step, whole=False, why=str(error))
    problem = _missing(path, manifest)
    return Saved(path, step, problem is None, problem or "", manifest["workers"], manifest)


def _manifest(path: Path) -> dict[str, Any]:
    if not path.exists():
        raise ValueError(f"{path} is missing")
    try:
        found = json.loads(path.read_bytes())
        checksum = found.pop("sha256")
        if checksum != _checksum(found):
            raise ValueError("its checksum differs")
        if found["schema"] != SCHEMA:
            raise ValueError(f"it has schema {found['schema']}, and this release reads {SCHEMA}")
        if lacking := _KEYS - found.keys():
            raise ValueError(f"it lacks {min(lacking)}")
    except (ValueError, KeyError, AttributeError, TypeError, RecursionError) as error:
        raise ValueError(f"{path} is not what was written ({error})") from None
    return found


def _missing(path: Path, manifest: dict[str, Any]) -> str | None:
    """What is wrong with the files that belong on this disk, by their sizes."""
    sizes = {entry["file"]: entry["size"] for entry in manifest["files"]}
    for name in manifest["here"]:
        try:
            size = (path / name).stat().st_size
        except OSError as error:
            return f"{path / name}: {error.strerror}"
        if size != sizes[name]:
            return f"{path / name} has {size} bytes instead of {sizes[name]}"
    return None


# -- how a save appears ------------------------------------------------------------------------


def make(folder: Path) -> None:
    """Make a folder, and force its name onto the disk."""
    new = [path for path in (folder, *folder.parents) if not path.exists()]
    folder.mkdir(parents=True, exist_ok=True)
    for path in new:
        force(path.parent)


def free_name(step: int, taken: set[str]) -> str:
    """A name that is on none of the disks. A run may save at the same clock again, if it went on
    from an older save or began anew."""
    name, again = f"step-{step}", 1
    while name in taken:
        again += 1
        name = f"step-{step}-{again}"
    return name


def part_of(folder: Path, name: str, identity: str) -> Path:
    """Where the save `name` lies as long as it is not whole."""
    return folder / f"{name}.{identity}{_PART}"


def commit(part: Path, whole: Path, manifest: dict[str, Any]) -> None:
    """Make `part` the save `whole`."""
    path = part / MANIFEST
    text = json.dumps(manifest | {"sha256": _checksum(manifest)}, indent=1)
    with open(path, "wb") as file:
        file.write(text.encode())
        file.flush()
        os.fsync(file.fileno())
    force(part)
    os.rename(part, whole)
    force(whole.parent)


def _checksum(manifest: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(manifest, sort_keys=True).encode()).hexdigest()


# -- how a save disappears ---------------------------------------------------------------------


def keep_newest(folder: Path, count: int, identity: str) -> None:
    """Remove all saves but the newest whole ones, the oldest first."""
    found = find(folder)
    kept = [saved for saved in found if saved.whole][:count]
    for saved in reversed([each for each in found if each not in kept]):
        remove(saved.path, identity)


def remove(path: Path, identity: str) -> None:
    """A failure leaves files for which the next save tries again."""
    away = path if path.name.endswith(_PART) else part_of(path.parent, path.name, f"old-{identity}")
    try:
        if path.exists():
            os.rename(path, away)
    except OSError:
        return
    shutil.rmtree(away, ignore_errors=True)


def remove_parts(folder: Path) -> None:
    """Remove what saves and removals that did not end have left."""
    for left in folder.glob(f"step-*{_PART}"):
        shutil.rmtree(left, ignore_errors=True)

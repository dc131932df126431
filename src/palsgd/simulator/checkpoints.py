"""States of simulations as files.

A checkpoint is a folder `step-CLOCK` with a file for each piece of a state. It is written under
another name, forced onto the disk, and then renamed: it is there whole or not at all, whenever the
process or the machine ends. Nothing in it is unpickled but tensors and plain values.
"""

import json
import os
import pickle
import re
import shutil
import warnings
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch

from palsgd.checks import check_int, check_text
from palsgd.json_files import read_json

KEEP = 2  # so many are kept, in case that the newest one is damaged later
_NAME = re.compile(r"step-(\d+)")
_CONTENTS = "contents"  # the file with the sizes of the others
_PART = "part"  # how the name of a folder ends that is not yet whole


class Pieces(Mapping[str, Any]):
    """The pieces of a checkpoint, each of which is read when it is asked for. Its tensors lie in
    the memory of the file, so that a state need not fit into memory twice."""

    def __init__(self, folder: Path):
        self.folder = folder

    def __getitem__(self, name: str) -> Any:
        path = self.folder / f"{name}.pt"
        if not path.exists():
            raise KeyError(name)
        return torch.load(path, weights_only=True, map_location="cpu", mmap=True)

    def __iter__(self) -> Iterator[str]:
        return (path.stem for path in sorted(self.folder.glob("*.pt")))

    def __len__(self) -> int:
        return len(list(self.folder.glob("*.pt")))


class Checkpoints:
    """The checkpoints of one simulation, in one folder.

    Example:
        >>> import tempfile
        >>> from palsgd.simulator import Checkpoints
        >>> checkpoints = Checkpoints(tempfile.mkdtemp())
        >>> checkpoints.save(40, [("run-0", {"clock": 40})])
        >>> checkpoints.newest()["run-0"]
        {'clock': 40}
    """

    def __init__(self, folder: str | Path):
        self.folder = Path(folder)

    def save(self, clock: int, state: Iterable[tuple[str, Any]]) -> None:
        """Write a state piece by piece, and drop all older checkpoints but the last."""
        whole = self.folder / f"step-{clock}"
        part = whole.with_name(f"{whole.name}.{os.getpid()}.{_PART}")
        part.mkdir(parents=True)
        try:
            sizes = {name: _write(part / f"{name}.pt", piece) for name, piece in state}
            _write(part / _CONTENTS, sizes)
            # together, as the disk then writes them in one go
            with ThreadPoolExecutor(max_workers=8) as threads:
                list(threads.map(_force, part.iterdir()))
            _force(part)
            if whole.exists():
                shutil.rmtree(whole)
            os.replace(part, whole)
            _force(self.folder)
        finally:
            shutil.rmtree(part, ignore_errors=True)
        self._drop_old(clock)

    def newest(self) -> Pieces | None:
        """The newest whole checkpoint; None: there is none. A damaged one is left out with a
        warning."""
        for clock in reversed(self._clocks()):
            found = self.folder / f"step-{clock}"
            if _is_whole(found):
                return Pieces(found)
            warnings.warn(f"{found} is damaged and left out", stacklevel=2)
        return None

    def remove(self) -> None:
        shutil.rmtree(self.folder, ignore_errors=True)

    def _clocks(self) -> list[int]:
        if not self.folder.is_dir():
            return []
        found = (_NAME.fullmatch(path.name) for path in self.folder.iterdir())
        return sorted(int(match[1]) for match in found if match)

    def _drop_old(self, clock: int) -> None:
        """Keep the newest ones. What a process that was killed left unfinished goes too, and so
        does what lies beyond this clock: it is of a run that was started over."""
        clocks = self._clocks()
        kept = [each for each in clocks if each <= clock][-KEEP:]
        for each in set(clocks) - set(kept):
            shutil.rmtree(self.folder / f"step-{each}", ignore_errors=True)
        for left in self.folder.glob(f"step-*.{_PART}"):
            shutil.rmtree(left, ignore_errors=True)


class ProgramList:
    """The programs of a simulation of many runs, each with a folder for its checkpoints.

    The list is written before the first of them trains. Another process then makes the same
    programs, whatever memory it finds.
    """

    def __init__(self, folder: str | Path):
        self.folder = Path(folder)
        self._path = self.folder / "programs.json"

    def read(self) -> list[tuple[list[int], str]]:
        """The runs and the engine of each."""
        if not self._path.exists():
            return []
        fix = f"delete {self.folder} to start over"
        try:
            return [_program(each) for each in read_json(self._path, fix=fix)]
        except (KeyError, TypeError):
            raise ValueError(f"{self._path} is no list of programs; {fix}") from None

    def add(self, programs: Iterable[tuple[list[int], str]]) -> None:
        known = self.read()
        known += [each for each in programs if each not in known]
        self.folder.mkdir(parents=True, exist_ok=True)
        part = self._path.with_name(f"{self._path.name}.{os.getpid()}.{_PART}")
        part.write_text(json.dumps([{"runs": runs, "engine": engine} for runs, engine in known]))
        _force(part)
        os.replace(part, self._path)

    def checkpoints(self, first: int) -> Checkpoints:
        """Those of the program whose first run has this number."""
        return Checkpoints(self.folder / f"program-{first}")


def _program(values: Any) -> tuple[list[int], str]:
    runs = [check_int("run", run) for run in values["runs"]]
    return runs, check_text("engine", values["engine"])


def _write(path: Path, value: Any) -> int:
    """Returns the bytes of the file."""
    torch.save(value, path)
    return path.stat().st_size


def _force(path: Path) -> None:
    """Force a file, or the names in a folder, onto the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _is_whole(folder: Path) -> bool:
    """Has every file the size with which it was written?"""
    try:
        sizes = torch.load(folder / _CONTENTS, weights_only=True)
        return all((folder / f"{n}.pt").stat().st_size == size for n, size in sizes.items())
    except (OSError, RuntimeError, pickle.UnpicklingError):
        return False

"""States of simulations as files.

A checkpoint is a folder `step-CLOCK` with a file for each piece of a state. It is written under
another name, forced onto the disk, and then renamed: it is there whole or not at all, whenever the
process or the machine ends. Sizes and checksums are compared before it is read. Nothing in it is
unpickled but tensors and plain values.
"""

import json
import os
import re
import shutil
import warnings
import zlib
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, BinaryIO

import torch

from palsgd.checks import check_int, check_text
from palsgd.disk import force
from palsgd.json_files import read_json, read_json_object

KEEP = 2  # so many are kept, in case that the newest one is damaged later
_NAME = re.compile(r"step-(\d+)")
_CONTENTS = "contents.json"  # the file with the sizes and checksums of the others
_PIECE = 1 << 24  # bytes that are read at a time
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
            contents = {name: _write(part / f"{name}.pt", piece) for name, piece in state}
            (part / _CONTENTS).write_text(json.dumps(contents))
            # together, as the disk then writes them in one go
            with ThreadPoolExecutor(max_workers=8) as threads:
                list(threads.map(force, part.iterdir()))
            force(part)
            if whole.exists():
                shutil.rmtree(whole)
            os.replace(part, whole)
            force(self.folder)
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
        force(part)
        os.replace(part, self._path)

    def checkpoints(self, first: int) -> Checkpoints:
        """Those of the program whose first run has this number."""
        return Checkpoints(self.folder / f"program-{first}")


def _program(values: Any) -> tuple[list[int], str]:
    runs = [check_int("run", run) for run in values["runs"]]
    return runs, check_text("engine", values["engine"])


class _Summed:
    """A file that adds up what is written to it. The checksum is one that takes no longer than a
    disk does: it finds damage, not forgery."""

    def __init__(self, file: BinaryIO):
        self._file, self.size, self.checksum = file, 0, 0

    def write(self, content: Any) -> int:
        self.checksum = zlib.crc32(content, self.checksum)
        self.size += len(content)
        return self._file.write(content)

    def flush(self) -> None:
        self._file.flush()


def _write(path: Path, value: Any) -> list[int]:
    """Returns the size and the checksum of the file."""
    with open(path, "wb") as file:
        summed = _Summed(file)
        torch.save(value, summed)  # type: ignore[arg-type]
    return [summed.size, summed.checksum]


def _is_whole(folder: Path) -> bool:
    """Has every file the size and the checksum with which it was written?"""
    try:
        contents = read_json_object(folder / _CONTENTS, fix="leave it out")
        return bool(contents) and all(
            _read_sums(folder / f"{name}.pt") == sums for name, sums in contents.items()
        )
    except (OSError, ValueError):
        return False


def _read_sums(path: Path) -> list[int]:
    size, checksum = 0, 0
    with open(path, "rb") as file:
        while content := file.read(_PIECE):
            size, checksum = size + len(content), zlib.crc32(content, checksum)
    return [size, checksum]

"""The files of a run, written and read as docs/files.md has them.

They are written so that a kill loses no finished line. They are checked when they are read: the
error for a wrong file names the file and the line, and says what to do.
"""

import json
import logging
import math
import os
import re
import shutil
import warnings
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from palsgd import registry
from palsgd.checks import in_error
from palsgd.disk import naming
from palsgd.json_files import json_value, read_json_object, read_text
from palsgd.lab.atomic import PART, atomic_path, atomic_write
from palsgd.lab.methods import is_baseline
from palsgd.lab.run_fields import check_config, check_summary
from palsgd.lab.worker_changes import changes_in, said_of
from palsgd.lab.yaml_files import read_yaml, yaml_text

log = logging.getLogger("palsgd")

SCHEMA = 1
Line = dict[str, Any]
Record = dict[str, Any]

_CHECKPOINTS = "checkpoints"
_FILES = (
    "config.yaml", "metrics.jsonl", "timeline.jsonl", "summary.json", "failed.txt",
    "best.safetensors",
)  # fmt: skip
_SAVED = re.compile(r"step-(\d+)(?:-\d+)?")
_MOST_FOLDERS = 50_000  # that are searched for runs
_OLD = "old"  # how names of files and folders that were set aside go on, before a number
_ALWAYS = ("step", "gradient_steps", "bytes_sent")
_MOST_BYTES = 2**30  # of lines; a run of a million steps has some ten million
_AGAIN = "delete the line or run again"
_SOMETIMES = ("time_s", "loss", "metric", "train_loss", "train_metric", "agreement", "lr",
              "simulation_s", "syncs")  # fmt: skip


class RunFolder:
    def __init__(self, path: Path):
        self.path = Path(path)

    @property
    def finished(self) -> bool:
        return (self.path / "summary.json").exists()

    @property
    def failure(self) -> str | None:
        """Why the run ended early, if it did so by itself."""
        path = self.path / "failed.txt"
        if not path.exists():
            return None
        return read_text(path, fix="delete it", errors="replace").strip()

    @property
    def checkpoints(self) -> Path:
        return self.path / _CHECKPOINTS

    @property
    def best_path(self) -> Path:
        return self.path / "best.safetensors"

    @property
    def saved_steps(self) -> list[int]:
        """The steps of its checkpoints, by their names, which they have when they are whole."""
        found = (_SAVED.fullmatch(path.name) for path in self.checkpoints.glob("step-*"))
        return sorted(int(match[1]) for match in found if match)

    @property
    def written_at(self) -> float:
        """When the last line of metrics.jsonl was written, in seconds as time.time() has them."""
        return (self.path / "metrics.jsonl").stat().st_mtime

    @property
    def in_use(self) -> bool:
        """Does it hold anything of a run?"""
        return any((self.path / name).exists() for name in (*_FILES, _CHECKPOINTS))

    # -- writing ---------------------------------------------------------------------------------

    def begin(self, config: Mapping[str, Any], *, resume: bool = False) -> None:
        """Begin a run in a folder that holds none, unless it is to be resumed and has no
        checkpoint."""
        if resume:
            self.start_over()
        elif self.in_use:
            raise ValueError(
                f"{self.path} holds a run; add --resume to go on with it, --force to start over, "
                "or choose another --out"
            )
        self.create(config)

    def create(self, config: Mapping[str, Any]) -> None:
        atomic_write(self.path / "config.yaml", yaml_text({"schema": SCHEMA, **config}))

    def append(self, lines: Iterable[Mapping[str, Any]]) -> None:
        """Add lines to metrics.jsonl. They are on the disk when this returns, so that a checkpoint
        that is written next is never ahead of them."""
        path = self.path / "metrics.jsonl"
        with naming(path), open(path, "a", encoding="utf-8") as file:
            file.writelines(_text(line) for line in lines)
            file.flush()
            os.fsync(file.fileno())

    def keep_lines(self, until_step: int, written: int) -> None:
        """Drop the lines that were written after the checkpoint from which the run goes on. When it
        was saved, `written` lines were there. A line that is damaged or gone is said to be lost,
        and the file as it was is kept under another name; a last line that a kill cut off is one
        that the run writes again."""
        path = self.path / "metrics.jsonl"
        whole, damaged = _whole_lines(path)
        kept = [line for line in whole if line["step"] <= until_step]
        if damaged or len(kept) < written:
            aside = self._set_aside(["metrics.jsonl"])
            log.warning(
                "palsgd: %s is damaged: of the %d lines up to step %d %d are lost, and the run "
                "goes on without them%s", path, written, until_step, max(0, written - len(kept)),
                f"; the file as it was is {aside[0].name}" if aside else ", as the file is gone",
            )  # fmt: skip
        self.write_lines(kept)

    def start_over(self, why: str = "it has no checkpoint") -> None:
        """Make room for the run from its first step on, and say so. What is there of it is set
        aside, unless the run had made no step that was recorded."""
        if not self.in_use:
            return
        whole, damaged = _whole_lines(self.path / "metrics.jsonl")
        said = ""
        if self.saved_steps or damaged or any(line["step"] > 0 for line in whole):
            aside = self._set_aside([*_FILES, _CHECKPOINTS])
            said = f"; what it had is kept as {', '.join(path.name for path in aside)}"
        log.warning("palsgd: %s starts over from step 0, as %s%s", self.path, why, said)
        self.clear(old=False)

    def _set_aside(self, names: Iterable[str]) -> list[Path]:
        """Rename what is there to the first names that are free."""
        found = [self.path / name for name in names if (self.path / name).exists()]
        number = 1
        while any(_old(path, number).exists() for path in found):
            number += 1
        return [path.rename(_old(path, number)) for path in found]

    def write_lines(self, lines: Iterable[Mapping[str, Any]], name: str = "metrics") -> None:
        """These lines in place of all that were written."""
        atomic_write(self.path / f"{name}.jsonl", "".join(_text(line) for line in lines))

    def write_best(self, best: Mapping[str, Any]) -> None:
        """The model with the best metric so far, with that metric and its step."""
        from palsgd import tensor_files

        texts = {"format": "pt", **{name: json.dumps(best[name]) for name in ("step", "metric")}}
        with atomic_path(self.best_path) as part:
            tensor_files.write(part, best["model"], texts)

    def write_summary(self, summary: Mapping[str, Any]) -> None:
        write_json(self.path / "summary.json", summary)

    def write_failure(self, reason: object) -> None:
        atomic_write(self.path / "failed.txt", f"{reason}\n")

    def link(self, origin: "RunFolder", name: str, settings: Mapping[str, Any]) -> None:
        """Become the record of a run that is the same program as `origin`, called `name`, and was
        not run again: its lines and figures under these settings."""
        self.clear()
        steps = origin.config().get("steps")
        own = {**settings, "steps": steps, "same_as": name}
        self.path.mkdir(parents=True, exist_ok=True)
        self.create(origin.config() | own)
        atomic_write(self.path / "metrics.jsonl", (origin.path / "metrics.jsonl").read_text())
        if origin.failure is not None:
            self.write_failure(origin.failure)
        if (found := origin.summary()) is not None:
            kept = {key: settings[key] for key in ("method", "seed") if key in settings}
            self.write_summary(found | kept | {"same_as": name})

    def clear(self, *, old: bool = True) -> None:
        """Remove what a run wrote, and nothing else; what was set aside too, if `old`."""
        for name in (*_FILES, _CHECKPOINTS):
            also = [f"{name}.*.{PART}", *([f"{name}.{_OLD}-[0-9]*"] if old else [])]
            found = [path for pattern in also for path in self.path.glob(pattern)]
            for path in (self.path / name, *found):
                if path.is_dir():
                    shutil.rmtree(path, ignore_errors=True)
                else:
                    path.unlink(missing_ok=True)

    # -- reading ---------------------------------------------------------------------------------

    def config(self) -> Record:
        return _read_config(self.path / "config.yaml")

    def summary(self) -> Record | None:
        """None: the run has not finished."""
        path = self.path / "summary.json"
        return _read_summary(path) if path.exists() else None

    def best(self) -> Record | None:
        """What `write_best` wrote; None where there is nothing."""
        import torch

        from palsgd import tensor_files

        if not self.best_path.exists():
            return None
        data = torch.frombuffer(bytearray(self.best_path.read_bytes()), dtype=torch.uint8)
        model, texts = tensor_files.parsed(data, str(self.best_path))
        step, metric = (json_value(texts.get(name, "null")) for name in ("step", "metric"))
        return {"step": step, "metric": metric, "model": model}

    def lines(self) -> list[Line]:
        """The lines of metrics.jsonl. A last line that a kill cut off is left out with a
        warning."""
        found, cut_off = self.lines_and_cut()
        if cut_off:
            path = self.path / "metrics.jsonl"
            warnings.warn(f"the last line of {path} is cut off and left out", stacklevel=2)
        return found

    def lines_and_cut(self) -> tuple[list[Line], bool]:
        """The lines of metrics.jsonl, and whether a kill cut off its last line, which is left
        out."""
        return self._read("metrics", _metrics_problem)

    def timeline(self) -> list[Line]:
        """The spans of the workers; empty if they were not recorded."""
        return self._read("timeline", _timeline_problem)[0]

    def _read(self, name: str, problem: Callable[[Any], str | None]) -> tuple[list[Line], bool]:
        """Only a run that was killed, hence has no summary, may end with a line that is cut off."""
        path = self.path / f"{name}.jsonl"
        return _read_lines(path, problem, cut_allowed=not self.finished)


@dataclass(frozen=True, kw_only=True, eq=False)
class Run:
    """One training with one method, as its folder has it."""

    name: str  # its path, from the folder it was found in
    folder: RunFolder
    config: Record
    lines: list[Line]
    summary: Record | None  # None: the run has not finished
    notes: tuple[str, ...] = ()

    @property
    def method(self) -> str:
        return str(self.config["method"])

    @property
    def point(self) -> str:
        """The name of its folder less the seed, which runs of one setting have in common."""
        return without_seed(self.folder.path.name)

    @property
    def twin_place(self) -> Path | None:
        """Where the simulated run is that it repeats in real processes; None: it repeats none."""
        name = self.config.get("twin_of")
        return None if name is None else self.folder.path.resolve().with_name(name)

    @property
    def workload(self) -> str:
        return str(self.config["workload"])

    @property
    def finished(self) -> bool:
        return self.summary is not None

    @property
    def evaluations(self) -> list[Line]:
        return [line for line in self.lines if line.get("metric") is not None]


def find_runs(folders: Iterable[Path]) -> list[Run]:
    """All runs in the folders and below, methods in their usual order, each run once."""
    found: dict[Path, Run] = {}
    for given in folders:
        folder = Path(given).resolve()
        inside = _below(folder, given)
        if not inside:
            raise ValueError(
                f"no run in {given}: looked there and below for metrics.jsonl beside config.yaml; "
                "give a folder that palsgd train, compare or sweep wrote"
            )
        for path in inside:
            found.setdefault(path, read_run(path, name=str(path.relative_to(folder.parent))))
    return sorted(found.values(), key=_usual_order)


def _below(folder: Path, given: Path) -> list[Path]:
    """The folders of runs in a folder, however deep. A whole disk is not searched."""
    found = []
    for count, (path, _, files) in enumerate(os.walk(folder)):
        if count == _MOST_FOLDERS:
            raise ValueError(
                f"there are more than {_MOST_FOLDERS:,} folders in {given}; give one that is "
                "nearer to the runs"
            )
        if "metrics.jsonl" in files:
            found.append(Path(path))
    return found


def without_seed(name: str) -> str:
    """A run's name less its part `seed=S`; empty if that is all of it."""
    return ",".join(part for part in name.split(",") if not part.startswith("seed="))


def read_run(path: Path, *, name: str | None = None) -> Run:
    folder = RunFolder(path)
    config = folder.config()
    lines, cut_off = folder.lines_and_cut()
    notes = ["the last line of metrics.jsonl is cut off and left out"] if cut_off else []
    notes += [said_of(change, dealt=True) for change in changes_in(config)]
    return Run(
        name=name or path.name,
        folder=folder,
        config=config,
        lines=lines,
        summary=folder.summary(),
        notes=tuple(notes),
    )


def write_json(path: Path, value: Any) -> None:
    atomic_write(path, json.dumps(plain(value), indent=2) + "\n")


def plain(value: Any) -> Any:
    """The value with null in place of nan and inf, which JSON does not have."""
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, Mapping):
        return {key: plain(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [plain(each) for each in value]
    return value


def _text(line: Mapping[str, Any]) -> str:
    return json.dumps(plain(line)) + "\n"


def _read_lines(
    path: Path, problem: Callable[[Any], str | None], *, cut_allowed: bool
) -> tuple[list[Line], bool]:
    """The objects of a .jsonl file, none where it is missing, and whether its last line was cut
    off. Any other line that is no JSON, or has a `problem`, is refused with its number."""
    # Bytes that are no UTF-8 become characters that are no text, so that their line is refused.
    text = ""
    if path.exists():
        text = read_text(path, fix=_AGAIN, most=_MOST_BYTES, errors="surrogateescape")
    texts = text.rstrip().splitlines()
    lines: list[Line] = []
    for number, text in enumerate(texts, start=1):
        try:
            line = json_value(text)
        except ValueError as error:
            if cut_allowed and number == len(texts):
                return lines, True
            raise ValueError(
                f"{path}, line {number}: not JSON: {text[:60]!r} ({error}); {_AGAIN}"
            ) from None
        if wrong := problem(line):
            raise ValueError(f"{path}, line {number}: {wrong}; {_AGAIN}")
        lines.append(line)
    return lines, False


def _whole_lines(path: Path) -> tuple[list[Line], int]:
    """The lines of metrics.jsonl that are whole, and how many are not. A last line that a kill cut
    off, as it has no end, is not counted."""
    if not path.exists():
        return [], 0
    text = read_text(path, fix="set it aside", most=_MOST_BYTES, errors="surrogateescape")
    *ended, last = text.split("\n")
    lines = [line for each in ended if (line := _whole_line(each)) is not None]
    end = _whole_line(last)
    return [*lines, *([] if end is None else [end])], len(ended) - len(lines)


def _whole_line(text: str) -> Line | None:
    try:
        line = json_value(text)
    except ValueError:
        return None
    return line if _metrics_problem(line) is None else None


def _old(path: Path, number: int) -> Path:
    return path.with_name(f"{path.name}.{_OLD}-{number}")


def _metrics_problem(line: Any) -> str | None:
    if not isinstance(line, dict):
        return f"not an object: {line!r:.60}"
    for key in _ALWAYS:
        if not _is_number(line.get(key)):
            return f"{key} is {line.get(key)!r:.60}, not a number"
    for key in _SOMETIMES:
        if not (line.get(key) is None or _is_number(line[key])):
            return f"{key} is {line[key]!r:.60}, not a number or null"
    distances = line.get("distance") or []
    if not isinstance(distances, list) or not all(map(_is_number_or_null, distances)):
        return f"distance is {distances!r:.60}, not a list of numbers"
    return None


def _timeline_problem(line: Any) -> str | None:
    if not isinstance(line, dict) or not isinstance(line.get("kind"), str):
        return f"not an object with a kind: {line!r:.60}"
    for key in ("worker", "start_s", "end_s"):
        if not _is_number(line.get(key)):
            return f"{key} is {line.get(key)!r:.60}, not a number"
    return None


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _is_number_or_null(value: Any) -> bool:
    return value is None or _is_number(value)


def _read_config(path: Path) -> Record:
    if not path.exists():
        raise ValueError(f"{path} is missing: {path.parent} is not a whole run; leave it out")
    fix = "restore it or leave the run out"
    config = read_yaml(path, fix=fix)
    for key in ("workload", "method"):
        if key not in config:
            raise ValueError(f"{path} has no {key!r}; {fix}")
    if config.get("schema", SCHEMA) != SCHEMA:
        raise ValueError(
            f"{path} has schema {in_error(config['schema'])}, this palsgd reads {SCHEMA}; "
            "use the version that wrote it"
        )
    return _checked(path, config, check_config, fix)


def _read_summary(path: Path) -> Record:
    fix = "delete it to show the run as unfinished"
    return _checked(path, read_json_object(path, fix=fix), check_summary, fix)


def _checked(path: Path, values: Record, check: Callable[[Record], None], fix: str) -> Record:
    try:
        check(values)
    except ValueError as error:
        raise ValueError(f"{path}: {error}; {fix}") from None
    return values


def _usual_order(run: Run) -> tuple[Any, ...]:
    known = run.method in registry.names()
    return not is_baseline(run.method), not known, run.method, _natural(run.name)


def _natural(text: str) -> list[tuple[float, str]]:
    """A key that puts sync_every=8 before sync_every=64."""
    parts = re.findall(r"(\d+\.?\d*)|(\D+)", text)
    return [(float(number), "") if number else (float("inf"), word) for number, word in parts]

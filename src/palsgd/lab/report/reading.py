"""Runs, read from their folders. What the files hold is written down in docs/files.md."""

import json
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from palsgd.lab.settings import METHODS

SCHEMA = 1
Line = dict[str, Any]

_ALWAYS = ("step", "gradient_steps", "time_s", "bytes_sent")
_SOMETIMES = ("loss", "metric", "train_loss", "agreement", "lr")


@dataclass(frozen=True, kw_only=True, eq=False)
class Run:
    """One training with one method."""

    name: str  # its path, from the folder it was found in
    folder: Path
    config: dict[str, Any]
    lines: list[Line]
    summary: dict[str, Any] | None  # None: the run has not finished
    notes: tuple[str, ...] = ()

    @property
    def method(self) -> str:
        return str(self.config["method"])

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
        inside = [path.parent for path in folder.rglob("metrics.jsonl")]
        if not inside:
            raise ValueError(
                f"no run in {given}: looked there and below for metrics.jsonl beside config.yaml; "
                "give a folder that palsgd train, compare or sweep wrote"
            )
        for path in inside:
            found.setdefault(path, read_run(path, name=str(path.relative_to(folder.parent))))
    return sorted(found.values(), key=_usual_order)


def read_run(folder: Path, *, name: str | None = None) -> Run:
    config = _read_config(folder / "config.yaml")
    lines, cut_off = read_lines(folder / "metrics.jsonl", check=_check_metrics)
    notes = ["the last line of metrics.jsonl is cut off and left out"] if cut_off else []
    return Run(
        name=name or folder.name,
        folder=folder,
        config=config,
        lines=lines,
        summary=_read_summary(folder / "summary.json"),
        notes=tuple(notes),
    )


def read_timeline(run: Run) -> list[Line]:
    """What the workers did when; empty where that was not recorded."""
    path = run.folder / "timeline.jsonl"
    return read_lines(path, check=_check_timeline)[0] if path.exists() else []


def read_lines(path: Path, *, check: Any) -> tuple[list[Line], bool]:
    """The objects of a .jsonl file, and whether its last line was cut off (the run was killed)."""
    texts = path.read_text(encoding="utf-8", errors="replace").rstrip().splitlines()
    lines: list[Line] = []
    for number, text in enumerate(texts, start=1):
        try:
            line = json.loads(text)
        except json.JSONDecodeError:
            if number == len(texts):
                return lines, True
            raise ValueError(
                f"{path}, line {number}: not JSON: {text[:60]!r}; delete the line or run again"
            ) from None
        if problem := check(line):
            raise ValueError(f"{path}, line {number}: {problem}; delete the line or run again")
        lines.append(line)
    return lines, False


def _check_metrics(line: Any) -> str | None:
    if not isinstance(line, dict):
        return f"not an object: {line!r:.60}"
    for key in _ALWAYS:
        if not _is_number(line.get(key)):
            return f"{key} is {line.get(key)!r:.60}, not a number"
    for key in _SOMETIMES:
        if not (line.get(key) is None or _is_number(line[key])):
            return f"{key} is {line[key]!r:.60}, not a number or null"
    return None


def _check_timeline(line: Any) -> str | None:
    if not isinstance(line, dict) or not isinstance(line.get("kind"), str):
        return f"not an object with a kind: {line!r:.60}"
    for key in ("worker", "start_s", "end_s"):
        if not _is_number(line.get(key)):
            return f"{key} is {line.get(key)!r:.60}, not a number"
    return None


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _read_config(path: Path) -> dict[str, Any]:
    if not path.exists():
        raise ValueError(f"{path} is missing: {path.parent} is not a whole run; leave it out")
    try:
        config = yaml.safe_load(path.read_text(encoding="utf-8"))
    except yaml.YAMLError as error:
        where = str(error).replace("\n", " ")
        raise ValueError(f"{path} is not YAML ({where}); restore it or leave the run out") from None
    for key in ("workload", "method"):
        if not isinstance(config, dict) or key not in config:
            raise ValueError(f"{path} has no {key!r}; restore it or leave the run out")
    if config.get("schema", SCHEMA) != SCHEMA:
        raise ValueError(
            f"{path} has schema {config['schema']}, this palsgd reads {SCHEMA}; "
            "use the version that wrote it"
        )
    return config


def _read_summary(path: Path) -> dict[str, Any] | None:
    if not path.exists():
        return None
    try:
        summary = json.loads(path.read_text(encoding="utf-8"))
    except json.JSONDecodeError as error:
        raise ValueError(
            f"{path} is not JSON ({error}); delete it to show the run as unfinished"
        ) from None
    if not isinstance(summary, dict):
        raise ValueError(f"{path} is not an object; delete it to show the run as unfinished")
    return summary


def _usual_order(run: Run) -> tuple[Any, ...]:
    known = METHODS.index(run.method) if run.method in METHODS else len(METHODS)
    return known, run.method, _natural(run.name)


def _natural(text: str) -> list[tuple[float, str]]:
    """A key that puts sync_every=8 before sync_every=64."""
    parts = re.findall(r"(\d+\.?\d*)|(\D+)", text)
    return [(float(number), "") if number else (float("inf"), word) for number, word in parts]

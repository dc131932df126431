"""The files of a run, as docs/files.md has them. Written so that a kill loses no finished line."""

import json
import math
import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from palsgd.lab.atomic import PART, atomic_path, atomic_write

SCHEMA = 1
_FILES = (
    "config.yaml", "metrics.jsonl", "timeline.jsonl", "summary.json", "failed.txt", "best.pt",
)  # fmt: skip


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
        return path.read_text().strip() if path.exists() else None

    def write_failure(self, reason: object) -> None:
        atomic_write(self.path / "failed.txt", f"{reason}\n")

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    def create(self, config: Mapping[str, Any]) -> None:
        import yaml

        self.path.mkdir(parents=True, exist_ok=True)
        atomic_write(
            self.path / "config.yaml", yaml.safe_dump({"schema": SCHEMA, **config}, sort_keys=False)
        )

    def config(self) -> dict[str, Any]:
        import yaml

        return yaml.safe_load((self.path / "config.yaml").read_text())

    def append(self, name: str, lines: Iterable[Mapping[str, Any]]) -> None:
        with open(self.path / f"{name}.jsonl", "a") as file:
            for line in lines:
                file.write(json.dumps(plain(line)) + "\n")

    def lines(self, name: str = "metrics") -> list[dict[str, Any]]:
        path = self.path / f"{name}.jsonl"
        found = []
        for text in path.read_text().splitlines() if path.exists() else []:
            try:
                found.append(json.loads(text))
            except json.JSONDecodeError:  # cut off when the run was killed
                break
        return found

    def keep_lines(self, until_step: int) -> list[dict[str, Any]]:
        """Drop what was written after a checkpoint that is now gone on from."""
        kept = [line for line in self.lines() if line["step"] <= until_step]
        atomic_write(
            self.path / "metrics.jsonl", "".join(json.dumps(plain(line)) + "\n" for line in kept)
        )
        return kept

    def write_best(self, best: Mapping[str, Any]) -> None:
        """The model with the best metric so far, with that metric and its step."""
        import torch

        with atomic_path(self.path / "best.pt") as part:
            torch.save(dict(best), part)

    def write_summary(self, summary: Mapping[str, Any]) -> None:
        write_json(self.path / "summary.json", summary)

    def clear(self) -> None:
        """Remove what a run wrote, and nothing else."""
        for name in _FILES:
            for path in (self.path / name, *self.path.glob(f"{name}.*.{PART}")):
                path.unlink(missing_ok=True)
        shutil.rmtree(self.checkpoints, ignore_errors=True)


def write_json(path: Path, value: Any) -> None:
    atomic_write(path, json.dumps(plain(value), indent=2) + "\n")


def plain(value: Any) -> Any:
    """JSON knows no nan and no inf; a figure that is neither a number nor known is null."""
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, Mapping):
        return {key: plain(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [plain(each) for each in value]
    return value

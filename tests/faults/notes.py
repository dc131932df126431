"""What the processes of a run write down for the one that judges it: a line of JSON each time."""

import json
import os
import time
from pathlib import Path
from typing import Any


class Notes:
    """The notes of one worker. A line is written at once and whole, whatever happens next."""

    def __init__(self, folder: Path, worker: int):
        self._file = os.open(folder / f"{worker}.jsonl", os.O_WRONLY | os.O_CREAT | os.O_APPEND)

    def add(self, what: str, **more: Any) -> None:
        line = {"what": what, "at": time.monotonic(), **more}
        os.write(self._file, (json.dumps(line) + "\n").encode())


def read(folder: Path, worker: int) -> list[dict[str, Any]]:
    path = folder / f"{worker}.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

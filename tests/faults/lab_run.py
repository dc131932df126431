"""What a rank of the lab's scenario does: `palsgd train`, as torchrun starts it.

The rank is forked from a process that has imported everything, so that it costs milliseconds.
"""

import hashlib
import json
import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import palsgd
from faults.damage import step_of
from faults.fault import Fault
from faults.notes import Notes
from faults.strikes import Strike

WORDS = (
    "train", "digits", "inner=sgd", "lr=0.02", "warmup_steps=4", "batch_size=8", "steps=52",
    "sync_every=8", "checkpoint_every=1", "evaluate_every=16", "--workers", "2", "--device", "cpu",
    "--quiet", "--no-report",
)  # fmt: skip


@dataclass(frozen=True)
class Order:
    """What the ranks of a run are told."""

    folder: Path  # of the run
    notes: Path
    port: int
    timeout_s: float
    resume: bool = False
    fault: Fault | None = None

    def words(self) -> list[str]:
        flags = ["--out", str(self.folder), "--timeout", str(self.timeout_s)]
        return [*WORDS, *flags, *(["--resume"] if self.resume else [])]

    def work(self, worker: int) -> None:
        _work(self, worker)


def _work(order: Order, worker: int) -> None:
    from palsgd.__main__ import main

    notes = Notes(order.notes, worker)
    os.environ |= _environment(order, worker)
    sys.argv = ["palsgd", *order.words()]
    _watch(order, worker, notes)
    try:
        main()
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    sys.stderr.flush()
    notes.add("left", code=code)
    os._exit(code)


def _environment(order: Order, worker: int) -> dict[str, str]:
    return {
        "TORCHELASTIC_RUN_ID": "faults",
        "RANK": str(worker),
        "LOCAL_RANK": str(worker),
        "WORLD_SIZE": "2",
        "LOCAL_WORLD_SIZE": "2",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(order.port),
        "GLOO_SOCKET_IFNAME": "lo",
        "TORCH_CPP_LOG_LEVEL": "ERROR",
    }


def _watch(order: Order, worker: int, notes: Notes) -> None:
    """Have the steps and saves of this process noted, and the fault strike in one of them."""
    strike = Strike(order.fault, worker, order.folder, notes)
    step, save = palsgd.LocalOptimizer.step, palsgd.checkpoint.save
    begun = False

    def watched_step(self: palsgd.LocalOptimizer, *args: Any, **kwargs: Any) -> Any:
        nonlocal begun
        if not begun and order.resume:
            notes.add("resumed", step=self.clock)
        begun = True
        strike.before(self.gradient_steps)
        return step(self, *args, **kwargs)

    def watched_save(*args: Any, **kwargs: Any) -> Any:
        saved = save(*args, **kwargs)
        notes.add("saved", step=step_of(saved))
        return saved

    palsgd.LocalOptimizer.step = watched_step  # type: ignore[method-assign]
    palsgd.checkpoint.save = watched_save  # type: ignore[assignment]


def saves(out: Path) -> Path:
    """Where the run of a command's folder has its checkpoints."""
    return out / "palsgd" / "checkpoints"


def digest(out: Path) -> str | None:
    """Of everything that a finished run has written, except for what its seconds are in."""
    folder = out / "palsgd"
    if not (folder / "summary.json").exists():
        return None
    found = hashlib.sha256()
    for line in (folder / "metrics.jsonl").read_text().splitlines():
        values = {name: value for name, value in json.loads(line).items() if name != "time_s"}
        found.update(json.dumps(values).encode())
    for best in sorted(folder.glob("best*.safetensors")):
        found.update(best.read_bytes())
    return found.hexdigest()

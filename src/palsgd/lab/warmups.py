"""Which simulated runs have their warm-up in common, so that it is computed once."""

import hashlib
import os
from collections import Counter
from collections.abc import Iterable
from dataclasses import fields
from pathlib import Path
from typing import Any

import torch

from palsgd.lab.settings import Settings
from palsgd.simulator.warm_start import Found

# What a warm-up does not depend on: it acts after it, or on nothing that is computed.
LATER = (
    "method",
    "method_settings",
    "sync_every",
    "mix_prob",
    "mix_rate",
    "pull",
    "draws",
    "discard_batches",
    "speeds",
    "compress",
    "delay",
    "fragments",
    "outer",
    "outer_lr",
    "outer_momentum",
    "outer_weight_decay",
    "outer_schedule",
    "target",
    "target_on",
    "margin",
    "tuned",
    "checkpoint_every",
    "cluster",
)


class LabWarmUp:
    """A warm-up with the run that computed it, and the best model that this run saw in it. With a
    `file` it is shared with other processes: it is there as soon as one of them has left it."""

    def __init__(self, steps: int, file: Path | None = None):
        self.steps, self._file = steps, file
        self._found: Found | None = None
        self._given_up = False
        self.computed_by = ""
        self.best: dict[str, Any] = {}

    @property
    def found(self) -> Found | None:
        """None: nobody has computed it yet."""
        if self._found is None and self._file is not None and self._file.exists():
            # It was written by this very command, and what a run holds in memory may be anything.
            # Tensors return to the devices that they were on: Adam's counts stay on the CPU.
            self._set(*torch.load(self._file, weights_only=False))
        return self._found

    def leave(self, found: Found, best: dict[str, Any], computed_by: str) -> None:
        self._set(found, best, computed_by)
        if self._file is not None:
            part = self._file.with_suffix(".part")
            torch.save((found, best, computed_by), part)
            os.replace(part, self._file)  # so that nobody reads a half

    def _set(self, found: Found, best: dict[str, Any], computed_by: str) -> None:
        self._found, self.best, self.computed_by = found, best, computed_by

    def give_up(self) -> None:
        """The run that was to leave it is past it, and has left nothing. It is said once."""
        if self._file is not None and not self._given_up:
            self._given_up = True
            given_up(self._file).touch()


def given_up(file: Path) -> Path:
    """What says that the process which was to leave a warm-up will not."""
    return file.with_suffix(".none")


class SharedWarmUps:
    """Those of runs that are simulated one after another. A warm-up is kept until the last run that
    needs it has begun. Some are in common with runs of other processes, and have a file."""

    def __init__(self, waiting: Iterable[Settings], files: Iterable[Path] = ()):
        self._left = Counter(warmup_of(settings) for settings in waiting)
        self._shared: dict[tuple[Any, ...], LabWarmUp] = {}
        self._files = {path.stem: path for path in files}

    def of(self, settings: Settings) -> LabWarmUp | None:
        """For the next run: what it starts from, or leaves to those that come after it. None: it
        has its warm-up for itself."""
        key = warmup_of(settings)
        self._left[key] -= 1
        if not settings.warmup_steps:
            return None
        file = self._files.get(warmup_name(settings))
        if self._left[key] > 0 or file is not None:
            self._shared.setdefault(key, LabWarmUp(settings.warmup_steps, file))
        return self._shared.get(key) if self._left[key] > 0 else self._shared.pop(key, None)


def warmup_name(settings: Settings) -> str:
    """Of the file of its warm-up."""
    return hashlib.sha256(repr(warmup_of(settings)).encode()).hexdigest()[:16]


def warmup_of(settings: Settings) -> tuple[Any, ...]:
    """Equal for settings that are the same until the warm-up has ended. Where a length in epochs is
    rounded to rounds, H changes it, and with it the schedule of the learning rate."""
    rounded = settings.whole_rounds and settings.steps is None
    later = set(LATER) - ({"sync_every"} if rounded else set())
    own = [each.name for each in fields(settings) if each.name not in later]
    return tuple((name, str(getattr(settings, name))) for name in own)

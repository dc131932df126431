"""The kinds of the fields that a run's files have. A file may come from anywhere, and what reads it
computes with its values, so a value of another kind is refused where the file is read."""

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from palsgd.checks import as_number, check_flag, check_int, check_text, in_error
from palsgd.lab.settings import check_kinds
from palsgd.lab.worker_changes import changes_in

_FLAGS = ("simulated", "higher_is_better")
_TEXTS = ("metric", "engine", "device", "link")
_FIGURES = (
    *("final_loss", "final_metric", "best_loss", "best_metric", "best_step", "steps"),
    *("gradient_steps", "syncs", "bytes_sent", "wall_s", "waiting_s", "sync_s", "target"),
)


def check_config(values: Mapping[str, Any]) -> None:
    """Raise a ValueError for a field of config.yaml that is not of its kind. Files of other
    versions may have more fields, or fewer."""
    check_kinds(values)
    for name in _FLAGS:
        check_flag(name, values.get(name, False))
    for name in _TEXTS:
        if values.get(name) is not None:
            check_text(name, values[name])
    if values.get("parameters") is not None:
        check_int("parameters", values["parameters"], least=1)
    _check_figure("floor", values.get("floor"))
    changes_in(values)
    program = values.get("program") or []
    if not isinstance(program, list):
        raise ValueError(f"program={in_error(program)} must be a list of runs")
    others = (values.get(key) or "run" for key in ("same_as", "twin_of", "warmup_computed_by"))
    for name in (*program, *others):
        _check_run(name)


def check_summary(values: Mapping[str, Any]) -> None:
    """Raise a ValueError for a figure of summary.json that is none."""
    for name, value in values.items():
        if name in _FIGURES or name.endswith("_to_target") or name.startswith("metric_at_"):
            _check_figure(name, value)


def _check_figure(name: str, value: Any) -> None:
    if value is not None and not math.isfinite(as_number(value)):
        raise ValueError(f"{name}={in_error(value)} must be a finite number, or null")


def _check_run(name: Any) -> None:
    """The name of a run is that of a folder beside this one, and leads nowhere else."""
    if Path(check_text("the name of a run", name)).name != name:
        raise ValueError(f"{in_error(name)} is not the name of a run beside this one")

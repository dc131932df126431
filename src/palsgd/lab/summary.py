"""A run's figures from its own lines."""

from collections.abc import Mapping
from typing import Any

from palsgd.lab.comparison import COMPARED
from palsgd.lab.run_folder import Line, Record, plain


def summarize(config: Mapping[str, Any], lines: list[Line], ledger: Mapping[str, Any]) -> Record:
    """The summary of one run. `comparison.compared` adds the fields that need the other runs."""
    evaluated = [line for line in map(plain, lines) if "metric" in line]
    known = [line for line in evaluated if line["metric"] is not None] or evaluated[-1:]
    last, best = (
        evaluated[-1],
        (max if config["higher_is_better"] else min)(known, key=lambda line: line["metric"]),
    )
    named = {name: config[name] for name in ("method", "workload", "workers", "seed", "simulated")}
    return named | {
        "final_loss": last["loss"],
        "final_metric": last["metric"],
        "best_loss": best["loss"],
        "best_metric": best["metric"],
        "best_step": best["step"],
        "steps": last["step"],
        "gradient_steps": last["gradient_steps"],
        "syncs": last["syncs"],
        "bytes_sent": last["bytes_sent"],
        "wall_s": last["time_s"],
        # None: not measured, as under DDP, whose exchanges overlap the backward pass
        "waiting_s": ledger.get("waiting_s") or None,
        "sync_s": ledger.get("sync_s") or None,
        **dict.fromkeys(COMPARED),
    }

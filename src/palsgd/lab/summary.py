"""A run's figures from its own lines."""

from collections.abc import Mapping
from typing import Any

from palsgd.lab.run_folder import Line, Record, plain

# Fields that need the other runs of a collection, by the axis of the cost.
TO_TARGET = {
    "steps_to_target": "step",
    "gradient_steps_to_target": "gradient_steps",
    "time_to_target_s": "time_s",
    "bytes_to_target": "bytes_sent",
}
AT_EQUAL = {
    "metric_at_equal_steps": "step",
    "metric_at_equal_gradients": "gradient_steps",
    "metric_at_equal_examples": "examples",
    "metric_at_equal_time": "time_s",
}
COMPARED = ("target", *TO_TARGET, *AT_EQUAL)


def summarize(config: Mapping[str, Any], lines: list[Line], ledger: Mapping[str, Any]) -> Record:
    """The summary of one run. `collection.write_collection` fills the fields that need the other
    runs."""
    evaluated = [line for line in map(plain, lines) if "metric" in line]
    known = [line for line in evaluated if line["metric"] is not None] or evaluated[-1:]
    last, best = (
        evaluated[-1],
        (max if config["higher_is_better"] else min)(known, key=lambda line: line["metric"]),
    )
    named = {name: config[name] for name in ("method", "workload", "workers", "seed", "simulated")}
    # only where it was so: the changes of the number of workers, and with draws=paced their speeds,
    # which repeat the run as speeds=
    rare = {"changes": config.get("changes"), "speeds": ledger.get("speeds")}
    return named | {
        "final_loss": last["loss"],
        "final_metric": last["metric"],
        # the lowest, which on a workload of another metric may be of another evaluation
        "best_loss": min((x["loss"] for x in evaluated if x["loss"] is not None), default=None),
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
        **{name: value for name, value in rare.items() if value},
    }

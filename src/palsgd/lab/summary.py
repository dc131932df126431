"""A run's figures from its lines, and those that need the other runs of a comparison."""

from collections.abc import Mapping
from typing import Any

from palsgd.lab.run_folder import plain

Line = dict[str, Any]
Record = dict[str, Any]


def summarize(config: Mapping[str, Any], lines: list[Line], ledger: Mapping[str, Any]) -> Record:
    """Of a run by itself; `compared` fills in the rest."""
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
        **dict.fromkeys(_COMPARED),
    }


_TO_TARGET = {
    "steps_to_target": "step",
    "gradient_steps_to_target": "gradient_steps",
    "time_to_target_s": "time_s",
    "bytes_to_target": "bytes_sent",
}
_COMPARED = ("target", *_TO_TARGET, "metric_at_equal_gradients", "metric_at_equal_time")


def compared(
    records: Mapping[str, Record],
    lines: Mapping[str, list[Line]],
    higher_is_better: bool,
    settings: Mapping[str, Mapping[str, Any]],
) -> dict[str, Record]:
    """The same records with targets (what DDP reached; where it ran several times, with the most
    alike settings) and the metric at equal gradients and equal time."""
    fewest = min(record["gradient_steps"] for record in records.values())
    shortest = min(record["wall_s"] for record in records.values())
    alone = len(records) == 1  # equal to nothing
    return {
        name: record
        | _to_target(_target_of(name, records, settings), lines[name], higher_is_better)
        | {
            "metric_at_equal_gradients": None
            if alone
            else _metric_within(lines[name], "gradient_steps", fewest),
            "metric_at_equal_time": None
            if alone
            else _metric_within(lines[name], "time_s", shortest),
        }
        for name, record in records.items()
    }


def _target_of(
    name: str, records: Mapping[str, Record], settings: Mapping[str, Mapping[str, Any]]
) -> float | None:
    def likeness(other: str) -> int:
        return sum(settings[other][key] == value for key, value in settings[name].items())

    ddp = [other for other, record in records.items() if record["method"] == "ddp"]
    return records[max(ddp, key=likeness)]["final_metric"] if ddp else None


def _to_target(target: float | None, lines: list[Line], higher_is_better: bool) -> Record:
    reached = next((line for line in lines if _reaches(line, target, higher_is_better)), None)
    return {"target": target} | {name: reached and reached[key] for name, key in _TO_TARGET.items()}


def _reaches(line: Line, target: float | None, higher_is_better: bool) -> bool:
    metric = line.get("metric")
    if metric is None or target is None:
        return False
    return metric >= target if higher_is_better else metric <= target


def _metric_within(lines: list[Line], key: str, budget: float) -> float | None:
    """The last evaluation that took no more than the budget."""
    within = [line for line in lines if line.get("metric") is not None and line[key] <= budget]
    return within[-1]["metric"] if within else None

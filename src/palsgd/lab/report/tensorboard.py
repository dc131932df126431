"""The curves as TensorBoard event files."""

import re
from collections.abc import Callable
from pathlib import Path

from palsgd.lab.groups import Group, group
from palsgd.lab.report.curves import QUANTITIES
from palsgd.lab.run_folder import Run, find_runs

_TAGS = {
    "loss": "validation/loss",
    "metric": "validation/metric",
    "train_loss": "train/loss",
    "distance": "sync/distance",
    "agreement": "sync/agreement",
}


def write_tensorboard(folders: list[Path], out: Path) -> Path:
    """Write one TensorBoard run per run. Its "wall time" is training time, so "relative" shows
    training time."""
    from torch.utils.tensorboard import SummaryWriter

    out, taken = Path(out), set[str]()
    runs = find_runs(folders)
    for workload in dict.fromkeys(run.workload for run in runs):
        for each in group([run for run in runs if run.workload == workload]):
            for run in each.runs:
                with SummaryWriter(str(out / _name(each, run, taken))) as writer:
                    _write(run, writer.add_scalar)
    return out


def _name(each: Group, run: Run, taken: set[str]) -> str:
    """A unique folder name from the setting, with only safe characters."""
    seed = f" seed={run.config.get('seed')}" if len(each.runs) > 1 else ""
    plain = re.sub(r"[^\w=,.+-]+", "_", f"{run.workload} {each.label}{seed}")
    name = next(
        n for i in range(len(taken) + 1) if (n := f"{plain}_{i}" if i else plain) not in taken
    )
    taken.add(name)
    return name


def _write(run: Run, add: Callable[..., None]) -> None:
    for line in run.lines:
        for quantity, tag in _TAGS.items():
            value = QUANTITIES[quantity](line)
            if value is not None:
                add(tag, value, line["step"], walltime=line.get("time_s"))
        if line.get("lr") is not None:
            add("train/lr", line["lr"], line["step"], walltime=line.get("time_s"))

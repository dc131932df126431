"""The comparison as a table for the terminal."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from palsgd import references
from palsgd.lab.comparison import Comparison, Final, ToTarget
from palsgd.lab.groups import group
from palsgd.lab.report import formats
from palsgd.lab.run_folder import find_runs

if TYPE_CHECKING:
    from rich.table import Table

# A terminal of 80 characters has room for these; the report has all columns.
_COLUMNS = ("loss", "metric", "to target", "speed-up", "gradients", "time", "sent")


def terminal_table(folders: list[Path]) -> Table:
    """Final values, what each setting took to DDP's final metric, and what it took in all."""
    from rich import box
    from rich.table import Table
    from rich.text import Text

    runs = find_runs(folders)
    workloads = dict.fromkeys(run.workload for run in runs)
    caption = "to target: time until DDP's final metric; sent: by each worker"
    if any(run.config.get("cluster") for run in runs):
        caption += "; time: projected on the cluster"
    elif any(run.config.get("simulated") for run in runs):
        caption += "; time: of the simulation"
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), caption=caption)
    alone = references.short(runs[0].workload) if len(workloads) == 1 else ""
    table.add_column(alone, min_width=8)
    for name in _COLUMNS:
        table.add_column(name, justify="right", no_wrap=True)
    for workload in workloads:
        comparison = Comparison(group([run for run in runs if run.workload == workload]))
        finals = {row.group: row for row in comparison.finals()}
        for row in comparison.to_target():
            which = "" if alone else f"{references.short(workload)}: "
            name = f"{which}{row.group.label}"
            cells = [*_final(finals.get(row.group)), *_target(row, bool(comparison.targets))]
            cells += _totals(finals.get(row.group))
            # Text, not str: rich would read [brackets] in a name as markup.
            table.add_row(Text(name), *(Text(cell) for cell in cells))
    return table


def _final(row: Final | None) -> list[str]:
    if row is None:
        return ["unfinished", "unfinished"]
    return [formats.number(row.loss), formats.number(row.metric)]


def _target(row: ToTarget, known: bool) -> list[str]:
    if not known or not row.tried:
        return [formats.NONE] * 2
    if not row.reached:
        return ["missed", formats.NONE]
    if row.reached < row.tried:
        return [f"{row.tried - row.reached} of {row.tried} missed", formats.NONE]
    saved = formats.NONE if row.group.is_baseline else formats.percent(row.saved["time_s"])
    return [formats.seconds(row.spent["time_s"]), saved]


def _totals(row: Final | None) -> list[str]:
    if row is None:
        return [formats.NONE] * 3
    return [
        formats.count(row.totals["gradient_steps"]),
        formats.seconds(row.totals["wall_s"]),
        formats.size(row.totals["bytes_sent"]),
    ]

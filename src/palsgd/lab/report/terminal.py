"""The comparison as a table for the terminal."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from palsgd.lab.report import formats
from palsgd.lab.report.comparing import Comparison, Final, ToTarget
from palsgd.lab.report.grouping import group
from palsgd.lab.report.reading import find_runs

if TYPE_CHECKING:
    from rich.table import Table

_COLUMNS = (
    "loss",
    "metric",
    "speed-up",
    "time",
    "steps",
    "gradients",
    "bytes",
    "total time",
    "total bytes",
)


def terminal_table(folders: list[Path]) -> Table:
    """Final values, what each setting took to DDP's final metric, and what it took in all."""
    from rich.table import Table
    from rich.text import Text

    runs = find_runs(folders)
    workloads = dict.fromkeys(run.workload for run in runs)
    table = Table(caption="speed-up, time, steps, gradients and bytes: to DDP's final metric")
    table.add_column("/".join(workloads) if len(workloads) == 1 else "")
    for name in _COLUMNS:
        table.add_column(name, justify="right")
    for workload in workloads:
        comparison = Comparison(group([run for run in runs if run.workload == workload]))
        finals = {row.group: row for row in comparison.finals()}
        for row in comparison.to_target():
            name = row.group.label if len(workloads) == 1 else f"{workload}: {row.group.label}"
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
        return [formats.NONE] * 5
    if not row.reached:
        return ["missed", *[formats.NONE] * 4]
    partly = f"{row.tried - row.reached} of {row.tried} missed" if row.reached < row.tried else ""
    saved = formats.NONE if row.group.method == "ddp" else formats.percent(row.saved["time_s"])
    shown = (formats.seconds, formats.count, formats.count, formats.size)
    spent = [text(row.spent[key]) for text, key in zip(shown, row.spent, strict=True)]
    return [partly or saved, *spent]


def _totals(row: Final | None) -> list[str]:
    if row is None:
        return [formats.NONE, formats.NONE]
    return [formats.seconds(row.totals["wall_s"]), formats.size(row.totals["bytes_sent"])]

"""The comparison for the terminal: its verdicts, and a table."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from palsgd import references
from palsgd.lab.comparison import Comparison, Final, ToTarget
from palsgd.lab.groups import Group, group
from palsgd.lab.report import formats
from palsgd.lab.report.tables import TWIN_DIGITS
from palsgd.lab.run_folder import find_runs
from palsgd.lab.timing.pace import Pace

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.table import Table

# A terminal of 80 characters has room for these; the report has all columns.
_COLUMNS = ("loss", "metric", "to target", "gradients", "sent", "time")


def terminal_table(folders: list[Path], link: str | None = None) -> RenderableType:
    """Of each workload the headline and the verdicts, then a table; seconds are projected on the
    link if one is given."""
    from rich.console import Group as Parts
    from rich.text import Text

    runs = find_runs(folders)
    parts: list[RenderableType] = []
    for workload in dict.fromkeys(run.workload for run in runs):
        comparison = Comparison(group([run for run in runs if run.workload == workload]), link)
        # Text, not str: rich would read [brackets] as markup.
        first = [comparison.headline] if comparison.headline else []
        parts += [Text(sentence) for sentence in [*first, *comparison.verdicts]]
        parts.append(_table(comparison, references.short(workload)))
        parts += [] if not comparison.twins else [_twins(comparison)]
    return Parts(*parts)


def _table(comparison: Comparison, title: str) -> Table:
    """Final values, what each setting took to the target, and what it took in all."""
    from rich import box
    from rich.table import Table
    from rich.text import Text

    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), caption=_caption(comparison))
    table.add_column(title, min_width=8)
    for name in _COLUMNS:
        table.add_column(name, justify="right")
    finals = {row.group: row for row in comparison.finals()}
    reached = {row.group: row for row in comparison.to_target()}
    for each in comparison.groups:
        cells = _cells(each, finals.get(each), reached.get(each), comparison)
        table.add_row(Text(each.label), *(Text(cell) for cell in cells))
    return table


def _twins(comparison: Comparison) -> Table:
    """Real processes beside the simulator and the timed steps. The verdicts say how far they are
    apart."""
    from rich import box
    from rich.table import Table
    from rich.text import Text

    caption = "by timed steps: what as many steps take by the blocks that were timed"
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), caption=caption)
    table.add_column("in processes", min_width=8)
    for name in ("loss", "simulated", "sent", "simulated", "time", "by timed steps"):
        table.add_column(name, justify="right")
    for twin in comparison.twins:
        cells = [
            *(formats.number(loss, TWIN_DIGITS) for loss in twin.ends("final_loss")),
            *map(formats.size, twin.ends("bytes_sent")),
            *map(formats.seconds, (twin.ends("wall_s")[0], twin.timed_s)),
        ]
        table.add_row(Text(twin.group.label), *map(Text, cells))
    return table


def _caption(comparison: Comparison) -> str:
    words = ["means over seeds with 95% intervals", "sent: by each worker"]
    if comparison.target is not None:
        at = f"{comparison.quality.name} {formats.number(comparison.target.value)}"
        words.insert(1, f"to target: steps to {at}")
    return "; ".join(words)


def _cells(
    own: Group, final: Final | None, reached: ToTarget | None, comparison: Comparison
) -> list[str]:
    if final is None:
        return ["unfinished", *[formats.NONE] * 5]
    same = comparison.same_programs.get(own)
    return [
        _with_interval(final.loss),
        _with_interval(final.metric),
        f"the same program as {same.label}" if same is not None else _to_target(reached),
        formats.count(final.totals["gradient_steps"]),
        formats.size(final.totals["bytes_sent"]),
        formats.seconds(_seconds(final, comparison.paces[own])),
    ]


def _seconds(final: Final, pace: Pace | None) -> float | None:
    steps = final.totals["steps"]
    return None if pace is None or steps is None else pace.seconds(steps)


def _with_interval(found: formats.Interval) -> str:
    return " ".join(filter(None, [formats.number(found.value), formats.interval(found)]))


def _to_target(row: ToTarget | None) -> str:
    if row is None:
        return formats.NONE
    if not row.reached:
        return f"not reached within {row.steps:,.0f}"
    cost = row.costs["step"].cost
    words = [formats.count(cost.value), formats.interval(cost, formats.count)]
    return " ".join(filter(None, [*words, "in its warm-up" if row.in_warmup else ""]))

"""The tables of the page, as text ready to be shown."""

from collections.abc import Callable
from dataclasses import dataclass, field

from palsgd import references
from palsgd.lab.comparison import Comparison, Final, ToTarget
from palsgd.lab.groups import Group, differing, named, shown
from palsgd.lab.report import formats


@dataclass(frozen=True)
class Cell:
    text: str
    note: str = ""


@dataclass(frozen=True)
class Row:
    number: int  # of the group, for its line sample
    label: str
    cells: list[Cell]


@dataclass(frozen=True)
class Table:
    title: str
    caption: str
    head: list[str]
    rows: list[Row] = field(default_factory=list)


def target_table(comparison: Comparison, metric: str) -> Table | None:
    targets = comparison.targets
    if not targets:
        return None
    numbers = {group: at for at, group in enumerate(comparison.groups)}
    values = ", ".join(formats.number(target) for target in targets[:4])
    return Table(
        title="Time to target",
        caption=f"Cost until the first evaluation with DDP's final {metric} ({values}). Speed-up "
        "is the share of DDP's time saved; the small figures say the same of "
        "each column. Means over runs.",
        head=["speed-up over DDP", "time", "steps", "gradients", "bytes"],
        rows=[
            Row(numbers[row.group], row.group.label, _target_cells(row))
            for row in comparison.to_target()
        ],
    )


def _target_cells(row: ToTarget) -> list[Cell]:
    if not row.tried:
        return [Cell("not yet"), *[Cell(formats.NONE)] * 4]
    if not row.reached:
        return [Cell("missed"), *[Cell(formats.NONE)] * 4]
    some = f"{row.tried - row.reached} of {row.tried} missed" if row.reached < row.tried else ""
    shown = (formats.seconds, formats.count, formats.count, formats.size)
    baseline = row.group.is_baseline
    cells = [
        Cell(text(row.spent[key]), "" if baseline or key == "time_s" else _change(row.saved[key]))
        for text, key in zip(shown, row.spent, strict=True)
    ]
    return [Cell(formats.NONE if baseline else formats.percent(row.saved["time_s"]), some), *cells]


def _change(saved: float | None) -> str:
    if saved is None:
        return ""
    return f"{formats.percent(abs(saved))} {'fewer' if saved >= 0 else 'more'}"


def final_table(comparison: Comparison, metric: str) -> Table:
    return Table(
        title="Final values",
        caption="Of the global model on the validation set: mean over runs, and the sample "
        f"variance below where there are several. The last columns show the {metric} at the last "
        "evaluation within what the most frugal run used.",
        head=[
            "runs",
            "loss",
            metric,
            f"at equal steps ({formats.count(comparison.budgets['step'])})",
            f"at equal gradients ({formats.count(comparison.budgets['gradient_steps'])})",
            f"at equal time ({formats.seconds(comparison.budgets['time_s'])})",
        ],
        rows=_rows(comparison, _final_cells),
    )


def _final_cells(row: Final) -> list[Cell]:
    return [
        Cell(str(len(row.group.finished)), _seeds(row.group)),
        Cell(formats.number(row.loss), _variance(row.loss_variance)),
        Cell(formats.number(row.metric), _variance(row.metric_variance)),
        *(Cell(formats.number(value)) for value in row.equal.values()),
    ]


def _seeds(group: Group) -> str:
    return f"{len(group.seeds)} seeds" if len(group.seeds) > 1 else f"seed {group.seeds[0]}"


def _variance(value: float | None) -> str:
    return "" if value is None else f"var {formats.small(value)}"


def cost_table(comparison: Comparison) -> Table:
    return Table(
        title="What it cost",
        caption="Whole runs, counted by worker 0, evaluation excluded; means over runs. "
        "A mixing step is a step without a gradient.",
        head=["steps", "gradients", "time", "waiting", "exchanging", "exchanges", "bytes"],
        rows=_rows(comparison, _cost_cells),
    )


def _cost_cells(row: Final) -> list[Cell]:
    total = row.totals
    return [
        Cell(formats.count(total["steps"])),
        Cell(formats.count(total["gradient_steps"])),
        Cell(formats.seconds(total["wall_s"])),
        Cell(formats.seconds(total["waiting_s"]), _share(total["waiting_s"], total["wall_s"])),
        Cell(formats.seconds(total["sync_s"]), _share(total["sync_s"], total["wall_s"])),
        Cell(formats.count(total["syncs"])),
        Cell(formats.size(total["bytes_sent"])),
    ]


def _share(part: float | None, whole: float | None) -> str:
    return formats.percent(part / whole) if part is not None and whole else ""


def _rows(comparison: Comparison, cells: Callable[[Final], list[Cell]]) -> list[Row]:
    finals = {row.group: row for row in comparison.finals()}
    return [
        Row(number, group.label, cells(finals[group]))
        for number, group in enumerate(comparison.groups)
        if group in finals
    ]


def settings_table(groups: list[Group]) -> Table | None:
    """The settings that tell the groups apart."""
    keys = differing(groups)
    if not keys:
        return None
    return Table(
        title="Settings that differ",
        caption="A dash: has no effect on the method.",
        head=[named(key) for key in keys],
        rows=[
            Row(
                number,
                references.short(group.method),
                [
                    Cell(shown(group.settings[k]) if k in group.settings else formats.NONE)
                    for k in keys
                ],
            )
            for number, group in enumerate(groups)
        ],
    )

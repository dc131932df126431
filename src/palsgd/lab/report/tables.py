"""The tables of the page, as text ready to be shown."""

from collections.abc import Callable
from dataclasses import dataclass, field

from palsgd import references
from palsgd.lab.comparison import Comparison, Final, ToTarget
from palsgd.lab.groups import Group, differing, named, shown
from palsgd.lab.report import formats
from palsgd.lab.verdicts import not_reached


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
    rows = comparison.to_target()
    if not rows:
        return None
    numbers = {group: at for at, group in enumerate(comparison.groups)}
    targets = list(dict.fromkeys(row.target for row in rows))[:4]
    values = "; ".join(f"{formats.number(target.value)}: {target.source}" for target in targets)
    return Table(
        title="To the target",
        caption=f"Cost until the mean over seeds first is at {comparison.quality.name} {values}. "
        "Between two evaluations by a straight line. Below: the 95% interval over seeds, and what "
        "the baseline spends divided by it.",
        head=["time", "steps", "gradients", "bytes"],
        rows=[
            Row(numbers[row.group], row.group.label, _target_cells(row, comparison)) for row in rows
        ],
    )


_TARGET_COLUMNS = {
    "time_s": formats.seconds,
    "step": formats.count,
    "gradient_steps": formats.count,
    "bytes_sent": formats.size,
}


def _target_cells(row: ToTarget, comparison: Comparison) -> list[Cell]:
    same = comparison.same_programs.get(row.group)
    if not row.reached:
        return [Cell(not_reached(row)), *[Cell(formats.NONE)] * 3]
    cells = []
    for axis, text in _TARGET_COLUMNS.items():
        if axis not in row.costs:
            cells.append(Cell(formats.NONE))
            continue
        cost, gain = row.costs[axis].cost, row.speed_ups.get(axis)
        notes = [formats.interval(cost, text), "" if gain is None else formats.times(gain)]
        cells.append(Cell(text(cost.value), " ".join(filter(None, notes))))
    if same is not None:
        cells[0] = Cell(cells[0].text, f"the same program as {same.label}")
    return cells


def final_table(comparison: Comparison, metric: str) -> Table:
    return Table(
        title="Final values",
        caption="Of the global model on the validation set: mean over seeds, with its 95% interval "
        "where there are several. The last columns show the "
        f"{comparison.quality.name} when the least is spent that runs of equal K and batch spent.",
        head=["seeds", "loss", metric, *(f"at equal {word}" for word in _EQUAL.values())],
        rows=_rows(comparison, _final_cells),
    )


_EQUAL = {
    "step": "steps",
    "gradient_steps": "gradients",
    "examples": "examples",
    "time_s": "time",
}


def _final_cells(row: Final) -> list[Cell]:
    return [
        Cell(str(len(row.group.finished)), _seeds(row.group)),
        *(Cell(formats.number(v.value), formats.interval(v)) for v in (row.loss, row.metric)),
        *(Cell(_equal(row, axis)) for axis in _EQUAL),
    ]


def _equal(row: Final, axis: str) -> str:
    return formats.number(row.equal[axis].value) if axis in row.equal else formats.NONE


def _seeds(group: Group) -> str:
    return f"{len(group.seeds)} seeds" if len(group.seeds) > 1 else f"seed {group.seeds[0]}"


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

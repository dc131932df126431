"""The tables of the page, as text ready to be shown."""

from collections.abc import Callable
from dataclasses import dataclass, field

from palsgd import references
from palsgd.lab.comparison import Comparison, Final, ToTarget
from palsgd.lab.groups import Group, differing, named, shown
from palsgd.lab.judging.interval import Interval
from palsgd.lab.report import formats
from palsgd.lab.report.curves import AXES
from palsgd.lab.twins import Twin
from palsgd.lab.verdicts import not_reached

TWIN_DIGITS = 6  # of a loss, to see whether two runs are one


@dataclass(frozen=True)
class Cell:
    text: str
    notes: tuple[str, ...] = ()  # small, below it
    wide: bool = False  # it takes the whole row


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


def target_table(comparison: Comparison) -> Table | None:
    rows = comparison.to_target()
    if not rows:
        return None
    numbers = {group: at for at, group in enumerate(comparison.groups)}
    targets = list(dict.fromkeys(row.target for row in rows))[:4]
    values = "; ".join(f"{formats.number(target.value)}: {target.source}" for target in targets)
    axes = [axis for axis in AXES if any(axis in row.costs for row in rows)]
    return Table(
        title="To the target",
        caption=f"Cost until the mean over seeds first is at {comparison.quality.name} {values}. "
        "Between two evaluations by a straight line. Below it: its 95% bootstrap interval over "
        "seeds, and the baseline's cost divided by it, with an interval of the same kind. A method "
        "that arrives in its warm-up has none: until then it is no other than the baseline.",
        head=[AXES[axis][0] for axis in axes] or ["reached"],
        rows=[
            Row(numbers[row.group], row.group.label, _target_cells(row, axes, comparison))
            for row in rows
        ],
    )


_FORMS = {"seconds": formats.seconds, "bytes": formats.size, "count": formats.count}


def _target_cells(row: ToTarget, axes: list[str], comparison: Comparison) -> list[Cell]:
    if not row.reached:
        return [Cell(not_reached(comparison, row), wide=True)]
    cells = []
    for axis in axes:
        if axis not in row.costs:
            cells.append(Cell(formats.NONE))
            continue
        text = _FORMS[AXES[axis][2]]
        cost, gain = row.costs[axis].cost, row.speed_ups.get(axis)
        notes = [formats.interval(cost, text), "" if gain is None else formats.times(gain),
                 "in its warm-up" if row.in_warmup else ""]  # fmt: skip
        cells.append(Cell(text(cost.value), tuple(filter(None, notes))))
    same = comparison.same_programs.get(row.group)
    if same is not None:
        cells[0] = Cell(cells[0].text, (f"the same program as {same.label}",))
    return cells


def final_table(comparison: Comparison, metric: str) -> Table | None:
    """What each setting ends with, and what that cost."""
    finals = {row.group: row for row in comparison.finals()}
    if not finals:
        return None
    compared = any(row.difference is not None for row in finals.values())
    beside = ["against the baseline"] if compared else []
    return Table(
        title="Final values, and what they cost",
        caption="Of the global model on the validation set: mean over n seeds, with its 95% t "
        "interval where there are several."
        + (f" Against the baseline: its {comparison.quality.name}, relative, above zero where it "
           "is worse, with the 95% t interval over pairs of seeds." if compared else "")
        + " Costs are means of whole runs, counted by worker 0, evaluation excluded.",
        head=["n", "loss", metric, *beside, "steps", "gradients", "exchanges", "bytes", "time"],
        rows=[
            Row(number, group.label, _final_cells(finals[group], compared, comparison))
            for number, group in enumerate(comparison.groups)
            if group in finals
        ],
    )  # fmt: skip


def _final_cells(row: Final, compared: bool, comparison: Comparison) -> list[Cell]:
    total, steps, pace = row.totals, row.totals["steps"], comparison.paces[row.group]
    seconds = None if pace is None or steps is None else pace.seconds(steps)
    return [
        Cell(str(len(row.group.finished)), () if len(row.group.seeds) > 1 else (_seed(row.group),)),
        *(_with_interval(each, formats.number) for each in (row.loss, row.metric)),
        *([_difference(row.difference)] if compared else []),
        Cell(formats.count(steps)),
        Cell(formats.count(total["gradient_steps"])),
        Cell(formats.count(total["syncs"])),
        Cell(formats.size(total["bytes_sent"])),
        Cell(formats.seconds(seconds), () if pace is None else (pace.kind,)),
    ]


def _seed(group: Group) -> str:
    return f"seed {group.seeds[0]}"


def _difference(found: Interval | None) -> Cell:
    return Cell(formats.NONE) if found is None else _with_interval(found, formats.percent)


def _with_interval(found: Interval, text: Callable[[float | None], str]) -> Cell:
    return Cell(text(found.value), tuple(filter(None, [formats.interval(found, text)])))


def twin_table(comparison: Comparison) -> Table | None:
    """What real processes ended with and spent, the simulator's and the timed steps' beside it."""
    if not comparison.twins:
        return None
    numbers = {group: at for at, group in enumerate(comparison.groups)}
    networks = ", ".join(dict.fromkeys(twin.network for twin in comparison.twins))
    return Table(
        title="In real processes",
        caption=f"Runs that processes trained to their end over {networks}, beside the simulated "
        "ones of the same seed. They are no further seeds, and no mean has them. Apart: the "
        "largest relative difference of the two losses at any evaluation. Time is by the run's "
        "own clock, evaluation excluded; below it what its number of steps takes by the steps "
        "that were timed.",
        head=["seed", "loss", "apart", "steps", "bytes", "time"],
        rows=[Row(numbers[twin.group], twin.group.label, _twin_cells(twin))
              for twin in comparison.twins],
    )  # fmt: skip


def _twin_cells(twin: Twin) -> list[Cell]:
    losses = [formats.number(loss, TWIN_DIGITS) for loss in twin.ends("final_loss")]
    sizes = [formats.size(sent) for sent in twin.ends("bytes_sent")]
    timed = () if twin.timed_s is None else (f"{formats.seconds(twin.timed_s)} by timed steps",)
    return [
        Cell(shown(twin.real.config.get("seed"))),
        Cell(losses[0], (f"{losses[1]} simulated",)),
        Cell(formats.small(twin.apart)),
        Cell(formats.count(twin.ends("steps")[0])),
        Cell(sizes[0], (f"{sizes[1]} simulated",)),
        Cell(formats.seconds(twin.ends("wall_s")[0]), timed),
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

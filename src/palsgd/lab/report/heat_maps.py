"""The robustness map: final losses over a grid of settings, one heat map per method."""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from palsgd.lab.groups import Group, named, shown, sortable
from palsgd.lab.judging.interval import Interval, of_mean
from palsgd.lab.judging.robustness import FIELDS, NEAR, TRAINS, Point, Robustness, robustness
from palsgd.lab.report import formats
from palsgd.lab.report.ablations import bundles, moved
from palsgd.lab.report.canvas import (
    MUTED,
    WIDTH,
    Plot,
    box,
    new_axes,
    placed,
    plain,
    publish,
)
from palsgd.lab.report.styles import THEME

LEAST = 3  # settings of one method that make a map
CELL = 0.4  # inches that its number needs
FULL = 0.5  # share of the cells that must be there: random points are no grid

# A loss this many times the best of all methods has this colour.
SHADES = (
    (1 + NEAR, f"within {NEAR:.0%} of the best of all", "on-dark"),
    (1.1, "within 10%", "on-dark"),
    (1.3, "within 30%", "on-light"),
    (TRAINS, "below twice the best", "on-light"),
    (5.0, "below 5 times", "on-light"),
    (math.inf, "above", "on-light"),
    (math.nan, "did not end with a finite loss", "on-light"),
)


@dataclass(frozen=True)
class Cell:
    point: Point
    loss: Interval | None  # None: not finite


@dataclass(frozen=True)
class HeatMap:
    """The final losses of one method. `column` is the field along x, and rows are what the other
    fields are; cells are by row and column."""

    label: str
    column: str
    columns: list[Any]
    rows: list[tuple[tuple[str, Any], ...]]
    cells: dict[tuple[int, int], Cell]

    @property
    def points(self) -> list[Point]:
        return [cell.point for cell in self.cells.values()]

    @property
    def seeds(self) -> list[int]:
        """How many the cells have, as far as they are finite."""
        return sorted({cell.loss.n for cell in self.cells.values() if cell.loss is not None})

    @property
    def is_grid(self) -> bool:
        return len(self.cells) >= max(2, FULL * len(self.columns) * len(self.rows))


def heat_maps(groups: list[Group]) -> list[HeatMap]:
    """One for each method, and each combination of its other settings; none if no method has a
    grid."""
    known = [each for each in groups if _cell(each) is not None]
    varied = [field for field in FIELDS if len(_values(known, field)) > 1]
    if not varied:
        return []
    runs = [run for each in known for run in each.runs]
    along = {key for field in varied for key in moved(runs, field)}
    left_out = {*varied, *along}
    found = []
    for bundle in bundles(runs, lambda key: key in left_out):
        within = [each for each in known if each.runs[0] in bundle.runs]
        own = _map(bundle.label, within, known, varied)
        if own is not None and own.is_grid:
            found.append(own)
    return found if any(len(each.cells) >= LEAST for each in found) else []


def _map(label: str, groups: list[Group], every: list[Group], varied: list[str]) -> HeatMap | None:
    """Columns are the values that occur in any of the maps, so that they stand below each other."""
    fields = [field for field in varied if len(_values(groups, field)) > 1]
    if not fields:
        return None
    column, others = fields[0], fields[1:]
    columns = sorted(_values(every, column), key=sortable)
    keys = {each: tuple((field, each.settings.get(field)) for field in others) for each in groups}
    rows = sorted(set(keys.values()), key=lambda row: [sortable(value) for _, value in row])
    cells = {}
    for each in groups:
        cell = _cell(each)
        if cell is not None:
            cells[rows.index(keys[each]), columns.index(each.settings[column])] = cell
    return HeatMap(label, column, columns, rows, cells)


def _cell(group: Group) -> Cell | None:
    """None: nothing is known yet, or a setting is no number. A seed that did not end with a finite
    loss makes the setting one that nobody can rely on."""
    settings = {field: group.settings[field] for field in FIELDS if field in group.settings}
    if not all(_is_number(value) for value in settings.values()):
        return None
    failed = any(run.folder.failure is not None for run in group.runs)
    losses = [run.summary.get("final_loss") for run in group.finished if run.summary is not None]
    if not losses and not failed:
        return None
    finite = [loss for loss in losses if loss is not None and math.isfinite(loss)]
    if failed or len(finite) < len(losses):
        return Cell(Point(settings, math.inf), None)
    found = of_mean(finite)
    return Cell(Point(settings, found.value), found)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _values(groups: Iterable[Group], field: str) -> list[Any]:
    return list(dict.fromkeys(g.settings[field] for g in groups if field in g.settings))


# -- drawing -------------------------------------------------------------------------------------


def best_of(maps: list[HeatMap]) -> float:
    return min(point.loss for each in maps for point in each.points)


def draw_heat_map(name: str, own: HeatMap, best: float, folder: Path | None) -> Plot:
    """Colours are by the loss beside the best of all methods, so that maps can be compared."""
    labels = [", ".join(shown(value) for _, value in row) for row in own.rows]
    fields = ", ".join(named(field) for field, _ in own.rows[0])
    left = 0.12 + 0.062 * max(map(len, [fields, *labels]))
    width = max(WIDTH, left + CELL * len(own.columns))
    height = 0.84 + 0.24 * len(own.rows)
    figure, axes = new_axes(own.label, named(own.column), height=height, width=width, left=left)
    for (row, column), cell in own.cells.items():
        shade = shade_of(cell.point.loss, best)
        colour, ink = THEME[f"heat-{shade}"][0], THEME[SHADES[shade][2]][0]
        axes.fill_between([column - 0.48, column + 0.48], row - 0.46, row + 0.46, fc=colour, lw=0)
        axes.text(column, row, _loss(cell), size=6.8, ha="center", va="center", color=ink)
    axes.set_xticks(range(len(own.columns)), [shown(value) for value in own.columns])
    axes.set_yticks(range(len(own.rows)), labels)
    axes.set_xlim(-0.5, len(own.columns) - 0.5)
    axes.set_ylim(-0.5, len(own.rows) - 0.5)
    axes.annotate(
        fields, (0, 0), xycoords="axes fraction", xytext=(-3.5, -6), textcoords="offset points",
        ha="right", va="top", color=MUTED,
    )  # fmt: skip
    axes.grid(False)
    for side in ("left", "bottom"):
        axes.spines[side].set_visible(False)
    rows = [(own.label, row, _cells(own, row, best)) for row in range(len(own.rows))]
    return publish(figure, name, own.label, {}, folder, box=box(axes), rows=placed(axes, rows, 0.5))


def shade_of(loss: float, best: float) -> int:
    if not math.isfinite(loss):
        return len(SHADES) - 1
    return next(at for at, (most, _, _) in enumerate(SHADES) if loss <= most * best)


def _loss(cell: Cell) -> str:
    return "\N{MULTIPLICATION SIGN}" if cell.loss is None else f"{cell.loss.value:.3g}"


def _cells(own: HeatMap, row: int, best: float) -> list[list[Any]]:
    """What the page's script shows of the cells of a row."""
    found = []
    for column, value in enumerate(own.columns):
        cell = own.cells.get((row, column))
        if cell is not None:
            settings = ((own.column, value), *own.rows[row])
            label = ", ".join(f"{named(field)} {shown(value)}" for field, value in settings)
            colour = f"heat-{shade_of(cell.point.loss, best)}"
            ends = [at / len(own.columns) for at in (column, column + 1)]
            found.append([*ends, label, _words(cell), colour])
    return found


def _words(cell: Cell) -> str:
    if cell.loss is None:
        return "did not end with a finite loss"
    bounds = formats.interval(cell.loss)
    return f"loss {formats.number(cell.loss.value)} {bounds} (n = {cell.loss.n})".replace("  ", " ")


def in_words(own: HeatMap, best: float) -> str:
    """The figures of a map, for its caption."""
    found: Robustness = robustness(own.points, best)
    if found.hottest is None:
        return f"None of {found.points} settings ended with a finite loss."
    hottest = ", ".join(f"{named(f)} {shown(v)}" for f, v in _varied(own, found.hottest))
    return (
        f"Means over {formats.seeds(own.seeds)}. {found.near_own} of {found.points} settings end "
        f"within {NEAR:.0%} of its best, "
        f"{plain(found.best)}; {found.near_all} of {found.points} within {NEAR:.0%} of the best of "
        f"all, {plain(best)}. Hottest that trains: {hottest}, loss {plain(found.hottest.loss)}."
    )


def _varied(own: HeatMap, point: Point) -> Iterable[tuple[str, Any]]:
    fields = [own.column, *(field for field, _ in own.rows[0])]
    return ((field, point.settings[field]) for field in fields if field in point.settings)

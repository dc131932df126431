"""The code that all figures share: style, scales, and writing into files and the page."""

import re
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from io import BytesIO
from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, FuncFormatter, MaxNLocator, NullLocator

from palsgd.lab.atomic import atomic_path, atomic_write
from palsgd.lab.report import formats
from palsgd.lab.report.styles import THEME

INK, MUTED, GRID = THEME["ink"][0], THEME["muted"][0], THEME["grid"][0]
FONTS = "system-ui, -apple-system, 'Segoe UI', Roboto, 'Helvetica Neue', sans-serif"

# A figure has the width of a phone, so that its text keeps its size there. A desktop shows three in
# a row, or two of the wide ones.
WIDTH, WIDE, HEIGHT = 3.7, 4.0, 2.65  # inches

_STYLE: Any = {
    "font.family": "sans-serif",
    "font.sans-serif": ["DejaVu Sans"],
    "font.size": 7.6,
    "text.parse_math": False,  # names come from files and may hold a dollar sign
    "text.color": INK,
    "axes.edgecolor": MUTED,
    "axes.labelcolor": MUTED,
    "axes.linewidth": 0.6,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": GRID,
    "grid.linewidth": 0.6,
    "xtick.color": MUTED,
    "ytick.color": MUTED,
    "xtick.major.size": 2.5,
    "ytick.major.size": 0,
    "xtick.major.width": 0.6,
    "figure.facecolor": "none",
    "axes.facecolor": "none",
    "savefig.facecolor": "none",
    "lines.linewidth": 1.3,
    "lines.solid_capstyle": "round",
    "lines.dash_capstyle": "round",
    "lines.markersize": 3.2,
    "lines.scale_dashes": True,
    "legend.frameon": False,
    "legend.fontsize": 7.2,
    "svg.fonttype": "none",
    "path.simplify_threshold": 0.2,
}


def drawing_style() -> AbstractContextManager[None]:
    return mpl.rc_context(_STYLE)


@dataclass
class Plot:
    """A finished figure: for the page, for files, and what the page needs to read points off it."""

    name: str
    title: str
    svg: str
    reading: dict[str, Any] = field(default_factory=dict)


def new_axes(
    title: str,
    xlabel: str = "",
    *,
    height: float = HEIGHT,
    width: float = WIDTH,
    left: float = 0.46,
) -> tuple[Figure, Axes]:
    """`left`: inches for what stands left of the axes."""
    figure = Figure(figsize=(width, height))
    beside = (left + 0.11) / width
    axes = figure.add_axes((left / width, 0.42 / height, 1 - beside, 1 - 0.76 / height))
    figure.text(0.055 / width, 1 - 0.1 / height, title, va="top", size=8.6, weight="bold")
    axes.set_xlabel(xlabel, labelpad=2)
    return figure, axes


def publish(
    figure: Figure,
    name: str,
    title: str,
    colours: dict[str, str],
    folder: Path | None,
    **reading: Any,
) -> Plot:
    """The figure as a plot of the page, and as files where there is a folder for them.

    An element that only the files show (the legend) has the gid "file-only".
    """
    legends = figure.findobj(match=lambda part: part.get_gid() == "file-only")
    for legend in legends:
        legend.set_visible(False)
    plot = Plot(name, title, _for_page(_svg(figure, name), colours), reading)
    for legend in legends:
        legend.set_visible(True)
    if folder is not None:
        save: dict[str, Any] = dict(bbox_inches="tight", pad_inches=0.08, facecolor="white")
        atomic_write(folder / f"{name}.svg", _svg(figure, name, **save))
        with atomic_path(folder / f"{name}.png") as part:
            figure.savefig(part, format="png", dpi=200, **save)
    return plot


def box(axes: Axes) -> list[float]:
    """Where the axes lie in the page's SVG: left, top, right, bottom."""
    figure = axes.get_figure(root=True)
    assert figure is not None
    width, height = (72 * inches for inches in figure.get_size_inches())
    left, bottom, right, top = axes.get_position().extents
    corners = (left * width, (1 - top) * height, right * width, (1 - bottom) * height)
    return [round(corner, 2) for corner in corners]


def placed(
    axes: Axes, rows: Iterable[tuple[str, float, list[list[Any]]]], half: float
) -> list[dict[str, Any]]:
    """What the page's script shows of a figure of bars: the title of each row, and its cells in the
    figure's own coordinates. `rows` have a title, their middle, and cells that begin with their two
    ends as shares of the width; a label, a text and a colour follow. `half`: of a row's height."""
    left, top, right, bottom = box(axes)
    below, above = axes.get_ylim()

    def across(share: float) -> float:
        return round(left + share * (right - left), 2)

    def down(row: float) -> float:
        return round(top + (row - above) / (below - above) * (bottom - top), 2)

    found = []
    for title, row, cells in rows:
        ends = sorted((down(row - half), down(row + half)))
        there = [[across(a), across(b), *rest] for a, b, *rest in cells]
        found.append({"title": title, "top": ends[0], "bottom": ends[1], "cells": there})
    return found


def scale(axes: Axes, which: str) -> dict[str, Any]:
    low, high = getattr(axes, f"get_{which}lim")()
    return {"from": low, "to": high, "log": getattr(axes, f"get_{which}scale")() == "log"}


def needs_log(values: Iterable[np.ndarray], *, ratio: float) -> bool:
    """Would small values be indistinguishable from zero on a linear axis?"""
    every = np.concatenate([np.ravel(part) for part in values] or [np.array([1.0])])
    positive = every[(every > 0) & np.isfinite(every)]
    return positive.size > 0.9 * every.size and positive.max() > ratio * positive.min()


def fit(axes: Axes, means: np.ndarray, bands: np.ndarray, *, log: bool) -> None:
    """Set the limits of y to show all means, and of the bands as much as does not make the means
    look equal. `bands` may have no end; on a log scale values of 0 and less have no place."""
    turn, back = (np.log, np.exp) if log else (np.asarray, np.asarray)
    with np.errstate(divide="ignore", invalid="ignore"):
        inner, outer = turn(means), turn(bands)
    inner, outer = inner[np.isfinite(inner)], outer[~np.isnan(outer)]
    low, high = (inner.min(), inner.max()) if inner.size else (0.0, 1.0)
    room = (high - low) / 2
    shown = np.clip([low, high, *outer], low - room, high + room)
    low, high = shown.min(), shown.max()
    margin = 0.06 * (high - low) or 0.1 * (1.0 if log else abs(low) or 1.0)
    ends = np.array([low - margin, high + margin])
    axes.set_ylim(*back(np.clip(ends, -690, 690) if log else ends))  # exp of more has no float


def set_scale(axes: Axes, which: str, *, log: bool, shown: Any = formats.count) -> None:
    axis = axes.xaxis if which == "x" else axes.yaxis
    if log:
        getattr(axes, f"set_{which}scale")("log")
        axis.set_major_locator(FixedLocator(log_ticks(*getattr(axes, f"get_{which}lim")())))
        axis.set_minor_locator(NullLocator())
    else:
        axis.set_major_locator(MaxNLocator(nbins=5, steps=[1, 2, 2.5, 5, 10]))
    axis.set_major_formatter(FuncFormatter(lambda value, _: shown(value)))


def log_ticks(low: float, high: float) -> list[float]:
    """Even ones over much less than a decade, some for each decade over less than three, else
    powers of ten, at most about six. Both ends are above zero, in any order."""
    low, high = min(low, high), max(low, high)
    decades = np.log10(high) - np.log10(low)
    if decades < 0.6:
        ticks = MaxNLocator(nbins=5, steps=[1, 2, 2.5, 5, 10]).tick_values(low, high)
        return [float(tick) for tick in ticks if tick > 0]
    digits: Sequence[float] = (1,)
    for most, these in ((3, (1, 3)), (2, (1, 2, 5)), (1, (1, 1.5, 2, 3, 5, 7))):
        digits = these if decades < most else digits
    every = max(1, int(np.ceil(decades / 6)))
    powers = range(int(np.floor(np.log10(low))), int(np.ceil(np.log10(high))) + 1, every)
    return [digit * 10.0**power for power in powers for digit in digits]


def plain(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"


def thousands(value: float) -> str:
    return (
        f"{value / 1e6:g}M"
        if value >= 1e6
        else f"{value / 1e3:g}k"
        if value >= 1e4
        else plain(value)
    )


def _svg(figure: Figure, name: str, **options: Any) -> str:
    """The SVG text of a figure, which is the same each time. `name` makes ids unique among the
    figures of a page."""
    file = BytesIO()
    with mpl.rc_context({"svg.hashsalt": name}):
        figure.savefig(file, format="svg", metadata={"Date": None, "Creator": None}, **options)
    text = file.getvalue().decode()
    text = re.sub(r"<metadata>.*?</metadata>", "", text, flags=re.DOTALL)
    text = re.sub(r"font: (\w+ )*?([\d.]+px) 'DejaVu Sans'[^;\"]*", rf"font: \1\2 {FONTS}", text)
    return re.sub(r' (d|transform|x|y)="[^"]*"', _rounded, text)


def _rounded(attribute: re.Match[str]) -> str:
    return re.sub(r"(\.\d\d)\d+", r"\1", attribute[0]).replace("\n", "")


def _for_page(svg: str, colours: dict[str, str]) -> str:
    """The SVG for use inside HTML: without prologue and size, with variables as colours and unique
    ids."""
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r'(<svg[^>]*?) width="[^"]*"', r"\1", svg, count=1)
    svg = re.sub(r'(<svg[^>]*?) height="[^"]*"', r'\1 aria-hidden="true"', svg, count=1)
    svg = re.sub(r' id="line-(\d+)"', r' data-line="\1"', svg)
    svg = re.sub(r' id="[A-Za-z.]+\d*[a-z]*_\d+"', "", svg)
    svg = re.sub(r"<!--.*?-->\s*", "", svg, flags=re.DOTALL)
    named = {light: f"var(--{name})" for name, (light, _) in THEME.items()} | colours

    def styled(style: re.Match[str]) -> str:
        text = re.sub(r"#[0-9a-f]{6}", lambda colour: named.get(colour[0], colour[0]), style[0])
        return re.sub(r"font:[^;\"]*?([\d.]+)px [^;\"]*", r"font-size: \1px", text)

    return re.sub(r'style="[^"]*"', styled, svg)

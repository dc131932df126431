"""The figures: curves, ablations and timelines."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from matplotlib.patches import PathPatch
from matplotlib.path import Path as Outline

from palsgd.lab.report import formats
from palsgd.lab.report.canvas import (
    MUTED,
    Plot,
    box,
    needs_log,
    new_axes,
    plain,
    publish,
    scale,
    set_scale,
    thousands,
)
from palsgd.lab.report.curves import AXES, Curve
from palsgd.lab.report.styles import THEME, LineStyle
from palsgd.lab.report.timelines import KINDS, Bar


@dataclass(frozen=True)
class Series:
    """A line of a plot: its number in the section, its curve and its style."""

    number: int
    label: str
    style: LineStyle
    curve: Curve


@dataclass(frozen=True)
class Reference:
    """A horizontal line for comparison, or a band if the runs have different values."""

    label: str
    low: float
    high: float
    style: LineStyle | None = None


def draw_curves(
    name: str,
    title: str,
    axis: str,
    series: list[Series],
    references: list[Reference],
    folder: Path | None,
    *,
    learning: bool,
) -> Plot:
    """`learning`: the curves fall or rise to a level, and the y scale shows that level."""
    unit, xlabel, shown = _x_format(axis, series)
    figure, axes = new_axes(title, xlabel)
    for each in series:
        _draw_line(axes, each, each.curve.x[axis] / unit)
    curves = [_settled(each.curve) if learning else each.curve for each in series]
    _fit(axes, curves, references)
    log = axis == "bytes_sent" and needs_log([each.curve.x[axis][-1:] for each in series], ratio=8)
    if log:
        ends = [float(each.curve.x[axis][-1]) for each in series]
        axes.set_xlim(min(ends) / 60, max(ends) * 1.3)
    else:
        axes.set_xlim(left=0)
    set_scale(axes, "x", log=log, shown=shown)
    _draw_references(axes, references)
    _file_legend(axes, series)
    return publish(
        figure, name, title, _colours(series), folder,
        box=box(axes), x=scale(axes, "x") | {"unit": unit}, y=scale(axes, "y"),
    )  # fmt: skip


def draw_ablation(
    name: str,
    title: str,
    field: str,
    ticks: list[str] | None,
    series: list[Series],
    references: list[Reference],
    folder: Path | None,
) -> Plot:
    """A final value against one setting; `ticks` are its values where they are not numbers."""
    figure, axes = new_axes(title, field)
    for each in series:
        _draw_points(axes, each, joined=ticks is None)
    _fit(axes, [each.curve for each in series], references)
    if ticks is not None:
        axes.set_xticks(range(len(ticks)), ticks)
        axes.set_xlim(-0.5, len(ticks) - 0.5)
    else:
        _scale_by_values(axes, sorted({x for each in series for x in each.curve.x["value"]}))
    _draw_references(axes, references)
    _file_legend(axes, series)
    return publish(
        figure, name, title, _colours(series), folder,
        box=box(axes), x=scale(axes, "x") | {"unit": 1, "ticks": ticks}, y=scale(axes, "y"),
    )  # fmt: skip


def draw_timeline(
    name: str, title: str, workers: dict[int, list[Bar]], folder: Path | None
) -> Plot:
    """One bar per worker; times start at zero."""
    end = max(stop for parts in workers.values() for _, _, stop in parts)
    unit, word = (1e-3, "ms") if end < 1 else formats.time_unit(end)
    height = 0.95 + 0.17 * len(workers)
    figure, axes = new_axes(title, f"time ({word})", height=height)
    for row, parts in enumerate(workers.values()):
        for kind in KINDS:
            spans = [(a / unit, b / unit) for what, a, b in parts if what == kind]
            if spans:
                axes.add_patch(_bars(spans, row, kind))
    axes.set_xlim(0, end / unit)
    axes.set_ylim(len(workers) - 0.5, -0.5)
    axes.set_yticks(range(len(workers)), [str(worker) for worker in workers])
    axes.grid(False)
    axes.spines["left"].set_visible(False)
    axes.xaxis.set_major_formatter(lambda value, _: plain(value))
    return publish(
        figure, name, title, {}, folder,
        box=box(axes), x=scale(axes, "x") | {"unit": unit}, y=scale(axes, "y"),
    )  # fmt: skip


def _bars(spans: list[tuple[float, float]], row: int, kind: str) -> PathPatch:
    """All bars of a kind as one path. Its outline makes mixing steps visible, although they take no
    time."""
    half = 0.36 if kind == "mixing" else 0.3
    bars = [
        Outline(
            [(a, row - half), (b, row - half), (b, row + half), (a, row + half), (a, 0)],
            closed=True,
        )
        for a, b in spans
    ]
    colour = THEME[kind][0]
    width = {"mixing": 0.7, "sync": 0.5}.get(kind, 0.0)
    return PathPatch(Outline.make_compound_path(*bars), fc=colour, ec=colour, lw=width)


def _x_format(axis: str, series: list[Series]) -> tuple[float, str, Any]:
    """The divisor of the x values, the label of the axis, and the format of its ticks."""
    if axis == "time_s":
        unit, word = formats.time_unit(max(float(each.curve.x[axis][-1]) for each in series))
        return unit, f"{AXES[axis]} ({word})", plain
    return 1.0, AXES[axis], formats.size if axis == "bytes_sent" else thousands


def _draw_line(axes: Axes, series: Series, x: np.ndarray) -> None:
    curve, style, gid = series.curve, series.style, f"line-{series.number}"
    if curve.has_band:  # pale: bands of several lines lie over each other
        axes.fill_between(x, curve.low, curve.high, color=style.light, alpha=0.16, lw=0, gid=gid)
    every = max(1, len(x) // 6)
    axes.plot(
        x, curve.mean, color=style.light, ls=style.dash, marker=style.marker, gid=gid,
        markevery=(every // 2, every), markeredgewidth=0, zorder=3,
    )  # fmt: skip


def _draw_points(axes: Axes, series: Series, *, joined: bool) -> None:
    curve, style = series.curve, series.style
    around = np.maximum(0, [curve.mean - curve.low, curve.high - curve.mean])
    axes.errorbar(
        curve.x["value"], curve.mean, yerr=around if curve.has_band else None,
        color=style.light, ls=style.dash if joined else "none", marker=style.marker,
        ms=4, markeredgewidth=0, elinewidth=0.9, capsize=1.5, zorder=3,
    )  # fmt: skip


def _settled(curve: Curve) -> Curve:
    """The curve without its first tenth, whose steep values would make all later values look
    equal."""
    start = len(curve.mean) // 10
    return Curve({}, curve.mean[start:], curve.low[start:], curve.high[start:])


def _fit(axes: Axes, curves: list[Curve], references: list[Reference]) -> None:
    """Set the y scale: logarithmic if the values span much, with room for the references' names."""
    values = [part for curve in curves for part in (curve.low, curve.high)]
    log = needs_log(values, ratio=6)
    every = np.concatenate(
        [*values, [end for reference in references for end in (reference.low, reference.high)]]
    )
    if log:
        every = every[every > 0]
        axes.set_ylim(every.min() / 1.15, every.max() * 1.15)
    else:
        margin = 0.06 * (np.ptp(every) or abs(every[0]) or 1.0)
        top = margin * (2 if references else 1)
        axes.set_ylim(every.min() - margin, every.max() + top)
    set_scale(axes, "y", log=log, shown=plain)


def _draw_references(axes: Axes, references: list[Reference]) -> None:
    for reference in references:
        style = reference.style
        colour, dash = (style.light, style.dash) if style else (MUTED, (0, (2, 2)))
        low, high = reference.low, reference.high
        axes.axhline(high, color=colour, ls=dash, lw=0.9, zorder=2)
        if low < high:
            axes.axhline(low, color=colour, ls=dash, lw=0.9, zorder=2)
        values = plain(low) if low == high else f"{plain(low)} to {plain(high)}"
        axes.annotate(
            f"{reference.label} {values}", (0, high),
            xycoords=("axes fraction", "data"), xytext=(3, 2.5), textcoords="offset points",
            size=6.8, color=colour,
        )  # fmt: skip


def _scale_by_values(axes: Axes, values: list[float]) -> None:
    """Put ticks at the values that were run, if there is room for them."""
    log = values[0] > 0 and values[-1] >= 8 * values[0]
    set_scale(axes, "x", log=log, shown=plain)
    if len(values) <= 8 and (log or len(values) <= 5):
        axes.set_xticks(values, [plain(value) for value in values])
    axes.margins(x=0.08)


def _file_legend(axes: Axes, series: list[Series]) -> None:
    legend = axes.legend(
        handles=[_handle(each) for each in series], loc="upper center", handlelength=2.6,
        bbox_to_anchor=(0.45, -0.16), ncols=min(4, len(series)), columnspacing=1.2,
    )  # fmt: skip
    legend.set_gid("file-only")


def _handle(series: Series) -> Line2D:
    style = series.style
    return Line2D(
        [], [], color=style.light, ls=style.dash, marker=style.marker, markeredgewidth=0,
        label=series.label,
    )  # fmt: skip


def _colours(series: list[Series]) -> dict[str, str]:
    return {each.style.light: f"var(--line-{each.number})" for each in series}

"""Figures of lines: curves along runs, speed-ups by quality, final values against a setting."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
from matplotlib.axes import Axes
from matplotlib.lines import Line2D

from palsgd.lab.report import formats
from palsgd.lab.report.canvas import (
    MUTED,
    WIDE,
    WIDTH,
    Plot,
    box,
    fit,
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

NOISE = THEME["noise"][0]
NAME_SHARE, NEAR_NAME = 0.3, 0.1  # of the axes: how wide the name of a level is, and how far off


@dataclass(frozen=True)
class Series:
    """A line of a plot: its number in the section, its curve and its style."""

    number: int
    label: str
    style: LineStyle
    curve: Curve
    stops: bool = False  # it could have gone on, and did not


@dataclass(frozen=True)
class Reference:
    """A horizontal line for comparison, or a band if the runs have different values."""

    label: str
    low: float
    high: float
    number: int | None = None  # of its line in the section, where it has one
    style: LineStyle | None = None

    @property
    def text(self) -> str:
        low, high = plain(self.low), plain(self.high)
        return f"{self.label} {low}" if low == high else f"{self.label} {low} to {high}"


def draw_curves(
    name: str,
    title: str,
    axis: str,
    series: list[Series],
    references: list[Reference],
    folder: Path | None,
    *,
    learning: bool,
    error: bool = False,
    wide: bool = False,
) -> Plot:
    """`learning`: the curves fall or rise to a level, and the y scale shows that level. `error`: on
    a log scale in any case."""
    unit, xlabel, shown = _x_format(axis, series)
    figure, axes = new_axes(title, xlabel, width=WIDE if wide else WIDTH)
    curves = [_settled(each.curve) if learning else each.curve for each in series]
    _fit_y(axes, curves, references, log=error)
    ends = np.array([float(each.curve.x[axis][-1]) / unit for each in series])
    log = axis == "bytes_sent" and needs_log([ends], ratio=8)
    if log:
        axes.set_xlim(ends[ends > 0].min() / 60, ends.max() * 1.3)
    else:
        axes.set_xlim(0, 1.02 * ends.max() or 1.0)
    set_scale(axes, "x", log=log, shown=shown)
    for each in series:
        _draw_line(axes, each, each.curve.x[axis] / unit, log=log)
    _draw_references(axes, references)
    _file_legend(axes, series)
    name_, _, form = AXES[axis]
    return publish(
        figure, name, title, _colours(series), folder, box=box(axes), y=scale(axes, "y"),
        x=scale(axes, "x") | {"unit": unit, "name": name_, "form": form},
    )  # fmt: skip


def draw_speed_ups(
    name: str,
    title: str,
    xlabel: str,
    series: list[Series],
    noise: Curve | None,
    target: float | None,
    folder: Path | None,
    *,
    falling: bool,
) -> Plot:
    """Against the level of quality, poor on the left. `falling`: less is better."""
    figure, axes = new_axes(title, f"{xlabel}, poor to good", width=WIDE)
    levels = np.concatenate([each.curve.x["level"] for each in series])
    means = np.concatenate([*(each.curve.mean for each in series), [1.0]])
    bands = [end for each in series for end in (each.curve.low, each.curve.high)]
    fit(axes, means, np.concatenate(bands), log=True)
    low, high = axes.get_ylim()
    axes.set_ylim(min(low, 0.8), max(high, 1.25))  # so that 1 is no edge
    if noise is not None:
        axes.fill_between(noise.x["level"], noise.low, noise.high, color=NOISE, lw=0, zorder=0)
    axes.axhline(1, color=MUTED, lw=0.9, zorder=2)
    log = bool(levels.min() > 0) and needs_log([levels], ratio=4)
    margin = (levels.max() / levels.min()) ** 0.03 if log else 0.03 * np.ptp(levels) or 1.0
    poor, good = (levels.max(), levels.min()) if falling else (levels.min(), levels.max())
    sign = 1 if falling else -1
    ends = (poor * margin, good / margin) if log else (poor + sign * margin, good - sign * margin)
    axes.set_xlim(*ends)
    if target is not None and min(ends) < target < max(ends):
        _draw_target(axes, target)
    for each in series:
        _draw_line(axes, each, each.curve.x["level"], log=log)
        if each.stops:
            _draw_end(axes, each)
    set_scale(axes, "x", log=log, shown=plain)
    set_scale(axes, "y", log=True, shown=lambda value: f"{plain(value)} x")
    _file_legend(axes, series)
    return publish(
        figure, name, title, _colours(series), folder,
        box=box(axes), y=scale(axes, "y") | {"form": "times"},
        x=scale(axes, "x") | {"unit": 1, "name": xlabel, "form": "digits"},
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
    _fit_y(axes, [each.curve for each in series], references)
    if ticks is not None:
        axes.set_xticks(range(len(ticks)), ticks)
        axes.set_xlim(-0.5, len(ticks) - 0.5)
    else:
        _scale_by_values(axes, sorted({x for each in series for x in each.curve.x["value"]}))
    _draw_references(axes, references)
    _file_legend(axes, [*series, *references])
    return publish(
        figure, name, title, _colours([*series, *references]), folder,
        box=box(axes), y=scale(axes, "y"),
        x=scale(axes, "x") | {"unit": 1, "ticks": ticks, "name": field, "form": "digits"},
    )  # fmt: skip


def _x_format(axis: str, series: list[Series]) -> tuple[float, str, Callable[[float], str]]:
    """The divisor of the x values, the label of the axis, and the format of its ticks."""
    _, label, form = AXES[axis]
    if form == "seconds":
        unit, word = formats.time_unit(max(float(each.curve.x[axis][-1]) for each in series))
        return unit, f"{label} ({word})", plain
    return 1.0, label, formats.size if form == "bytes" else thousands


def _draw_line(axes: Axes, series: Series, x: np.ndarray, *, log: bool) -> None:
    """Within limits that are set. On a log scale a point where nothing was spent has no place."""
    curve, style, gid = series.curve, series.style, f"line-{series.number}"
    there = x > 0 if log else np.isfinite(x)
    x, mean = x[there], curve.mean[there]
    if curve.has_band:  # pale: bands of several lines lie over each other
        low, high = np.clip([curve.low[there], curve.high[there]], -1e300, 1e300)
        axes.fill_between(x, low, high, color=style.light, alpha=0.16, lw=0, gid=gid)
    every = max(1, len(x) // 6)
    axes.plot(
        x, mean, color=style.light, ls=style.dash, marker=style.marker, gid=gid,
        markevery=(every // 2, every), markeredgewidth=0, zorder=3,
    )  # fmt: skip


def _draw_end(axes: Axes, series: Series) -> None:
    """A bar across the end of a line that goes no further."""
    curve, style = series.curve, series.style
    axes.plot(
        curve.x["level"][-1:], curve.mean[-1:], color=style.light, marker="|", ms=11,
        markeredgewidth=1.6, ls="none", gid=f"line-{series.number}", zorder=4,
    )  # fmt: skip


def _draw_target(axes: Axes, target: float) -> None:
    axes.axvline(target, color=MUTED, ls=(0, (2, 2)), lw=0.9, zorder=2)
    axes.annotate(
        f"target {plain(target)}", (target, 0), xycoords=("data", "axes fraction"), ha="right",
        xytext=(-3, 3), textcoords="offset points", size=7.4, color=MUTED,
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
    return Curve({}, curve.mean[start:], curve.low[start:], curve.high[start:], curve.n)


def _fit_y(
    axes: Axes, curves: list[Curve], references: list[Reference], *, log: bool = False
) -> None:
    """Logarithmic if the values span much, or are asked to be and can."""
    lines = [curve.mean for curve in curves]
    ends = np.array([end for each in references for end in (each.low, each.high)])
    means = np.concatenate([*lines, ends])
    log = bool(np.any(means > 0)) if log else needs_log(lines, ratio=6)
    bands = np.concatenate([end for curve in curves for end in (curve.low, curve.high)])
    fit(axes, means, bands, log=log)
    set_scale(axes, "y", log=log, shown=plain)


def _draw_references(axes: Axes, references: list[Reference]) -> None:
    """What the legend has no name for, the lines name themselves."""
    for reference in references:
        style = reference.style
        colour, dash = (style.light, style.dash) if style else (MUTED, (0, (2, 2)))
        for level in {reference.low, reference.high}:
            axes.axhline(level, color=colour, ls=dash, lw=0.9, zorder=2)
    _name_levels(axes, [each for each in references if each.style is None])


def _name_levels(axes: Axes, references: list[Reference]) -> None:
    """At the end where fewer curves pass. The lowest of several has its name below it, as the next
    may be near."""
    side = _freer_side(axes, [each.high for each in references])
    for reference in references:
        below = len(references) > 1 and reference.low == min(each.low for each in references)
        axes.annotate(
            reference.text, (float(side == "right"), reference.low if below else reference.high),
            xycoords=("axes fraction", "data"), ha=side, va="top" if below else "bottom",
            xytext=(3 if side == "left" else -3, -2.5 if below else 2.5),
            textcoords="offset points", size=7.4, color=MUTED,
        )  # fmt: skip


def _freer_side(axes: Axes, levels: list[float]) -> Literal["left", "right"]:
    """The end of lines across the axes where fewer points of curves are near."""
    curves = [line.get_xydata() for line in axes.lines if line.get_gid()]
    if not curves or not levels:
        return "left"
    in_axes = axes.transData - axes.transAxes
    x, y = in_axes.transform(np.concatenate(curves)).T
    heights = in_axes.transform([(axes.get_xlim()[1], level) for level in levels])[:, 1]
    near = np.abs(y[:, None] - heights).min(axis=1) < NEAR_NAME
    at_right, at_left = near & (x > 1 - NAME_SHARE), near & (x < NAME_SHARE)
    return "right" if at_right.sum() < at_left.sum() else "left"


def _scale_by_values(axes: Axes, values: list[float]) -> None:
    """Put ticks at the values that were run, if there is room for them."""
    log = values[0] > 0 and values[-1] >= 8 * values[0]
    set_scale(axes, "x", log=log, shown=plain)
    if len(values) <= 8 and (log or len(values) <= 5):
        axes.set_xticks(values, [plain(value) for value in values])
    axes.margins(x=0.08)


def _file_legend(axes: Axes, lines: Sequence[Series | Reference]) -> None:
    """Of as many columns as do not make the plot look small."""
    handles = list(map(_handle, lines))
    column = 0.45 + 0.052 * max(len(str(each.get_label())) for each in handles)
    legend = axes.legend(
        handles=handles, loc="upper center", handlelength=2.6, bbox_to_anchor=(0.45, -0.16),
        columnspacing=1.2, ncols=max(1, min(4, len(handles), int(2 * WIDTH / column))),
    )  # fmt: skip
    legend.set_gid("file-only")


def _handle(line: Series | Reference) -> Line2D:
    style = line.style
    assert style is not None
    marker, label = ("", line.text) if isinstance(line, Reference) else (style.marker, line.label)
    return Line2D(
        [], [], color=style.light, ls=style.dash, marker=marker, markeredgewidth=0, label=label
    )


def _colours(lines: Sequence[Series | Reference]) -> dict[str, str]:
    return {each.style.light: f"var(--line-{each.number})" for each in lines if each.style}


def points(series: Series) -> dict[str, Any]:
    """What the page's script shows of a line."""
    curve = series.curve
    found: dict[str, Any] = {"line": series.number, "label": series.label, "n": curve.n}
    found["x"] = {key: _shortened(x) for key, x in curve.x.items()}
    found["mean"] = _shortened(curve.mean)
    if curve.has_band:
        found |= {"low": _shortened(curve.low), "high": _shortened(curve.high)}
    return found


def _shortened(values: np.ndarray) -> list[float | None]:
    return [formats.short(value) for value in values]

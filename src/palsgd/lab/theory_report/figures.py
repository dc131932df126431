"""One figure for each study, in the report's style."""

import math
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes

from palsgd.lab.report.canvas import MUTED, Plot, new_axes, plain, publish, set_scale
from palsgd.lab.report.styles import LineStyle
from palsgd.theory.studies import Exponent, Line, Study

LINE_STYLES = [
    LineStyle("#d55e00", "#ff9152", "-", "o"),
    LineStyle("#0072b2", "#5cb8f2", (0, (5, 1.8)), "s"),
    LineStyle("#009e73", "#40c99b", (0, (1, 1.6)), "D"),
    LineStyle("#a8437f", "#e79ac6", (0, (6, 1.5, 1, 1.5)), "^"),
]
_COLOURS = {style.light: f"var(--line-{number})" for number, style in enumerate(LINE_STYLES)}


def draw(study: Study, folder: Path | None) -> Plot:
    figure, axes = new_axes(study.title, study.xlabel, height=2.85)
    for line, style in zip(study.lines, LINE_STYLES, strict=False):
        _draw_line(axes, line, style, joined=not study.names)
        if study.show_bound and _few(line):
            _draw_bound(axes, line, style)
    if study.exponents and study.log_x:
        _draw_claim(axes, study.lines, study.exponents[0])
    _scale_y(axes, study)
    if study.names:
        axes.set_xticks(range(len(study.names)), study.names)
        axes.set_xlim(-0.5, len(study.names) - 0.5)
    else:
        _scale_x(axes, study)
    axes.legend(loc="best", fontsize=6.6, handlelength=2.4, labelspacing=0.3)
    return publish(figure, f"theory-{study.name}", study.title, _COLOURS, folder)


def _draw_line(axes: Axes, line: Line, style: LineStyle, *, joined: bool) -> None:
    mean = np.array([each.mean for each in line.measured])
    half = np.array([each.half() for each in line.measured])
    shown: Any = dict(color=style.light, ls=style.dash if joined else "none", label=line.label)
    if _few(line):
        axes.errorbar(line.x, mean, yerr=half, marker=style.marker, ms=4, markeredgewidth=0,
                      elinewidth=0.9, capsize=1.5, zorder=3, **shown)  # fmt: skip
    else:
        axes.fill_between(line.x, mean - half, mean + half, color=style.light, alpha=0.16, lw=0)
        axes.plot(line.x, mean, zorder=3, **shown)


def _draw_bound(axes: Axes, line: Line, style: LineStyle) -> None:
    if line.bound is not None:
        axes.plot(line.x, line.bound, color=style.light, lw=0.8, ls=(0, (1, 2)),
                  label=f"{line.label}: bound", zorder=2)  # fmt: skip


def _few(line: Line) -> bool:
    """Points that are shown one by one."""
    return len(line.x) <= 10


def _draw_claim(axes: Axes, lines: list[Line], exponent: Exponent) -> None:
    """The claimed slope, through the middle of the points it is measured on."""
    line = lines[-1]
    x = np.array(line.x)
    y = np.array([each.mean for each in line.measured])
    middle = math.exp(np.log(x).mean()), math.exp(np.log(y).mean())
    axes.plot(x, middle[1] * (x / middle[0]) ** exponent.claimed, color=MUTED, lw=0.8, zorder=1,
              label=f"slope {exponent.claimed:g} (claimed)")  # fmt: skip


def _scale_x(axes: Axes, study: Study) -> None:
    x = sorted({value for line in study.lines for value in line.x})
    set_scale(axes, "x", log=study.log_x, shown=_short)
    if study.log_x and len(x) <= 6:
        axes.set_xticks(x, [_short(value) for value in x])


def _scale_y(axes: Axes, study: Study) -> None:
    values = [each.mean for line in study.lines for each in line.measured]
    if study.show_bound:
        values += [value for line in study.lines for value in line.bound or () if _few(line)]
    positive = [value for value in values if math.isfinite(value) and value > 0]
    if positive:
        axes.set_ylim(min(positive) / 1.6, max(positive) * 1.6)
        set_scale(axes, "y", log=True, shown=_power)


def _short(value: float) -> str:
    return f"{value / 1000:.3g}k" if value >= 10_000 else plain(value)


def _power(value: float) -> str:
    if 0.01 <= value < 1e5:
        return plain(value)
    return f"{value:.0e}".replace("e-0", "e-").replace("e+", "e")

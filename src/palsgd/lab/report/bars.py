"""Figures of bars: what each worker did when, and where the time of each method goes."""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.patches import PathPatch
from matplotlib.path import Path as Outline

from palsgd.lab.report import formats
from palsgd.lab.report.canvas import INK, WIDE, Plot, box, new_axes, placed, plain, publish
from palsgd.lab.report.styles import THEME
from palsgd.lab.report.timelines import KINDS, Bar
from palsgd.lab.timing.pace import PARTS

PART_COLOURS = dict(zip(PARTS, ("gradient", "mixing", "wait", "sync"), strict=True))
_ROW, _HEAD = 0.16, 0.2  # inches of a worker, and of the name above its workers


def draw_timelines(
    name: str, title: str, methods: Mapping[str, Mapping[int, list[Bar]]], folder: Path | None
) -> Plot:
    """A bar per worker, under the name of its method; times start at zero, and all have one axis.
    It ends where the longest does, but not beyond three times the shortest, which would be too
    small to be read."""
    ends = [
        max(stop for bars in workers.values() for _, _, stop in bars)
        for workers in methods.values()
    ]
    end = min(max(ends), 3 * min(ends))
    unit, word = (1e-3, "ms") if end < 1 else formats.time_unit(end)
    rows = sum(len(workers) for workers in methods.values())
    names = len(methods) if len(methods) > 1 else 0
    height = 0.76 + _ROW * rows + _HEAD * names
    figure, axes = new_axes(title, f"time ({word})", height=height, width=WIDE, left=0.3)
    ticks, reading, at = [], [], 0.0
    for label, workers in methods.items():
        if names:
            at += _HEAD / _ROW
            axes.text(0, at - 0.6, label, size=7.2, color=INK, va="bottom")
        for worker, bars in workers.items():
            shown = [(kind, a, min(b, end)) for kind, a, b in bars if a < end]
            _draw_row(axes, at, shown, unit)
            title_ = ", ".join(filter(None, [label, f"worker {worker}"]))
            reading.append((title_, at, _cells(shown, end)))
            ticks.append((at, str(worker)))
            at += 1
    axes.set_xlim(0, end / unit or 1.0)
    axes.set_ylim(at - 0.5, -0.5)
    axes.set_yticks([at for at, _ in ticks], [text for _, text in ticks])
    _without_frame(axes)
    return publish(figure, name, title, {}, folder, box=box(axes), rows=placed(axes, reading, 0.5))


def draw_spent(
    name: str, title: str, spent: Mapping[str, Mapping[str, float]], folder: Path | None
) -> Plot:
    """One stacked bar per method: seconds by what they went into."""
    end = max(sum(parts.values()) for parts in spent.values())
    unit, word = (1e-3, "ms") if end < 1 else formats.time_unit(end)
    figure, axes = new_axes(title, word, height=0.76 + 0.4 * len(spent), width=WIDE, left=0.12)
    reading = []
    for row, (label, parts) in enumerate(spent.items()):
        at, bars = 0.0, []
        for part in PARTS:
            bars.append((part, at, at + parts[part]))
            at += parts[part]
        for part, a, b in bars:
            axes.add_patch(_bars([(a / unit, b / unit)], row + 0.15, PART_COLOURS[part], 0.2, 0))
        axes.text(0, row - 0.14, label, size=7.2, color=INK, va="bottom")
        cells = [
            [a / end, b / end, part, f"{formats.seconds(b - a)} ({formats.percent((b - a) / at)})",
             PART_COLOURS[part]]
            for part, a, b in bars if b > a
        ]  # fmt: skip
        reading.append((label, row + 0.15, cells))
    axes.set_xlim(0, end / unit or 1.0)
    axes.set_ylim(len(spent) - 0.5, -0.6)
    axes.set_yticks([])
    _without_frame(axes)
    return publish(figure, name, title, {}, folder, box=box(axes), rows=placed(axes, reading, 0.25))


def _draw_row(axes: Axes, row: float, bars: Iterable[Bar], unit: float) -> None:
    bars = list(bars)
    for kind in KINDS:
        spans = [(a / unit, b / unit) for what, a, b in bars if what == kind]
        if spans:
            half = 0.36 if kind == "mixing" else 0.3
            width = {"mixing": 0.7, "sync": 0.5}.get(kind, 0.0)
            axes.add_patch(_bars(spans, row, kind, half, width))


def _bars(
    spans: list[tuple[float, float]], row: float, colour: str, half: float, width: float
) -> PathPatch:
    """All bars of a kind as one path. The outline of mixing steps makes them visible, although they
    take no time."""
    bars = [
        Outline(
            [(a, row - half), (b, row - half), (b, row + half), (a, row + half), (a, 0)],
            closed=True,
        )
        for a, b in spans
    ]
    fill = THEME[colour][0]
    return PathPatch(Outline.make_compound_path(*bars), fc=fill, ec=fill, lw=width)


def _cells(bars: list[Bar], end: float) -> list[list[Any]]:
    return [
        [a / end, b / end, kind, f"{formats.seconds(b - a)}, from {formats.seconds(a)}", kind]
        for kind, a, b in bars
    ]


def _without_frame(axes: Axes) -> None:
    axes.grid(False)
    axes.spines["left"].set_visible(False)
    axes.xaxis.set_major_formatter(lambda value, _: plain(value))

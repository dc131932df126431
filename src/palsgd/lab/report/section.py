"""The section of the page about the runs of one workload."""

import json
import math
import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np

from palsgd import references
from palsgd.lab.comparison import Comparison
from palsgd.lab.groups import Group, group, named, shown, sortable
from palsgd.lab.report.ablations import Ablation, ablations, final
from palsgd.lab.report.canvas import Plot
from palsgd.lab.report.curves import AXES, average
from palsgd.lab.report.figures import (
    Reference,
    Series,
    draw_ablation,
    draw_curves,
    draw_timeline,
)
from palsgd.lab.report.styles import LineStyle, line_styles
from palsgd.lab.report.tables import (
    Table,
    cost_table,
    final_table,
    settings_table,
    target_table,
)
from palsgd.lab.report.timelines import KINDS, bars, shares
from palsgd.lab.run_folder import Run
from palsgd.lab.timing.pace import NO_LINK

_POINTS = 300  # points of a curve; fewer if there are many curves
_TIMELINES = 8


@dataclass(frozen=True)
class Panel:
    """A place for a figure, with a variant for each position of its switch."""

    title: str
    switch: str
    variants: dict[str, Plot]
    caption: str = ""
    legend: list[tuple[int, str]] = field(
        default_factory=list
    )  # where the section's does not serve


class Section:
    """One section. The template shows its attributes."""

    def __init__(self, number: int, runs: list[Run], figures: Path | None, link: str | None = None):
        self.number, self.runs, self.figures = number, runs, figures
        self.points: dict[str, Any] = {}  # what the tooltips show
        self.workload = references.short(self.runs[0].workload)
        self.metric = str(self.runs[0].config.get("metric") or "metric")
        self.groups: list[Group] = group(self.runs)
        self.line_styles: list[LineStyle] = line_styles(self.groups)
        self.labels = [each.label for each in self.groups]
        self.comparison = Comparison(self.groups, link)
        words = dict(zip(AXES, ("steps", "gradients", "time", "bytes"), strict=True))
        if not all(self.comparison.paces.values()):
            del words["time_s"]  # nobody knows their seconds
        self.switches = {"axis": words}
        self.curves = [self._panel(key) for key in ("loss", "metric", "train_loss")]
        self.rounds = [self._panel(key) for key in ("distance", "agreement")]
        self.ablations = [self._ablation(each) for each in ablations(self.groups)]
        self.timelines = list(self._timelines())

    @property
    def to_target(self) -> Table | None:
        return target_table(self.comparison, self.metric)

    @property
    def tables(self) -> list[Table]:
        found = [final_table(self.comparison, self.metric), cost_table(self.comparison)]
        return [table for table in found if table.rows]

    @property
    def settings(self) -> Table | None:
        return settings_table(self.groups)

    @property
    def all_settings(self) -> list[tuple[str, str]]:
        """Every key of config.yaml, with each value that occurs."""
        keys = dict.fromkeys(key for run in self.runs for key in run.config)
        return [(key, self._values(key)) for key in keys]

    @property
    def facts(self) -> list[tuple[str, str]]:
        return [
            ("runs", str(len(self.runs))),
            ("workers", self._values("workers")),
            ("run as", self._run_as()),
            ("machine", self._values("device")),
            ("parameters", self._values("parameters")),
            ("steps", self._values("steps")),
            ("seeds", self._values("seed")),
            ("versions", f"palsgd {self._values('palsgd')}, torch {self._values('torch')}"),
        ]

    @property
    def findings(self) -> list[str]:
        return self.comparison.verdicts

    @property
    def notes(self) -> list[str]:
        notes = [f"{run.name}: {note}." for run in self.runs for note in run.notes]
        for run in self.runs:
            if not run.finished:
                at = f"step {run.lines[-1]['step']:,}" if run.lines else "no line yet"
                notes.append(
                    f"{run.name}: unfinished ({at}); its curves are shown, no final values."
                )
        clusters = dict.fromkeys(run.config.get("cluster") for run in self.runs)
        for cluster in filter(None, clusters):
            notes.append(
                f"Simulated, and time is that of a model of the cluster {cluster}: a projection, "
                "no measurement. Steps, gradients and bytes are what real workers would count."
            )
        if any(run.config.get("simulated") and not run.config.get("cluster") for run in self.runs):
            notes.append(
                "Simulated: one process did the work of all workers, so there are no seconds of a "
                f"cluster ({NO_LINK}). Steps, gradients and bytes are what real workers would "
                "count."
            )
        return notes

    def _values(self, key: str) -> str:
        values = sorted((run.config.get(key) for run in self.runs), key=sortable)
        return ", ".join(dict.fromkeys(map(_text, values)))

    def _run_as(self) -> str:
        engines = {
            f"simulated in one process ({run.config.get('engine')})"
            if run.config.get("simulated")
            else "real processes"
            for run in self.runs
        }
        return ", ".join(sorted(engines))

    # --- figures

    def _panel(self, quantity: str) -> Panel | None:
        series = list(self._series(quantity))
        if not series:
            return None
        title = self._title(quantity)
        self.points[quantity] = [_points(each) for each in series]
        references = self._references(quantity)
        draw = partial(draw_curves, learning=quantity in ("loss", "metric", "train_loss"))
        variants = {
            axis: self._plot(draw, f"{quantity}-{axis}", title, axis, series, references)
            for axis in self.switches["axis"]
        }
        for axis, plot in variants.items():
            plot.reading |= {"points": quantity, "axis": axis}
        return Panel(title, "axis", variants, self._caption(quantity, series))

    def _series(self, quantity: str) -> Iterable[Series]:
        points = max(60, min(_POINTS, 6 * _POINTS // len(self.groups)))
        for number, each in enumerate(self.groups):
            curve = average(each.runs, quantity, points=points, pace=self.comparison.paces[each])
            if curve is not None:
                yield Series(number, each.label, self.line_styles[number], curve)

    def _plot(self, draw: Any, name: str, *arguments: Any) -> Plot:
        prefix = f"{self.number + 1}-" if self.number else ""
        # the name becomes a file's name, and parts of it come from files
        safe = re.sub(r"[^\w-]+", "_", prefix + name)
        return draw(safe, *arguments, self.figures)

    def _title(self, quantity: str) -> str:
        return {
            "loss": "Validation loss",
            "metric": f"Validation {self.metric}",
            "train_loss": "Training loss",
            "distance": "Distance to the anchor",
            "agreement": "Agreement of outer gradients",
        }[quantity]

    def _caption(self, quantity: str, series: list[Series]) -> str:
        over = [
            *(["workers"] if quantity == "distance" else []),
            *(["runs"] if any(len(each.runs) > 1 for each in self.groups) else []),
        ]
        if not over or not any(each.curve.has_band for each in series):
            return ""
        return f"Line: mean over {' and '.join(over)}. Band: lowest to highest."

    def _references(self, quantity: str) -> list[Reference]:
        if quantity == "loss":
            known = (run.config.get("floor") for run in self.runs)
            floors = _reference("floor", [float(floor) for floor in known if floor is not None])
            return [*floors, *self._targets(quantity)]
        return self._targets(quantity)

    def _targets(self, quantity: str) -> list[Reference]:
        targets = {self.comparison.target_of(each) for each in self.groups}
        values = [each.value for each in targets if each is not None and each.on == quantity]
        return _reference("target", values)

    def _ablation(self, ablation: Ablation) -> Panel:
        self.switches["final"] = {"metric": self.metric, "loss": "loss"}
        first = len(self.line_styles)
        self.line_styles += line_styles(ablation.bundles)
        variants = {}
        for key in ("metric", "loss"):
            name = f"by-{ablation.field}-{key}"
            plot = self._ablation_plot(ablation, key, name, first)
            if plot is not None:
                plot.reading |= {"points": name, "axis": "value", "name": named(ablation.field)}
                variants[key] = plot
        legend = [(first + at, bundle.label) for at, bundle in enumerate(ablation.bundles)]
        return Panel(f"by {named(ablation.field)}", "final", variants, "", legend)

    def _ablation_plot(self, ablation: Ablation, key: str, name: str, first: int) -> Plot | None:
        series = [
            Series(first + at, bundle.label, self.line_styles[first + at], curve)
            for at, bundle in enumerate(ablation.bundles)
            if (curve := ablation.curve(bundle, key)) is not None
        ]
        if not series:
            return None
        self.points[name] = [_points(each) for each in series]
        title = f"Final {self.metric if key == 'metric' else 'loss'} by {named(ablation.field)}"
        xlabel = named(ablation.field)
        if ablation.moved:
            xlabel += f" (with it: {', '.join(named(each) for each in ablation.moved[:3])})"
        references = list(self._beside(ablation, key))
        return self._plot(draw_ablation, name, title, xlabel, ablation.ticks, series, references)

    def _beside(self, ablation: Ablation, key: str) -> Iterable[Reference]:
        for each in ablation.beside[:4]:
            values = [v for run in each.runs if (v := final(run, key)) is not None]
            if values:
                value = fmean(values)
                yield Reference(each.label, value, value, self.line_styles[self.groups.index(each)])

    def _timelines(self) -> Iterable[Panel]:
        """The timelines of the first run of each group that recorded one."""
        for number, each in enumerate(self.groups[:_TIMELINES]):
            spans = next((spans for run in each.runs if (spans := run.folder.timeline())), None)
            if spans is None:
                continue
            workers = bars(spans)
            plot = self._plot(draw_timeline, f"timeline-{number}", each.label, workers)
            plot.reading["timeline"] = [
                [[kind, _short(start), _short(end)] for kind, start, end in worker]
                for worker in workers.values()
            ]
            yield Panel(each.label, "", {"": plot}, shares(spans))

    @property
    def kinds(self) -> list[str]:
        """The kinds of spans that the timelines show."""
        plots = [plot for panel in self.timelines for plot in panel.variants.values()]
        every = [bar for plot in plots for worker in plot.reading["timeline"] for bar in worker]
        return [kind for kind in KINDS if any(bar[0] == kind for bar in every)]

    @property
    def data(self) -> str:
        """The data of the page's script as JSON, with `<` escaped, so that it cannot end the script
        element."""
        return _json({"labels": self.labels, "points": self.points})

    def reading(self, plot: Plot) -> str:
        return _json(plot.reading)


def _reference(name: str, values: list[float]) -> list[Reference]:
    return [Reference(name, min(values), max(values))] if values else []


def _points(series: Series) -> dict[str, Any]:
    curve = series.curve
    points: dict[str, Any] = {"line": series.number, "label": series.label}
    points["x"] = {key: _shortened(x) for key, x in curve.x.items()}
    points["mean"] = _shortened(curve.mean)
    if curve.has_band:
        points |= {"low": _shortened(curve.low), "high": _shortened(curve.high)}
    return points


def _shortened(values: np.ndarray) -> list[float]:
    return [_short(value) for value in values]


def _short(value: float) -> float:
    """Six digits; counts stay whole."""
    value = float(value)
    if value.is_integer():
        return int(value)
    return float(f"{value:.6g}") if math.isfinite(value) else 0.0


def _json(value: Any) -> str:
    text = json.dumps(value, separators=(",", ":"), ensure_ascii=False, allow_nan=False)
    return text.replace("<", "\\u003c")


def _text(value: Any) -> str:
    return f"{value:,}" if isinstance(value, int) and value >= 10_000 else shown(value)

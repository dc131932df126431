"""The section of the page about the runs of one workload."""

import json
import re
from collections.abc import Iterable
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np

from palsgd import references
from palsgd.lab.comparison import Comparison
from palsgd.lab.groups import Group, group, named
from palsgd.lab.judging.robustness import FIELDS
from palsgd.lab.report import formats
from palsgd.lab.report.ablations import Ablation, ablations, all_there, final
from palsgd.lab.report.about import facts, notes, values_of
from palsgd.lab.report.canvas import Plot
from palsgd.lab.report.curves import AXES, average
from palsgd.lab.report.drawn import drawn, drawn_beside, drawn_bundles
from palsgd.lab.report.figures import (
    Reference,
    Series,
    draw_ablation,
    draw_curves,
    draw_speed_ups,
    points,
)
from palsgd.lab.report.heat_maps import SHADES, best_of, draw_heat_map, heat_maps, in_words
from palsgd.lab.report.panel import Panel
from palsgd.lab.report.speedups import QualityUnit, noise_line, speed_lines
from palsgd.lab.report.styles import LineStyle, line_styles
from palsgd.lab.report.tables import Table, final_table, settings_table, target_table, twin_table
from palsgd.lab.report.time_panels import spent, timelines
from palsgd.lab.run_folder import Run
from palsgd.lab.timing.pace import NO_LINK
from palsgd.lab.verdicts import judged

_POINTS = 300  # points of a curve; fewer if there are many curves
_MAPS = 12


class Section:
    """One section. The template shows its attributes."""

    def __init__(self, number: int, runs: list[Run], figures: Path | None, link: str | None = None):
        self.number, self.runs, self.figures = number, runs, figures
        self.points: dict[str, Any] = {}  # what the tooltips show
        self.workload = references.short(runs[0].workload)
        self.metric = str(runs[0].config.get("metric") or "metric")
        self.groups: list[Group] = group(runs)
        self.line_styles: list[LineStyle] = line_styles(self.groups)
        self.labels = [each.label for each in self.groups]
        self.comparison = Comparison(self.groups, link)
        self.drawn: list[Group] = drawn(self.comparison)
        self.unit = QualityUnit(self.comparison)
        timed = any(pace is not None for pace in self.comparison.paces.values())
        known = [axis for axis in AXES if timed or axis != "time_s"]
        self.switches = {"axis": {axis: AXES[axis][0] for axis in known}}
        first, *others = self._quantities()
        self.main = list(filter(None, [self._speed_ups(), self._panel(first, wide=True)]))
        self.curves = list(filter(None, map(self._panel, others)))
        self.maps = list(self._maps())
        self.ablations = list(self._ablations())
        time = spent(self.comparison, self._plot), timelines(self.groups, self._plot)
        self.time = list(filter(None, time))
        self.facts, self.notes = facts(runs), notes(runs)

    def _quantities(self) -> list[str]:
        """The judged quality first."""
        metric = "error" if self._is_share() else "metric"
        found = ["loss", metric, "train_loss", "distance", "agreement"]
        judged_on = metric if self.comparison.quality.on == "metric" else "loss"
        return sorted(found, key=lambda quantity: quantity != judged_on)

    def _is_share(self) -> bool:
        """Is the metric one of which more is better, and 1 the best?"""
        every = [line["metric"] for run in self.runs for line in run.evaluations]
        higher = bool(self.runs[0].config.get("higher_is_better"))
        return higher and all(0 <= value <= 1 for value in every if np.isfinite(value))

    @property
    def legend(self) -> list[tuple[int, str]]:
        """The lines of the curves, by their numbers."""
        return [(self.groups.index(each), each.label) for each in self.drawn]

    @property
    def headline(self) -> str | None:
        return self.comparison.headline

    @property
    def findings(self) -> list[str]:
        return self.comparison.verdicts

    @property
    def tables(self) -> list[Table]:
        found = [
            target_table(self.comparison),
            final_table(self.comparison, self.metric),
            twin_table(self.comparison),
            settings_table(self.groups),
        ]
        return [table for table in found if table is not None]

    @property
    def all_settings(self) -> list[tuple[str, str]]:
        """Every key of config.yaml, with each value that occurs."""
        keys = dict.fromkeys(key for run in self.runs for key in run.config)
        return [(key, values_of(self.runs, key)) for key in keys]

    # --- curves

    def _panel(self, quantity: str, *, wide: bool = False) -> Panel | None:
        series = list(self._series(quantity))
        if not series:
            return None
        title = self._title(quantity)
        self.points[quantity] = [points(each) for each in series]
        draw = partial(
            draw_curves,
            learning=quantity in ("loss", "error", "metric", "train_loss"),
            error=quantity == "error",
            wide=wide,
        )
        variants = {}
        for axis in self.switches["axis"]:
            if there := [each for each in series if axis in each.curve.x]:
                name, marks = f"{quantity}-{axis}", self._references(quantity)
                variants[axis] = self._plot(draw, name, title, axis, there, marks)
                variants[axis].reading |= {"points": quantity, "axis": axis}
        return Panel(title, "axis", variants, _caption([each.curve.n for each in series]))

    def _series(self, quantity: str) -> Iterable[Series]:
        number_of_points = max(60, min(_POINTS, 6 * _POINTS // len(self.drawn)))
        for each in self.drawn:
            pace, number = self.comparison.paces[each], self.groups.index(each)
            curve = average(each.runs, quantity, points=number_of_points, pace=pace)
            if curve is not None:
                yield Series(number, each.label, self.line_styles[number], curve)

    def _title(self, quantity: str) -> str:
        return {
            "loss": "Validation loss",
            "metric": f"Validation {self.metric}",
            "error": f"Validation error (1 - {self.metric})",
            "train_loss": "Training loss",
            "distance": "Distance to the anchor when a sync begins",
            "agreement": "Cosine of outer gradients with their mean",
        }[quantity]

    def _references(self, quantity: str) -> list[Reference]:
        found = []
        if quantity == "loss":
            known = (run.config.get("floor") for run in self.runs)
            found += _reference("floor", [float(floor) for floor in known if floor is not None])
        targets = [self.comparison.target_of(each) for each in self.groups]
        on = "metric" if quantity == "error" else quantity
        values = [each.value for each in targets if each is not None and each.on == on]
        values = [1 - value for value in values] if quantity == "error" else values
        return found + _reference("target", values)

    # --- the main figure

    def _speed_ups(self) -> Panel | None:
        variants, title = {}, f"Speed-up against {self.unit.name}"
        for axis in self.switches["axis"]:
            plot = self._speed_up(axis)
            if plot is not None:
                variants[axis] = plot
        if not variants:
            return None
        caption = (
            f"What the baseline spends until it is at this {self.unit.name}, divided by what a "
            "method spends: above 1 a method is ahead. A bar across the end of a line: the method "
            "stops, the baseline goes further. Left out is what a method reaches in its warm-up, "
            f"until when it is the baseline. {self._bands()}"
        )
        if "time_s" not in variants:
            caption += f" No seconds are known: {NO_LINK}."
        return Panel(title, "axis", variants, caption)

    def _speed_up(self, axis: str) -> Plot | None:
        groups = [each for each in judged(self.comparison) if each in self.drawn]
        lines = speed_lines(self.comparison, groups, axis, self.unit)
        if not lines:
            return None
        series = []
        for line in lines:
            number = self.groups.index(line.group)
            style = self.line_styles[number]
            series.append(Series(number, line.group.label, style, line.curve, line.stops))
        base = self.comparison.baseline(lines[0].group)
        assert base is not None
        levels = np.concatenate([line.curve.x["level"] for line in lines])
        noise = noise_line(self.comparison, base, axis, levels, self.unit)
        target = self.comparison.target
        level = None
        if target is not None:
            level = float(self.unit.shown(np.array(self.comparison.quality.sign * target.value)))
        name, word = f"speed-up-{axis}", AXES[axis][0]
        title = f"Speed-up by {self.unit.name}: {base.label}'s {word} / the method's"
        self.points[name] = [points(each) for each in series]
        draw = partial(draw_speed_ups, falling=self.unit.falling)
        plot = self._plot(draw, name, title, self.unit.name, series, noise, level)
        plot.reading |= {"points": name, "axis": "level"}
        return plot

    def _bands(self) -> str:
        counts = [len(each.seeds) for each in self.groups]
        if max(counts) == 1:
            return "One seed: no bands."
        return (
            f"Bands: 95% bootstrap over pairs of seeds, {formats.seeds(counts)}; grey: one half of "
            "the baseline's seeds against the other."
        )

    # --- grids and ablations

    @property
    def _varied(self) -> list[Group]:
        """Groups that are settings of a method, and no controls."""
        return [each for each in self.groups if each.given_name is None]

    def _maps(self) -> Iterable[Panel]:
        maps = heat_maps(self._varied)
        self.shades = [(f"heat-{at}", words) for at, (_, words, _) in enumerate(SHADES)]
        best = best_of(maps) if maps else 0.0
        for number, each in enumerate(maps[:_MAPS]):
            plot = self._plot(draw_heat_map, f"map-{number}", each, best)
            yield Panel(each.label, "", {"": plot}, in_words(each, best))

    def _ablations(self) -> Iterable[Panel]:
        """What the maps show is not shown again."""
        for each in ablations(self._varied, without=FIELDS if self.maps else ()):
            yield self._ablation(each)

    def _ablation(self, ablation: Ablation) -> Panel:
        self.switches["final"] = {"metric": self.metric, "loss": "loss"}
        bundles = drawn_bundles(self.comparison, ablation)
        first = len(self.line_styles)
        self.line_styles += line_styles(bundles)
        numbered = list(enumerate(bundles, first))
        variants = {}
        for key in ("metric", "loss"):
            name = f"by-{ablation.field}-{key}"
            plot = self._ablation_plot(ablation, numbered, key, name)
            if plot is not None:
                plot.reading |= {"points": name, "axis": "value"}
                variants[key] = plot
        beside = drawn_beside(self.comparison, ablation)
        lines = [*numbered, *((self.groups.index(each), each) for each in beside)]
        legend = [(number, each.label) for number, each in lines]
        caption = self._left_out(ablation, len(bundles), len(beside))
        return Panel(f"by {named(ablation.field)}", "final", variants, caption, legend)

    def _left_out(self, ablation: Ablation, lines: int, flat: int) -> str:
        """Which settings have lines where not all have."""
        best, words = f"those that end at the best {self.comparison.quality.name}", []
        if lines < (every := len(ablation.bundles)):
            words.append(f"Lines of {lines} of {every} settings: {best}, at any value.")
        if flat < (every := len(ablation.beside)):
            words.append(f"Flat lines of {flat} of {every}: of what a line is like, {best}.")
        return " ".join(words)

    def _ablation_plot(
        self, ablation: Ablation, numbered: list[tuple[int, Group]], key: str, name: str
    ) -> Plot | None:
        series = [
            Series(number, bundle.label, self.line_styles[number], curve)
            for number, bundle in numbered
            if (curve := ablation.curve(bundle, key)) is not None
        ]
        if not series:
            return None
        self.points[name] = [points(each) for each in series]
        title = f"Final {self.metric if key == 'metric' else 'loss'} by {named(ablation.field)}"
        xlabel = named(ablation.field)
        if ablation.moved:
            xlabel += f" (with it: {', '.join(named(each) for each in ablation.moved[:3])})"
        beside = list(self._beside(ablation, key))
        return self._plot(draw_ablation, name, title, xlabel, ablation.ticks, series, beside)

    def _beside(self, ablation: Ablation, key: str) -> Iterable[Reference]:
        for each in drawn_beside(self.comparison, ablation):
            if values := all_there(final(run, key) for run in each.finished):
                value, number = fmean(values), self.groups.index(each)
                yield Reference(each.label, value, value, number, self.line_styles[number])

    # --- for the template

    def _plot(self, draw: Any, name: str, *arguments: Any) -> Plot:
        prefix = f"{self.number + 1}-" if self.number else ""
        # the name becomes a file's name, and parts of it come from files
        safe = re.sub(r"[^\w-]+", "_", prefix + name)
        return draw(safe, *arguments, self.figures)

    @property
    def data(self) -> str:
        """The data of the page's script as JSON, with `<` escaped, so that it cannot end the script
        element."""
        return _json({"labels": self.labels, "points": self.points})

    def reading(self, plot: Plot) -> str:
        return _json(plot.reading)


def _reference(name: str, values: list[float]) -> list[Reference]:
    return [Reference(name, min(values), max(values))] if values else []


def _caption(counts: list[int]) -> str:
    """Of how many seeds the lines are, and what the bands are."""
    if max(counts) == 1:
        return "One seed: no interval."
    return f"Means over {formats.seeds(counts)}; bands: 95% t interval of the mean."


def _json(value: Any) -> str:
    text = json.dumps(value, separators=(",", ":"), ensure_ascii=False, allow_nan=False)
    return text.replace("<", "\\u003c")

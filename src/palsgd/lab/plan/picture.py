"""The plan as figures: time against the rate of the link, and a round as a timeline."""

from pathlib import Path

import numpy as np

from palsgd.cluster import Cluster
from palsgd.lab.groups import Group
from palsgd.lab.plan.candidates import Candidate, Planner
from palsgd.lab.plan.choosing import BreakEven, Plan
from palsgd.lab.plan.text import rate_words, setting_words
from palsgd.lab.report.bars import draw_timelines
from palsgd.lab.report.canvas import MUTED, drawing_style, new_axes, plain, publish, set_scale
from palsgd.lab.report.styles import line_styles
from palsgd.lab.report.timelines import bars
from palsgd.registry import row

POINTS = 49
SHOWN_WORKERS = 4


def draw_plan(planner: Planner, plan: Plan, even: BreakEven | None, folder: Path) -> list[Path]:
    folder.mkdir(parents=True, exist_ok=True)
    shown = [plan.opponents[0], plan.opponent, plan.best]
    shown = [each for place, each in enumerate(shown) if each not in shown[:place]]
    with drawing_style():
        _rates(planner, shown, None if even is None else even.rate, folder)
        _round(planner.cluster, plan.best, folder)
    return [folder / "plan.png", folder / "plan-timeline.png"]


def _rates(planner: Planner, shown: list[Candidate], even: float | None, folder: Path) -> None:
    """`shown` are the lines, DDP first, and the last one the plan's choice."""
    cluster, task = planner.cluster, planner.task
    figure, axes = new_axes("Hours to DDP's quality, by the model", "rate of the link", height=2.9)
    ideal = task.steps * cluster.step / 3600
    middle = np.log10(cluster.rate)
    rates = 10 ** np.linspace(middle - 3, middle + 3, POINTS)
    for choice, style in zip(shown, line_styles([_group(choice) for choice in shown]), strict=True):
        hours = [_hours(Planner(cluster.changed(rate=rate), task), choice) for rate in rates]
        axes.plot(rates, hours, color=style.light, ls=style.dash, label=setting_words(choice))
    axes.axhline(ideal, color=MUTED, lw=0.7, ls=(0, (1, 2)))
    axes.axvline(cluster.rate, color=MUTED, lw=0.9)
    top = axes.get_ylim()[1]
    axes.annotate(
        f"this link, {rate_words(cluster.rate)}", (cluster.rate, 1),
        xycoords=("data", "axes fraction"), xytext=(3, -7), textcoords="offset points",
        size=6.8, color=MUTED,
    )  # fmt: skip
    if even and rates[0] < even < rates[-1]:
        axes.axvline(even, color=MUTED, lw=0.9, ls=(0, (3, 2)))
        axes.annotate(
            "break-even", (even, 0.86), xycoords=("data", "axes fraction"), xytext=(3, 0),
            textcoords="offset points", size=6.8, color=MUTED,
        )  # fmt: skip
    axes.set_ylim(ideal / 1.5, max(top, ideal * 10))
    axes.set_xlim(rates[0], rates[-1])
    set_scale(axes, "x", log=True, shown=rate_words)
    set_scale(axes, "y", log=True, shown=plain)
    axes.set_ylabel("h")
    axes.legend(loc="upper center", bbox_to_anchor=(0.47, -0.17), ncols=len(shown))
    publish(figure, "plan", "Hours to DDP's quality", {}, folder)


def _hours(planner: Planner, choice: Candidate) -> float:
    if choice.is_ddp:
        return planner.ddp(choice.variant, choice.work, choice.price).run_s / 3600
    return planner.local(row(choice.method), choice.work).run_s / 3600


def _round(cluster: Cluster, choice: Candidate, folder: Path) -> None:
    """Two rounds in the middle, or as many steps of DDP."""
    H = 4 * choice.work.accumulate if choice.is_ddp else choice.work.sync_every
    watched = range(min(SHOWN_WORKERS, cluster.workers))
    found = cluster.project(choice.work, steps=4 * H, watched=watched)
    start = found.times[found.clocks.index(H) if H in found.clocks else 0]
    end = start + 2 * H * choice.step_s
    spans = [
        {**span, "start_s": max(span["start_s"], start), "end_s": min(span["end_s"], end)}
        for span in found.spans
        if span["end_s"] > start and span["start_s"] < end
    ]
    title = f"{'Eight steps' if choice.is_ddp else 'Two rounds'}: {setting_words(choice)}"
    draw_timelines("plan-timeline", title, {"": bars(spans)}, folder)


def _group(choice: Candidate) -> Group:
    return Group(choice.method, {}, [])

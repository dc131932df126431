"""The plan as figures: seconds against the rate of the link, and a round as a timeline."""

from pathlib import Path

import numpy as np

from palsgd.cluster import Cluster
from palsgd.lab.groups import Group
from palsgd.lab.plan.candidates import Choice, Task, ddp, local
from palsgd.lab.plan.text import rate_words, setting_words
from palsgd.lab.report.canvas import MUTED, drawing_style, new_axes, plain, publish, set_scale
from palsgd.lab.report.figures import draw_timeline
from palsgd.lab.report.styles import line_styles
from palsgd.lab.report.timelines import bars

POINTS = 49
SHOWN_WORKERS = 4


def draw_plan(
    cluster: Cluster, task: Task, shown: list[Choice], even: float | None, folder: Path
) -> list[Path]:
    """`shown` are the lines, DDP first, and the last one the plan's choice."""
    folder.mkdir(parents=True, exist_ok=True)
    with drawing_style():
        _rates(cluster, task, shown, even, folder)
        _round(cluster, shown[-1], folder)
    return [folder / "plan.png", folder / "plan-timeline.png"]


def _rates(
    cluster: Cluster, task: Task, shown: list[Choice], even: float | None, folder: Path
) -> None:
    figure, axes = new_axes("Seconds per gradient, by the model", "rate of the link", height=2.9)
    middle = np.log10(cluster.rate)
    rates = 10 ** np.linspace(middle - 3, middle + 3, POINTS)
    for choice, style in zip(shown, line_styles([_group(choice) for choice in shown]), strict=True):
        seconds = [_gradient_s(cluster.changed(rate=rate), task, choice) for rate in rates]
        axes.plot(rates, seconds, color=style.light, ls=style.dash, label=setting_words(choice))
    axes.axhline(cluster.step, color=MUTED, lw=0.7, ls=(0, (1, 2)))
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
    axes.set_ylim(cluster.step / 1.5, max(top, cluster.step * 10))
    axes.set_xlim(rates[0], rates[-1])
    set_scale(axes, "x", log=True, shown=rate_words)
    set_scale(axes, "y", log=True, shown=plain)
    axes.set_ylabel("s")
    axes.legend(loc="upper center", bbox_to_anchor=(0.47, -0.17), ncols=len(shown))
    publish(figure, "plan", "Seconds per gradient", {}, folder)


def _gradient_s(cluster: Cluster, task: Task, choice: Choice) -> float:
    base = ddp(cluster, task)
    if choice.work.is_ddp:
        return base.gradient_s
    return local(cluster, task, choice.work, base).gradient_s


def _round(cluster: Cluster, choice: Choice, folder: Path) -> None:
    """Two rounds in the middle, or as many steps of DDP."""
    H = 4 if choice.work.is_ddp else choice.work.sync_every
    watched = range(min(SHOWN_WORKERS, cluster.workers))
    found = cluster.project(choice.work, steps=4 * H, watched=watched)
    start = found.times[found.clocks.index(H) if H in found.clocks else 0]
    end = start + 2 * H * choice.step_s
    spans = [
        {**span, "start_s": max(span["start_s"], start), "end_s": min(span["end_s"], end)}
        for span in found.spans
        if span["end_s"] > start and span["start_s"] < end
    ]
    title = f"{'Eight steps' if choice.work.is_ddp else 'Two rounds'}: {setting_words(choice)}"
    draw_timeline("plan-timeline", title, bars(spans), folder)


def _group(choice: Choice) -> Group:
    return Group(choice.method, {}, [])

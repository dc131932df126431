"""The quality that runs are to reach: stated beforehand, or what the baseline ends with."""

from dataclasses import dataclass, replace
from typing import Any

from palsgd.lab.groups import Group
from palsgd.lab.judging.interval import Interval
from palsgd.lab.run_folder import Line, Run

MARGIN = 0.01


@dataclass(frozen=True)
class Quality:
    """The figure by which runs are judged, as lines of metrics.jsonl have it."""

    on: str  # its key
    name: str  # in words
    higher_is_better: bool

    @classmethod
    def of(cls, run: Run) -> "Quality":
        on = str(run.config.get("target_on") or "loss")
        metric = str(run.config.get("metric") or "metric")
        name = on.replace("train_", "training ").replace("metric", metric)
        return cls(on, name, on.endswith("metric") and bool(run.config.get("higher_is_better")))

    @property
    def sign(self) -> int:
        """Times this, less is better."""
        return -1 if self.higher_is_better else 1

    def evaluated(self, run: Run) -> list[Line]:
        """The lines that have it. One that is null was evaluated, and was not finite."""
        beside = "metric" if self.on in ("loss", "metric") else self.on
        return [line for line in run.lines if beside in line and self.on in line]

    def loss(self, line: Line) -> float:
        """The figure as one of which less is better; infinite where it was not finite."""
        value = line[self.on]
        return float("inf") if value is None else self.sign * float(value)


@dataclass(frozen=True)
class Target:
    """A level of the quality, where it comes from, and the margin that was stated beforehand."""

    value: float
    on: str
    source: str
    margin: float

    def as_dict(self) -> dict[str, Any]:
        return {"value": self.value, "on": self.on, "source": self.source, "margin": self.margin}


def margin_of(groups: list[Group]) -> float:
    """The margin that the runs state; the widest where they differ."""
    stated = [run.config.get("margin") for group in groups for run in group.runs]
    return max((float(margin) for margin in stated if margin is not None), default=MARGIN)


def stated_target(groups: list[Group], quality: Quality, margin: float) -> Target | None:
    """What the user or the recipe asks for; the hardest where runs ask for different ones."""
    given = (run.config.get("target") for group in groups for run in group.runs)
    stated = {float(value) for value in given if value is not None}
    if not stated:
        return None
    value = min(stated, key=lambda each: quality.sign * each)
    words = "stated" if len(stated) == 1 else f"the hardest of {len(stated)} that are stated"
    return Target(value, quality.on, words, margin)


def end_target(group: Group, final: Interval, quality: Quality, margin: float) -> Target:
    """A group's mean final value, and worse by the margin. `final` is in units in which less is
    better."""
    level = final.value + margin * abs(final.value)
    seeds = f"{final.n} seeds" if final.n > 1 else "one seed"
    sign = "-" if quality.higher_is_better else "+"
    source = f"{group.label}'s mean final {quality.name} over {seeds} {sign} {100 * margin:g}%"
    return Target(quality.sign * level, quality.on, source, margin)


def baseline_target(
    baseline: Group, final: Interval, of_how_many: int, quality: Quality, margin: float
) -> Target:
    found = end_target(baseline, final, quality, margin)
    if of_how_many == 1:
        return found
    best = f"{found.source}, the best of {of_how_many} by its own final {quality.name}"
    return replace(found, source=best)

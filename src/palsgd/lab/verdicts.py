"""What a comparison comes to, in sentences: quality, speed to a stated quality, cause, what real
processes say to the simulator, limits.

Every number in them comes from `Comparison`, every word from `judging.verdict`.
"""

import math
from collections.abc import Iterable
from statistics import fmean
from typing import TYPE_CHECKING

import numpy as np

from palsgd import registry
from palsgd.lab.controls import NO_PULL, RAISED_RATE, SAME_SETTINGS, Recipe
from palsgd.lab.groups import Group
from palsgd.lab.judging.interval import Interval
from palsgd.lab.judging.verdict import Verdict, Word, judge
from palsgd.lab.timing.pace import NO_LINK

if TYPE_CHECKING:
    from palsgd.lab.comparison import Comparison, Final, ToTarget
    from palsgd.lab.twins import Twin

UNTRAINED = "has it before it trains: this target does not compare methods"
UNTUNED = "untuned: curves only, no verdict on methods"
_AXES = {
    "step": "steps",
    "gradient_steps": "gradients",
    "bytes_sent": "bytes",
    "time_s": "seconds",
}


def sentences(comparison: "Comparison") -> list[str]:
    groups = list(judged(comparison))
    return [
        *_quality(comparison, groups),
        *_speed(comparison, groups),
        *_cause(comparison, groups),
        *_processes(comparison),
        *_limits(comparison, groups),
    ]


def judged(comparison: "Comparison") -> Iterable[Group]:
    """The best setting of each method at each scale, mixing methods first. Controls that are there
    for nothing else are no methods of their own."""
    finals = {row.group: comparison.final_losses(row.group) for row in comparison.finals()}
    groups = [g for g in finals if not g.is_baseline and g.given_name is None]
    groups.sort(key=lambda group: fmean(finals[group].values()))
    found: dict[tuple[object, ...], Group] = {}
    for group in groups:
        found.setdefault((group.method, *comparison.scale(group)), group)
    return sorted(found.values(), key=lambda g: (not mixes(g), comparison.groups.index(g)))


def mixes(group: Group) -> bool:
    return group.method in registry.names() and registry.row(group.method).mixes


# -- quality ---------------------------------------------------------------------------------------


def _quality(comparison: "Comparison", judged: list[Group]) -> Iterable[str]:
    finals = {row.group: row for row in comparison.finals()}
    for group in judged:
        same = comparison.same_programs.get(group)
        if same is not None:
            yield f"{group.label} is the same program as {same.label}: there is nothing to compare."
            continue
        base, row = comparison.baseline(group), finals[group]
        if gone := lost(comparison, group):
            yield f"{gone}: no verdict."
        elif base is None:
            yield (
                f"{_ends(comparison, group)}: without a run of "
                f"{_baseline_name()} there is nothing to compare it with."
            )
        elif row.difference is None:
            yield (
                f"{_ends(comparison, group)}: no seed in common with {base.label}, no verdict; "
                "run both with the same seeds."
            )
        elif not math.isfinite(row.difference.value):
            yield f"{_ends(comparison, group)}, but {lost(comparison, base)}: no verdict."
        else:
            yield (
                f"{_ends(comparison, group)}, {_distance(comparison, row.difference)} "
                f"{base.label}'s{_spent(row, finals[base])}: "
                f"{word_for(comparison, row.verdict, row.difference)}."
            )


def _ends(comparison: "Comparison", group: Group) -> str:
    losses = comparison.final_losses(group)
    value = comparison.quality.sign * fmean(losses.values())
    tried = [g for g in comparison.groups if g.method == group.method and g.given_name is None]
    best = f" (the best of {len(tried)} settings by this figure)" if len(tried) > 1 else ""
    return f"{group.label} ends at {comparison.quality.name} {_number(value)}{best}"


def lost(comparison: "Comparison", group: Group) -> str | None:
    """How many runs end without a finite figure, as then there is no mean; None: all have one."""
    ends = list(comparison.final_losses(group).values())
    number = sum(not math.isfinite(each) for each in ends)
    if not number:
        return None
    verb = "ends" if number == 1 else "end"
    runs = f"{number} of {len(ends)} run{'s' if len(ends) > 1 else ''} of {group.label}"
    return f"{runs} {verb} without a finite {comparison.quality.name}"


def _distance(comparison: "Comparison", difference: Interval) -> str:
    """A share of a difference, which is above zero for the worse, with its interval and side."""
    worse = difference.value > 0
    size = difference if worse else _negated(difference)
    return f"{_share(size)} {side(comparison, worse=worse)}"


def side(comparison: "Comparison", *, worse: bool) -> str:
    """Where what is worse, or not, lies in the figure itself: more accuracy is better."""
    return "above" if worse != comparison.quality.higher_is_better else "below"


def _spent(row: "Final", base: "Final") -> str:
    """What was saved on the way, or not: the gain beside the loss."""
    parts = []
    for key, name in (("gradient_steps", "gradients"), ("bytes_sent", "bytes")):
        own, other = row.totals[key], base.totals[key]
        if own is not None and other:
            parts.append(f"{_times(own / other)} its {name}")
    return f", with {' and '.join(parts)}" if parts else ""


def word_for(comparison: "Comparison", verdict: Verdict | None, difference: Interval) -> str:
    """The word of a difference, and what it rests on; or why there is none."""
    if difference.n < 2:
        return "one seed: no verdict"
    pairs = f"{difference.n} paired seeds"
    if not is_tuned(comparison):
        return f"untuned, no verdict ({pairs})"
    if verdict is None:
        return f"no verdict ({pairs})"
    margin = f"{pairs}, margin {100 * verdict.margin:g}%"
    if verdict.word is Word.UNDECIDED and verdict.seeds_needed is not None:
        return f"{verdict.word}, about {verdict.seeds_needed} seeds would decide ({margin})"
    return f"{verdict.word} ({margin})"


def _may_judge(comparison: "Comparison", difference: Interval) -> bool:
    return difference.n > 1 and is_tuned(comparison)


def is_tuned(comparison: "Comparison") -> bool:
    """Has every method settings that were tuned for it?"""
    return all(run.config.get("tuned") for run in comparison.runs)


def _baseline_name() -> str:
    from palsgd.lab.methods import baseline

    return baseline().name


# -- speed -----------------------------------------------------------------------------------------


def _speed(comparison: "Comparison", judged: list[Group]) -> Iterable[str]:
    rows = {row.group: row for row in comparison.to_target()}
    for group in judged:
        row, base = rows.get(group), comparison.baseline(group)
        if row is None or comparison.same_programs.get(group) is not None:
            continue
        goal = f"To {comparison.quality.name} {_number(row.target.value)} ({row.target.source})"
        if not row.reached:
            yield f"{goal}: {group.label} {not_reached(comparison, row)}."
        elif not row.costs["step"].cost.value:  # to which there is no ratio
            yield f"{goal}: {group.label} {UNTRAINED}."
        elif base is None or base not in rows or not rows[base].reached:
            yield f"{goal}: {group.label} takes {_costs(row)}; {_resolution(row)}."
        elif row.in_warmup:
            yield f"{goal}: {group.label} {_within_warmup(row, base)}."
        else:
            yield f"{goal}: {group.label} takes {_ratios(row, base)}; {_resolution(row)}."


def not_reached(comparison: "Comparison", row: "ToTarget") -> str:
    """For a sentence and for a table."""
    if math.isinf(row.shortfall.value):
        return f"does not reach it within {row.steps:,.0f} steps (it ends without a finite value)"
    far = _distance(comparison, row.shortfall)
    return f"does not reach it within {row.steps:,.0f} steps (ends {far})"


def _within_warmup(row: "ToTarget", base: Group) -> str:
    """A target that says nothing about a method."""
    steps = row.group.settings["warmup_steps"]
    return (
        f"arrives in its warm-up of {steps:,} steps, until when it is no other method than "
        f"{base.label}: this target does not compare them"
    )


def _costs(row: "ToTarget") -> str:
    parts = [
        f"{reached.cost.value:,.4g} {_AXES[axis]}"
        for axis, reached in row.costs.items()
        if axis in _AXES
    ]
    return ", ".join(parts)


def _ratios(row: "ToTarget", base: Group) -> str:
    """Own cost over the baseline's: below 1 it is ahead."""
    parts: list[str] = []
    for axis, speed_up in row.speed_ups.items():
        if axis in _AXES:
            whose = "its" if parts else f"{base.label}'s"
            ratio = f"{_times(1 / speed_up.value)}{_bounds(speed_up, inverted=True)}"
            parts.append(f"{ratio} {whose} {_AXES[axis]}{_remark(axis, speed_up)}")
    return ", ".join(parts)


def _remark(axis: str, speed_up: Interval) -> str:
    """A baseline may send its gradients in bf16, at half the bytes."""
    words = ["no difference seen"] if speed_up.low <= 1 <= speed_up.high and speed_up.n > 1 else []
    if axis == "bytes_sent":
        words.append(f"{_times(2 / speed_up.value)} if those were sent in bf16")
    return f" ({', '.join(words)})" if words else ""


def _resolution(row: "ToTarget") -> str:
    step = row.costs["step"]
    share = step.resolution / step.cost.value if step.cost.value else math.inf
    return f"evaluated every {step.resolution:,.0f} steps there, {_percent(share)} of its steps"


# -- cause -----------------------------------------------------------------------------------------


def _cause(comparison: "Comparison", judged: list[Group]) -> Iterable[str]:
    for group in filter(mixes, judged):
        there = comparison.controls.get(group, {})
        controls = {kind: twin for kind, twin in there.items() if comparison.final_losses(twin)}
        if lost(comparison, group) or group in comparison.same_programs:
            continue
        if controls:
            yield _against_best(comparison, group, list(controls.values()))
        if {NO_PULL, RAISED_RATE, SAME_SETTINGS} <= controls.keys():
            yield _parts(comparison, group, controls)


def _against_best(comparison: "Comparison", group: Group, controls: list[Group]) -> str:
    if all(lost(comparison, twin) for twin in controls):
        return f"No control of {group.label} ends with a finite figure: no verdict on mixing."
    best = min(controls, key=lambda twin: fmean(comparison.final_losses(twin).values()))
    difference = comparison.difference(group, best)
    if difference is None:
        return f"{group.label} has no seed in common with its controls: no verdict on mixing."
    word = word_for(comparison, judge(difference, comparison.margin), difference)
    return (
        f"Against its best control of {len(controls)}, {best.label}, {group.label} ends "
        f"{_distance(comparison, difference)}: {word}."
    )


def _parts(comparison: "Comparison", group: Group, controls: dict[Recipe, Group]) -> str:
    """plain -> raised rate -> gradients skipped too -> pulled too: each step adds one thing, and
    the steps sum up to the whole difference."""
    plain, raised, skipped = (controls[r] for r in (SAME_SETTINGS, RAISED_RATE, NO_PULL))
    ends = (lost(comparison, each) for each in (plain, raised, skipped))
    if gone := next(filter(None, ends), None):
        return f"{gone}: no parts of {group.label}'s difference from its controls."
    base = fmean(comparison.final_losses(plain).values())
    steps = {
        "the raised learning rate": (raised, plain),
        "skipping gradients": (skipped, raised),
        "the pull": (group, skipped),
    }
    parts = []
    for name, (own, other) in steps.items():
        found = comparison.difference(own, other)
        if found is None:
            return f"{group.label}'s controls have no seed in common: no parts."
        scaled = found.scaled(abs(fmean(comparison.final_losses(other).values())) / abs(base))
        word = (
            f" ({judge(scaled, comparison.margin).word})" if _may_judge(comparison, found) else ""
        )
        parts.append(f"{name} {_signed(scaled)}{word}")
    return (
        f"Of {group.label}'s difference from {plain.label}, in shares of its "
        f"{comparison.quality.name} (above zero: worse): {', '.join(parts)}."
    )


# -- twins -----------------------------------------------------------------------------------------


def _processes(comparison: "Comparison") -> Iterable[str]:
    """What real processes say to what the simulator says. Rounding differs between the two, and
    training may amplify it, so they are held to the margin that methods are judged by."""
    alike: dict[tuple[object, str], list[Twin]] = {}
    for twin in comparison.twins:
        alike.setdefault((twin.real.config.get("seed"), twin.network), []).append(twin)
    for (seed, network), found in alike.items():
        ends = "; ".join(map(_both_ends, found))
        apart = float(np.max([twin.apart for twin in found]))  # nan if one of them is
        if math.isnan(apart):
            yield f"Seed {seed} in real processes over {network}: {ends}; no finite loss in common."
            continue
        word = "within" if apart <= comparison.margin else "BEYOND"
        yield (
            f"Seed {seed} in real processes over {network}: {ends}; at most {_percent(apart)} "
            f"apart at any evaluation, {word} the margin of {100 * comparison.margin:g}%."
        )


def _both_ends(twin: "Twin") -> str:
    real, simulated = (
        "none that is finite" if loss is None else f"{loss:.5g}" for loss in twin.ends("final_loss")
    )
    return f"{twin.group.label} ended at loss {real}, the simulator at {simulated}"


# -- limits ----------------------------------------------------------------------------------------


def _limits(comparison: "Comparison", judged: list[Group]) -> Iterable[str]:
    run = comparison.runs[0]
    seeds = sorted({len(group.seeds) for group in comparison.groups})
    counts = "one seed" if seeds == [1] else f"{'-'.join(map(str, seeds))} seeds"
    workers = sorted({int(each.config.get("workers", 1)) for each in comparison.runs})
    yield "Limits: " + "; ".join(
        [
            counts,
            f"{run.workload}, K = {', '.join(map(str, workers))}",
            _seconds(comparison),
            _tuning(comparison),
            *_floors(comparison),
        ]
    ) + "."  # fmt: skip


def _tuning(comparison: "Comparison") -> str:
    files = dict.fromkeys(str(run.config.get("tuned")) for run in comparison.runs)
    return f"tuned by {', '.join(files)}" if is_tuned(comparison) else UNTUNED


def _seconds(comparison: "Comparison") -> str:
    """Whose seconds these are."""
    known = dict.fromkeys(
        f"seconds {pace.kind} ({pace.source})" for pace in comparison.paces.values() if pace
    )
    nobody = [] if all(comparison.paces.values()) else [f"no seconds, {NO_LINK}"]
    return ", ".join([*known, *nobody])


def _floors(comparison: "Comparison") -> Iterable[str]:
    """The noise floor: how far two runs of one program are apart that differ in their seed."""
    for scale in comparison.scales:
        base = next((g for g in comparison.groups if comparison.scale(g) == scale), None)
        base = None if base is None else comparison.baseline(base)
        values = [] if base is None else list(comparison.final_losses(base).values())
        if base is None or len(values) < 2 or not all(map(math.isfinite, values)):
            continue
        apart = [abs(a - b) for at, a in enumerate(values) for b in values[at + 1 :]]
        share = fmean(apart) / abs(fmean(values)) if fmean(values) else math.inf
        yield f"{base.label} of one seed and of another end {_percent(share)} apart on average"


# -- numbers as text -------------------------------------------------------------------------------


def _negated(interval: Interval) -> Interval:
    return Interval(
        -interval.value, -interval.high, -interval.low, interval.n, interval.kind,
        interval.deviation,
    )  # fmt: skip


def _number(value: float) -> str:
    return f"{value:.4g}"


def _percent(share: float) -> str:
    return f"{100 * share:.2g}%" if abs(share) < 0.1 else f"{100 * share:.3g}%"


def _share(interval: Interval) -> str:
    return f"{_percent(interval.value)}{_bounds(interval.scaled(100))}"


def _signed(interval: Interval) -> str:
    return f"{100 * interval.value:+.2g}%{_bounds(interval.scaled(100))}"


def _times(ratio: float) -> str:
    return f"{ratio:.3g} x"


def _bounds(interval: Interval, *, inverted: bool = False) -> str:
    """Nothing where there are none."""
    low, high = interval.low, interval.high
    if inverted:
        low, high = (1 / end if end else math.inf for end in (high, low))
    if interval.n < 2 or math.isnan(low) or math.isinf(low):
        return ""
    # A baseline that never arrives in some draws of the seeds spends endlessly there.
    endless = inverted and low == 0
    ends = (
        "no bound" if endless else f"{low:.3g}",
        "no bound" if math.isinf(high) else f"{high:.3g}",
    )
    return f" [{', '.join(ends)}]"

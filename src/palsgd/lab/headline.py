"""Gain and loss of the mixing method over a link, in one sentence from the figures."""

import math
import re

import numpy as np

from palsgd import registry
from palsgd.lab.comparison import Comparison, Final, ToTarget
from palsgd.lab.groups import Group
from palsgd.lab.judging.interval import Interval
from palsgd.lab.verdicts import judged, lost, mixes, side, word_for

EARLY = "in its warm-up, until when both are one method"
EQUAL = 0.02  # numbers of gradients that differ by less are called equal


def headline(comparison: Comparison) -> str | None:
    """The mixing method beside the baseline, whatever the figures say. None where one of both is
    missing, and where their seconds are not those of a link."""
    own = next((each for each in judged(comparison) if mixes(each)), None)
    base = None if own is None else comparison.baseline(own)
    if own is None or base is None:
        return None
    pace, theirs = comparison.paces[own], comparison.paces[base]
    finals = {row.group: row for row in comparison.finals()}
    row = next((row for row in comparison.to_target() if row.group is own), None)
    if pace is None or theirs is None or pace.link is None or row is None:
        return None
    if finals[own].difference is None:  # no seed in common
        return None
    sent = _ratio(finals[own], finals[base], "bytes_sent")
    gain, loss = _gain(comparison, row, base), _loss(comparison, finals[own], finals[base])
    return f"Over {link_in_words(pace.link)} {gain}, with {sent:.2g} x the bytes; {loss}."


def link_in_words(link: str) -> str:
    """`100mbit,20ms` as 100 Mbit/s with 20 ms."""
    rate, *rest = (_with_unit(part.strip()) for part in link.split(","))
    return f"{rate} with {', '.join(rest)}" if rest else rate


def _with_unit(part: str) -> str:
    if found := re.fullmatch(r"([\d.]+)([kmg]?)bit", part, re.IGNORECASE):
        return f"{found[1]} {found[2].upper() if found[2] in 'mgMG' else 'k'}bit/s"
    return re.sub(r"^([\d.]+)(?=[a-z]+$)", r"\1 ", part)


def _gain(comparison: Comparison, row: ToTarget, base: Group) -> str:
    """How much sooner the baseline's quality is reached; if it never is, how much sooner what the
    method itself ends with, and worse by the margin, as the mean of the seeds arrives at its own
    end only there."""
    own, name, quality = row.group, _title(row.group), comparison.quality
    if comparison.same_programs.get(own) is base:
        return f"{name} is the same program as {_title(base)}"
    if row.reached:
        return f"{name} reaches {_goal(comparison, row, base)}"
    missed = f"{name} does not reach {_title(base)}'s {quality.name} in {row.steps:,.0f} steps"
    end = comparison.to_own_end(own)
    if end is None:
        return missed
    sign = "-" if quality.higher_is_better else "+"
    return (
        f"{missed}; its own final {quality.name} {sign} {100 * comparison.margin:g}%, "
        f"{end.target.value:.3g}, it reaches {_how_soon(comparison, end, base)}"
    )


def _goal(comparison: Comparison, row: ToTarget, base: Group) -> str:
    """What is reached, and how much sooner than by the baseline."""
    name, title = comparison.quality.name, _title(base)
    theirs = next(each for each in comparison.to_target() if each.group is base)
    if not theirs.reached:  # a target that was stated
        return f"{name} {_number(row.target.value)}, which {title} never does"
    return f"{title}'s {name} {_how_soon(comparison, row, base)}"


def _how_soon(comparison: Comparison, row: ToTarget, base: Group) -> str:
    """Of a quality that the method reaches, how much sooner than the baseline it does."""
    if row.in_warmup:
        return EARLY
    faster = row.speed_ups.get("time_s")
    if faster is not None:
        return _sooner(faster)
    if not row.costs["time_s"].cost.value:  # where it takes no time there is no ratio
        return "at once"
    if not comparison.to_quality(base, row.target).reached:
        return "where the other never is"
    if not _reaches(comparison, base, row):
        return f"where {_title(base)} never is with the seeds that both have"
    return f"with seeds that {_title(base)} has not, and not with those that both have"


def _reaches(comparison: Comparison, group: Group, row: ToTarget) -> bool:
    """Is the group at the quality of the row with the seeds that both have?"""
    own, other = comparison.curve(group), comparison.curve(row.group)
    if own is None or other is None:
        return False
    common = [at for at, seed in enumerate(own.seeds) if seed in other.seeds]
    level = comparison.quality.sign * row.target.value
    return bool(common) and bool(own.mean(np.array(common))[-1] <= level)


def _sooner(faster: Interval) -> str:
    bounds = ""
    if faster.n > 1 and math.isfinite(faster.low):  # some draws of the seeds may never arrive
        # of 0: in some draws it never arrives itself
        low, high = (
            _number(end) if end and math.isfinite(end) else "no bound"
            for end in (faster.low, faster.high)
        )
        bounds = f" [{low}, {high}]"
    if faster.value >= 1:
        return f"{_number(faster.value)} x{bounds} faster"
    return f"{_number(1 / faster.value)} x slower (speed-up {_number(faster.value)}{bounds})"


def _loss(comparison: Comparison, own: Final, base: Final) -> str:
    difference = own.difference
    assert difference is not None
    if not math.isfinite(difference.value):
        return f"{lost(comparison, own.group) or lost(comparison, base.group)}: no verdict"
    worse = difference.value >= 0
    ends = sorted(100 * (end if worse else -end) for end in (difference.low, difference.high))
    bounds = f" [{_number(ends[0])}, {_number(ends[1])}]" if difference.known else ""
    gradients = _ratio(own, base, "gradient_steps")
    equal = abs(gradients - 1) < EQUAL
    spent = "at equal examples" if equal else f"with {gradients:.2g} x the gradients"
    return (
        f"it ends {_number(abs(100 * difference.value))}%{bounds} "
        f"{side(comparison, worse=worse)} {_title(base.group)} {spent}: "
        f"{word_for(comparison, own.verdict, difference)}"
    )


def _ratio(own: Final, base: Final, key: str) -> float:
    ours, theirs = own.totals[key], base.totals[key]
    return ours / theirs if ours is not None and theirs else float("nan")


def _number(value: float) -> str:
    """Two digits, and all of those before the point."""
    return f"{value:.2g}" if abs(value) < 100 else f"{value:.0f}"


def _title(group: Group) -> str:
    return registry.row(group.method).title

"""Which settings are drawn as lines: nobody can tell hundreds of them apart."""

import math
from statistics import fmean

from palsgd.lab.comparison import Comparison
from palsgd.lab.groups import Group
from palsgd.lab.verdicts import judged

MOST = 24


def drawn(comparison: Comparison) -> list[Group]:
    """All of them where they are few. Else those that verdicts are of, the best setting of each
    method and each control, and then the best of the others."""
    groups = comparison.groups
    if len(groups) <= MOST:
        return groups
    ranked = sorted(groups, key=lambda each: _end(comparison, each))
    best: dict[str, Group] = {}
    for each in ranked:
        best.setdefault(each.given_name or each.method, each)
    chosen = list(dict.fromkeys([*judged(comparison), *best.values(), *ranked]))[:MOST]
    return [each for each in groups if each in chosen]


def _end(comparison: Comparison, group: Group) -> float:
    """The judged quality at the end, less is better; infinite where no seed has a finite one."""
    losses = [value for value in comparison.final_losses(group).values() if math.isfinite(value)]
    return fmean(losses) if losses else math.inf

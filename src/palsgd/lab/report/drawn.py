"""Which settings are drawn as lines: nobody can tell hundreds of them apart."""

import math
from statistics import fmean

from palsgd.lab.comparison import Comparison
from palsgd.lab.groups import Group
from palsgd.lab.report.ablations import Ablation
from palsgd.lab.verdicts import judged

MOST = 24
MOST_BUNDLES = 12  # lines against a setting


def drawn(comparison: Comparison) -> list[Group]:
    """All of them where they are few. Else those that verdicts are of, the best setting of each
    method and each control, and then the best of the others."""
    groups = comparison.groups
    if len(groups) <= MOST:
        return groups
    ranked = sorted(groups, key=lambda each: _end(comparison, each))
    chosen = list(dict.fromkeys([*judged(comparison), *_best_of_each(ranked), *ranked]))[:MOST]
    return [each for each in groups if each in chosen]


def drawn_bundles(comparison: Comparison, ablation: Ablation) -> list[Group]:
    """Those of the settings that have the best ends, where they are many."""
    ends = {run: _end(comparison, each) for each in comparison.groups for run in each.runs}
    ranked = sorted(ablation.bundles, key=lambda each: min(ends[run] for run in each.runs))
    return [each for each in ablation.bundles if each in ranked[:MOST_BUNDLES]]


def drawn_beside(comparison: Comparison, ablation: Ablation, most: int = 4) -> list[Group]:
    """The best of each method, where they are many."""
    if len(ablation.beside) <= most:
        return ablation.beside
    ranked = sorted(ablation.beside, key=lambda each: _end(comparison, each))
    return _best_of_each(ranked)[:most]


def _best_of_each(ranked: list[Group]) -> list[Group]:
    """The first of each method and of each control."""
    best: dict[str, Group] = {}
    for each in ranked:
        best.setdefault(each.given_name or each.method, each)
    return list(best.values())


def _end(comparison: Comparison, group: Group) -> float:
    """The judged quality at the end, less is better; infinite where no seed has a finite one."""
    losses = [value for value in comparison.final_losses(group).values() if math.isfinite(value)]
    return fmean(losses) if losses else math.inf

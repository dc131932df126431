"""Which settings are drawn as lines: nobody can tell hundreds of them apart."""

import math
from itertools import chain, zip_longest
from statistics import fmean
from typing import Any

from palsgd.lab.comparison import Comparison
from palsgd.lab.groups import Group
from palsgd.lab.report.ablations import Ablation
from palsgd.lab.verdicts import judged

MOST = 24  # but all that verdicts are of are drawn
MOST_BUNDLES = 12  # lines against a setting
MOST_BESIDE = 6  # flat lines beside them


def drawn(comparison: Comparison) -> list[Group]:
    """All of them where they are few. Else those that verdicts are of with their baselines, at
    each scale the best of each method and control, and then the best of the others."""
    groups = comparison.groups
    if len(groups) <= MOST:
        return groups
    best = list(judged(comparison))
    spoken_of = {*best, *filter(None, map(comparison.baseline, best))}
    ranked = _one_scale_after_another(comparison)
    wanted = dict.fromkeys([*spoken_of, *_best_of_each(comparison, ranked), *ranked])
    chosen = list(wanted)[: max(MOST, len(spoken_of))]
    return [each for each in groups if each in chosen]


def drawn_bundles(comparison: Comparison, ablation: Ablation) -> list[Group]:
    """Those of the settings that have the best ends, where they are many."""
    ends = {run: _end(comparison, each) for each in comparison.groups for run in each.runs}
    ranked = sorted(ablation.bundles, key=lambda each: min(ends[run] for run in each.runs))
    return [each for each in ablation.bundles if each in ranked[:MOST_BUNDLES]]


def drawn_beside(comparison: Comparison, ablation: Ablation) -> list[Group]:
    """Where they are many, those with the settings of a line that is drawn, the best first; if
    none has them, the best of each method."""
    if len(ablation.beside) <= MOST_BESIDE:
        return ablation.beside
    ranked = sorted(ablation.beside, key=lambda each: _end(comparison, each))
    bundles = drawn_bundles(comparison, ablation)
    alike = [each for each in ranked if any(_agree(each, bundle) for bundle in bundles)]
    chosen = (alike or _best_of_each(comparison, ranked))[:MOST_BESIDE]
    return [each for each in ablation.beside if each in chosen]


def _agree(one: Group, other: Group) -> bool:
    common = one.settings.keys() & other.settings.keys()
    return all(one.settings[key] == other.settings[key] for key in common)


def _one_scale_after_another(comparison: Comparison) -> list[Group]:
    """The best of each scale, the second of each, and so on: losses of other data or numbers of
    workers are no rank."""
    scales: dict[Any, list[Group]] = {}
    for each in sorted(comparison.groups, key=lambda each: _end(comparison, each)):
        scales.setdefault(comparison.scale(each), []).append(each)
    return [each for each in chain(*zip_longest(*scales.values())) if each is not None]


def _best_of_each(comparison: Comparison, ranked: list[Group]) -> list[Group]:
    """The first of each method and of each control at each scale."""
    best: dict[tuple[Any, ...], Group] = {}
    for each in ranked:
        best.setdefault((each.kind, *comparison.scale(each)), each)
    return list(best.values())


def _end(comparison: Comparison, group: Group) -> float:
    """The judged quality at the end, less is better; infinite where a seed has no finite one."""
    losses = comparison.final_losses(group).values()
    return fmean(losses) if losses and all(map(math.isfinite, losses)) else math.inf

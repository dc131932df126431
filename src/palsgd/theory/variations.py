"""Away from the theorem's choices: other draws, other p."""

import math
from dataclasses import dataclass

from palsgd.schedule import EVEN_DRAWS
from palsgd.theory.fits import Measured
from palsgd.theory.problems import Noiseless
from palsgd.theory.studies import Line, Study, StudyContext, rounds_up, say_outside, skipped, with_
from palsgd.theory.theorem import Setting, theorem_mix_rate

_SHARES = (0.05, 0.1, 0.25, 0.5, 0.75, 0.9)
_END = 4.0  # mu alpha T


@dataclass(frozen=True)
class Regime:
    """A start at x*, where all error is noise; or a start away from x* without noise."""

    label: str
    noise: bool

    def excess(self, context: StudyContext, setting: Setting) -> Measured:
        problem = context.problem if self.noise else Noiseless.like(context.problem)
        distance = 0.0 if self.noise else context.distance
        return context.excess(problem, setting, distance=distance, runs=context.few_runs)


REGIMES = (Regime("noise, from x*", True), Regime("transient, without noise", False))


def by_draws(context: StudyContext) -> Study:
    kinds = sorted(EVEN_DRAWS, key=lambda kind: kind != "independent")
    study = Study("draws", "Draws", "draws", names=kinds)
    steps = _length(context)
    if skipped(study, steps * 2 * len(kinds)):
        return study
    for regime in REGIMES:
        settings = [with_(context.setting, steps=steps, draws=kind) for kind in kinds]
        measured = [regime.excess(context, setting) for setting in settings]
        study.lines.append(Line(regime.label, list(map(float, range(len(kinds)))), measured))
        for kind, found in list(zip(kinds, measured, strict=True))[1:]:
            study.notes.append(
                f"{regime.label}: {kind} {_against(found, measured[0])} independent."
            )
    return study


def by_mix_prob(context: StudyContext) -> Study:
    """alpha as it is; eta as the theorem says for each p."""
    study = Study("mix-prob", "Away from the theorem: p", "mix probability p", log_x=False)
    steps, base = _length(context), context.setting
    if skipped(study, steps * 2 * len(_SHARES)):
        return study
    settings = [
        with_(base, steps=steps, mix_prob=p, mix_rate=theorem_mix_rate(base.lr, base.sync_every, p))
        for p in _SHARES
    ]
    for regime in REGIMES:
        measured = [regime.excess(context, setting) for setting in settings]
        study.lines.append(Line(regime.label, list(_SHARES), measured))
    say_outside(study, settings, context.problem)
    return study


def _length(context: StudyContext) -> int:
    return rounds_up(_END / (context.problem.mu * context.setting.lr), context.setting.sync_every)


def _against(found: Measured, other: Measured) -> str:
    """The ratio of two means with its confidence interval; the means have independent errors."""
    if not (found.mean > 0 and other.mean > 0):
        return "cannot be compared with"
    ratio = found.mean / other.mean
    half = ratio * math.hypot(found.half() / found.mean, other.half() / other.mean)
    return f"has {ratio:.3f} ± {half:.3f} times the error of"

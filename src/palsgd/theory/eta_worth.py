"""What eta > 0 is worth: its error beside that of eta = 0, with the same coins and the same data.

Three regimes, one for each term of the theorem: the transient (no noise, away from x*), the noise
floor (from x*) and the drift floor (from x*, of the bent problem, as a quadratic has none).

A pull takes back a part of a round's progress, as a smaller alpha would, and a smaller alpha lowers
both floors. So eta > 0 has two opponents: eta = 0 with the same alpha, and eta = 0 with the alpha
that makes as much progress in a round (`shrink`).
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

from torch import Tensor

from palsgd.theory.drift import FITTED, bent_problem, bent_setting, drift_parts
from palsgd.theory.fits import Measured, paired_ratio
from palsgd.theory.problems import Noiseless, Problem
from palsgd.theory.studies import (
    Line,
    Study,
    StudyContext,
    Worth,
    rounds_up,
    say_outside,
    skipped,
    with_,
)
from palsgd.theory.theorem import Setting, theorem_mix_rate

TRANSIENT, NOISE, DRIFT = "transient", "noise floor", "drift floor"
_TIMES_ETA = (1.0, 4.0)
_FALLEN = 4.0  # mu alpha T, at which transients are compared
_SETTLED = 8.0  # the same for floors: an eta that only slows the way there must gain nothing by it
_DRIFT_WORKERS = 256  # drift_parts takes most of the noise out, so that fewer will do
_DRIFT_EVERY = 4


@dataclass(frozen=True)
class Regime:
    label: str
    setting: Setting
    parts: Callable[[Setting, float], Tensor]  # a number for each run, whose mean is the error
    fitted: int = 0

    @property
    def times(self) -> list[float]:
        """eta, in units of the theorem's, up to beta = 1, which sets a worker's model to the
        anchor."""
        most = 2.0 * self.setting.sync_every
        return [*(each for each in _TIMES_ETA if each < most), most]

    def with_eta(self, times: float) -> Setting:
        s = self.setting
        return with_(s, mix_rate=times * theorem_mix_rate(s.lr, s.sync_every, s.mix_prob))

    def error(self, setting: Setting) -> Tensor:
        """Of a setting whose alpha may be smaller; xhat has the weights of the regime's alpha."""
        return self.parts(setting, self.setting.lr)


def shrink(setting: Setting) -> float:
    """The progress of a round in units of that without pulls, for small alpha and in the mean over
    coins: every step keeps 1 - p beta of what the round has moved so far."""
    kept, every = 1 - setting.mix_prob * setting.beta, setting.sync_every
    return sum(kept**later for later in range(every)) / every


def by_mix_rate(context: StudyContext) -> Study:
    study = Study("mix-rate", "What eta is worth", "eta / (p / (2 H alpha))", log_x=False)
    regimes = list(_regimes(context))
    if skipped(study, sum(each.setting.steps * (1 + 2 * len(each.times)) for each in regimes)):
        return study
    for regime in regimes:
        _compare(study, context, regime)
    first = regimes[0]
    say_outside(study, [first.with_eta(each) for each in (0.0, *first.times)], context.problem)
    return study


def _compare(study: Study, context: StudyContext, regime: Regime) -> None:
    without = regime.with_eta(0.0)
    base = regime.error(without)
    errors = [base]
    for times in regime.times:
        setting = regime.with_eta(times)
        errors.append(regime.error(setting))
        factor = shrink(setting)
        slower = regime.error(with_(without, lr=factor * without.lr))
        for alpha, other in {1.0: base, factor: slower}.items():
            ratio = paired_ratio(errors[-1], other, 2 * regime.fitted)
            study.worths.append(Worth(regime.label, times, alpha, ratio, context.few_seeds))
    measured = [Measured.of(each, regime.fitted) for each in errors]
    study.lines.append(Line(regime.label, [0.0, *regime.times], measured))


def _regimes(context: StudyContext) -> Iterator[Regime]:
    problem, base = context.problem, context.setting

    def excess(problem: Problem, distance: float, setting: Setting, lr: float) -> Tensor:
        found = context.outcome(
            problem, setting, distance=distance, runs=context.few_runs, average_lr=lr
        )
        return problem.excess(found.average)

    def of_length(end: float) -> Setting:
        return with_(base, steps=rounds_up(end / (problem.mu * base.lr), base.sync_every))

    noiseless = partial(excess, Noiseless.like(problem), context.distance)
    yield Regime(TRANSIENT, of_length(_FALLEN), noiseless)
    if problem.sigma > 0:
        yield Regime(NOISE, of_length(_SETTLED), partial(excess, problem, 0.0))
    bent = bent_problem(context)
    lr = base.mix_prob / (6 * bent.smoothness * _DRIFT_EVERY)
    steps = rounds_up(_SETTLED / (bent.mu * lr), _DRIFT_EVERY)
    setting = with_(bent_setting(context, lr, _DRIFT_EVERY, steps), workers=_DRIFT_WORKERS)
    runs = max(16, context.few_runs // 10)
    yield Regime(DRIFT, setting, partial(drift_parts, context, bent, runs=runs), FITTED)

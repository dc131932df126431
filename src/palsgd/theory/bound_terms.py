"""The bound itself; and its noise and its transient, each where it dominates."""

import math

import torch

from palsgd.theory.algorithm import WeightedMean
from palsgd.theory.bound import Bound, explicit_bound
from palsgd.theory.fits import Fit, Measured, straight_line
from palsgd.theory.problems import Noiseless, Problem
from palsgd.theory.studies import (
    Exponent,
    Line,
    Study,
    StudyContext,
    mean_model_watch,
    noiseless,
    rounds_up,
    skipped,
    times,
    with_,
)
from palsgd.theory.theorem import Setting, largest_lr, theorem_log, theorem_setting

# -- the bound itself --------------------------------------------------------------------------


def convergence(lab: StudyContext) -> Study:
    """E[F(xhat_T)] - F* for every T up to the last, with alpha as it is, below the bound."""
    study = Study("bound", "Measured error and the bound", "steps T", log_x=False)
    at = _marks(lab.setting, 40)
    mean = _Averages(lab.problem, lab.setting, at)
    found = lab.outcome(
        lab.problem, lab.setting, distance=lab.distance, runs=lab.runs, snapshots=at,
        watch=mean.watch,
    )  # fmt: skip
    bounds = [explicit_bound(lab.problem, lab.setting, lab.distance, steps) for steps in at]
    x = [float(steps) for steps in at]
    excess = [Measured.of(lab.problem.excess(found.at[steps])) for steps in at]
    study.lines = [
        Line("F at xhat", x, excess, [bound.total for bound in bounds]),
        Line("mean of F at the workers' mean", x, mean.of_mean),
        Line("bound", x, _exactly([bound.total for bound in bounds])),
    ]
    study.notes.append(_beside(at[-1], excess[-1], bounds[-1]))
    if theorem_log(lab.problem, lab.setting.workers, lab.setting.steps, lab.distance) <= 0:
        study.notes.append(
            "So few steps, or so much noise, that ln(mu^2 d0 T^2 K / sigma^2) is not positive and "
            "the theorem names no step size; p/(48 L H) stands in unless one was given."
        )
    return study


def _beside(steps: int, found: Measured, bound: Bound) -> str:
    if not math.isfinite(found.mean):
        return f"At T = {steps:,} the runs have diverged: alpha is too large for this problem."
    holds = "." if found.mean - found.half <= bound.total else ": it does not hold here."
    return (
        f"At T = {steps:,}: measured {found.mean:.3g} ± {found.half:.1g}, bound {bound.total:.3g} "
        f"(transient {bound.transient:.2g}, drift {bound.drift:.2g}, noise {bound.noise:.2g}), "
        f"{times(bound.total, found.mean)} times as much{holds}"
    )


class _Averages:
    """The weighted mean of F(xbar^(t)), which the proof bounds, at some of the steps."""

    def __init__(self, problem: Problem, setting: Setting, at: list[int]):
        self._at, self._mean = set(at), WeightedMean(1 - problem.mu * setting.lr)
        self.of_mean: list[Measured] = []
        self.watch = mean_model_watch(problem, self._each)

    def _each(self, clock: int, of_mean: torch.Tensor, of_anchor: torch.Tensor) -> None:
        self._mean.add(of_mean)
        if clock + 1 in self._at:
            self.of_mean.append(Measured.of(self._mean.value))


def _marks(setting: Setting, number: int) -> list[int]:
    """Ends of rounds, evenly spread, and the end."""
    rounds = setting.steps // setting.sync_every
    every = max(1, rounds // number)
    ends = [end * setting.sync_every for end in range(every, rounds + 1, every)]
    return ends if ends and ends[-1] == setting.steps else [*ends, setting.steps]


# -- sigma^2 / (mu K T) ------------------------------------------------------------------------


def speed_up(lab: StudyContext) -> Study:
    study = Study("workers", "Error by number of workers", "workers K")
    base = lab.setting
    most = largest_lr(lab.problem, base.sync_every, base.mix_prob)
    # mu alpha T = 8 leaves of the start a factor exp(-16)
    steps = rounds_up(8 / (lab.problem.mu * most), base.sync_every)
    workers = (1, 2, 4, 8, 16)
    if noiseless(study, lab) or skipped(study, steps * len(workers)):
        return study
    settings = [with_(_theorem(lab, steps, lr=most), workers=number) for number in workers]
    study.lines = [_line(lab, "measured", [float(k) for k in workers], settings)]
    (line,) = study.lines
    study.exponents.append(
        Exponent(
            "error by K (1/K speed-up)",
            -1.0,
            line.fit(),
            line.bound_slope(),
            f"T = {steps:,}, alpha = p/(48 L H); the bound's drift term does not fall with K",
        )
    )
    return study


def by_steps(lab: StudyContext) -> Study:
    study = Study("steps", "Error by number of steps", "steps T, with alpha of the theorem")
    if noiseless(study, lab):
        return study
    shortest = _second_branch(lab)
    lengths = [rounds_up(shortest * factor, lab.setting.sync_every) for factor in (1, 2, 4)]
    if skipped(study, sum(lengths)):
        return study
    settings = [_theorem(lab, steps) for steps in lengths]
    line = _line(lab, "measured", [float(steps) for steps in lengths], settings)
    logs = [theorem_log(lab.problem, s.workers, s.steps, lab.distance) for s in settings]
    without = Line(
        "measured / ln A", line.x,
        [Measured(m.mean / log, m.half / log) for m, log in zip(line.measured, logs, strict=True)],
    )  # fmt: skip
    study.lines = [line, without]
    raw = line.fit()
    study.exponents.append(
        Exponent(
            "error by T (1/T)",
            -1.0,
            without.fit(),
            line.bound_slope(),
            f"alpha = ln A/(mu T), A = mu^2 d0 T^2 K / sigma^2; divided by ln A = {logs[0]:.3g} to "
            f"{logs[-1]:.3g}, which O~ hides; {raw.slope:.2f} ± {raw.half:.2f} undivided",
        )
    )
    return study


def _second_branch(lab: StudyContext) -> float:
    """The least T at which the theorem's alpha is ln A/(mu T); its start is then forgotten."""
    base = lab.setting
    rate = lab.problem.mu * largest_lr(lab.problem, base.sync_every, base.mix_prob)
    steps = 10 / rate
    for _ in range(50):  # ln A grows slowly with T, so this settles at once
        steps = max(1.0, theorem_log(lab.problem, base.workers, int(steps), lab.distance)) / rate
    return steps


def _theorem(lab: StudyContext, steps: int, lr: float | None = None) -> Setting:
    base = lab.setting
    return theorem_setting(
        lab.problem, workers=base.workers, steps=steps, sync_every=base.sync_every,
        mix_prob=base.mix_prob, distance=lab.distance, draws=base.draws, lr=lr,
    )  # fmt: skip


def _line(lab: StudyContext, label: str, x: list[float], settings: list[Setting]) -> Line:
    problem, distance = lab.problem, lab.distance
    return Line(
        label, x,
        [lab.excess(problem, s, distance=distance, runs=lab.few_runs) for s in settings],
        [explicit_bound(problem, s, distance).total for s in settings],
    )  # fmt: skip


# -- exp(-pT / (kappa H)) ----------------------------------------------------------------------


def transient(lab: StudyContext) -> Study:
    """Without noise, for other H and p, against mu alpha T = pT/(48 kappa H)."""
    study = Study(
        "transient", "Transient, without noise", "mu alpha T = pT / (48 kappa H)", log_x=False
    )
    problem, base, end = Noiseless.like(lab.problem), lab.setting, 12.0
    choices = [
        (base.sync_every, base.mix_prob),
        (2 * base.sync_every, base.mix_prob),
        (base.sync_every, base.mix_prob / 2),
    ]
    settings = [_transient_setting(lab, problem, every, p, end) for every, p in choices]
    if skipped(study, sum(setting.steps for setting in settings)):
        return study
    for number, setting in enumerate(settings):
        at = _marks(setting, 24)
        mean = _Averages(problem, setting, at)
        found = lab.outcome(
            problem, setting, distance=lab.distance, runs=64, snapshots=at,
            watch=None if number else mean.watch,
        )  # fmt: skip
        x = [problem.mu * setting.lr * steps for steps in at]
        label = f"H = {setting.sync_every}, p = {setting.mix_prob:g}"
        excess = [Measured.of(problem.excess(found.at[steps])) for steps in at]
        bound = [explicit_bound(problem, setting, lab.distance, steps).total for steps in at]
        study.lines.append(Line(f"F at xhat, {label}", x, excess, bound))
        if not number:
            study.lines.append(Line(f"mean of F at the workers' mean, {label}", x, mean.of_mean))
    averaged, proved = (_decay(line.x, line.measured) for line in study.lines[:2])
    stated = _decay(study.lines[0].x, _exactly(study.lines[0].bound or [])).slope
    twice = (
        "F is quadratic near x* and xhat falls as (mu alpha T) exp(-mu alpha T), so F at xhat "
        "falls twice as fast but for that factor"
    )
    study.exponents = [
        Exponent(
            "ln error by pT/(kappa H), as the theorem prints it",
            -1.0,
            Fit(averaged.slope / 48, averaged.half / 48, averaged.points),
            stated / 48,
            "O~ drops the 48 of alpha = p/(48 L H), but a factor in an exponent is no constant "
            "factor of the error",
        ),
        Exponent("ln error by pT/(48 kappa H), as the proof has it", -1.0, averaged, stated, twice),
        Exponent(
            "the same of the weighted mean of F at xbar", -1.0, proved, stated,
            "this is the quantity the proof bounds",
        ),
    ]  # fmt: skip
    return study


def _transient_setting(
    lab: StudyContext, problem: Problem, every: int, mix_prob: float, end: float
) -> Setting:
    lr = largest_lr(problem, every, mix_prob)
    steps = rounds_up(end / (problem.mu * lr), every)
    return theorem_setting(
        problem, workers=lab.setting.workers, steps=steps, sync_every=every, mix_prob=mix_prob,
        distance=lab.distance, draws=lab.setting.draws,
    )  # fmt: skip


def _decay(x: list[float], measured: list[Measured]) -> Fit:
    """The slope of ln error once the first third is over."""
    late = [at for at, value in enumerate(x) if value >= x[-1] / 3]
    return straight_line([x[at] for at in late], [measured[at] for at in late])


def _exactly(values: list[float]) -> list[Measured]:
    return [Measured(value, 0.0) for value in values]

"""The bound itself; and its noise and its transient, each where it dominates."""

import math

import torch

from palsgd.theory.algorithm import WeightedMean
from palsgd.theory.bound import Bound, explicit_bound
from palsgd.theory.fits import Measured, straight_line
from palsgd.theory.inequality import check
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

BOUND = "Theorem 2: the explicit bound"

# -- the bound itself --------------------------------------------------------------------------


def convergence(context: StudyContext) -> Study:
    """E[F(xhat_T)] - F* for every T up to the last, with alpha as it is, below the bound."""
    study = Study("bound", "Measured error and the bound", "steps T", log_x=False)
    at = _marks(context.setting, 40)
    mean = _Averages(context.problem, context.setting, at)
    found = context.outcome(
        context.problem, context.setting, distance=context.distance, runs=context.runs,
        snapshots=at, watch=mean.watch,
    )  # fmt: skip
    bounds = [
        explicit_bound(context.problem, context.setting, context.distance, steps) for steps in at
    ]
    x = [float(steps) for steps in at]
    errors = torch.stack([context.problem.excess(found.at[steps]) for steps in at])
    excess = [Measured.of(each) for each in errors]
    totals = torch.tensor([bound.total for bound in bounds], dtype=torch.float64)
    study.checks = [
        check(
            BOUND, "as the proof has it", f"T = {at[0]:,} to {at[-1]:,}", errors,
            totals.to(errors.device)[:, None].expand_as(errors),
        )
    ]  # fmt: skip
    study.lines = [
        Line("F at xhat", x, excess, [bound.total for bound in bounds]),
        Line("mean of F at the workers' mean", x, mean.of_mean),
        Line("bound", x, _exactly([bound.total for bound in bounds])),
    ]
    study.notes.append(_beside(at[-1], excess[-1], bounds[-1]))
    if (
        theorem_log(
            context.problem, context.setting.workers, context.setting.steps, context.distance
        )
        <= 0
    ):
        study.notes.append(
            "So few steps, or so much noise, that ln(mu^2 d0 T^2 K / sigma^2) is not positive and "
            "the theorem names no step size; p/(48 L H) stands in unless one was given."
        )
    return study


def _beside(steps: int, found: Measured, bound: Bound) -> str:
    if not math.isfinite(found.mean):
        return f"At T = {steps:,} the runs have diverged: alpha is too large for this problem."
    return (
        f"At T = {steps:,}: measured {found.mean:.3g} ± {found.half():.1g}, bound "
        f"{bound.total:.3g} (transient {bound.transient:.2g}, drift {bound.drift:.2g}, noise "
        f"{bound.noise:.2g}), {times(bound.total, found.mean)} times as much."
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


def speed_up(context: StudyContext) -> Study:
    study = Study("workers", "Error by number of workers", "workers K")
    base = context.setting
    most = largest_lr(context.problem, base.sync_every, base.mix_prob)
    # mu alpha T = 8 leaves of the start a factor exp(-16)
    steps = rounds_up(8 / (context.problem.mu * most), base.sync_every)
    workers = (1, 2, 4, 8, 16)
    if noiseless(study, context) or skipped(study, steps * len(workers)):
        return study
    settings = [with_(_theorem(context, steps, lr=most), workers=number) for number in workers]
    study.lines = [_line(context, "measured", [float(k) for k in workers], settings)]
    (line,) = study.lines
    study.exponents.append(
        Exponent(
            "error by K (1/K speed-up)",
            -1.0,
            line.fit(),
            line.bound_slope(),
            f"T = {steps:,}, alpha = p/(48 L H); the bound's drift term does not fall with K",
            context.few_seeds,
        )
    )
    return study


def by_steps(context: StudyContext) -> Study:
    study = Study("steps", "Error by number of steps", "steps T, with alpha of the theorem")
    if noiseless(study, context):
        return study
    shortest = _second_branch(context)
    lengths = [rounds_up(shortest * factor, context.setting.sync_every) for factor in (1, 2, 6)]
    if skipped(study, sum(lengths)):
        return study
    settings = [_theorem(context, steps) for steps in lengths]
    line = _line(context, "measured", [float(steps) for steps in lengths], settings)
    logs = [theorem_log(context.problem, s.workers, s.steps, context.distance) for s in settings]
    without = Line(
        "measured / ln A", line.x,
        [each.scaled(1 / log) for each, log in zip(line.measured, logs, strict=True)],
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
            f"{logs[-1]:.3g}, which O~ hides; {raw.mean:.2f} ± {raw.half():.2f} undivided",
            context.few_seeds,
        )
    )
    return study


def _second_branch(context: StudyContext) -> float:
    """The least T at which the theorem's alpha is ln A/(mu T); its start is then forgotten."""
    base = context.setting
    rate = context.problem.mu * largest_lr(context.problem, base.sync_every, base.mix_prob)
    steps = 10 / rate
    for _ in range(50):  # ln A grows slowly with T, so this settles at once
        steps = (
            max(1.0, theorem_log(context.problem, base.workers, int(steps), context.distance))
            / rate
        )
    return steps


def _theorem(context: StudyContext, steps: int, lr: float | None = None) -> Setting:
    base = context.setting
    return theorem_setting(
        context.problem, workers=base.workers, steps=steps, sync_every=base.sync_every,
        mix_prob=base.mix_prob, distance=context.distance, draws=base.draws, lr=lr,
    )  # fmt: skip


def _line(context: StudyContext, label: str, x: list[float], settings: list[Setting]) -> Line:
    problem, distance = context.problem, context.distance
    return Line(
        label, x,
        [context.excess(problem, s, distance=distance, runs=context.few_runs) for s in settings],
        [explicit_bound(problem, s, distance).total for s in settings],
    )  # fmt: skip


# -- exp(-pT / (kappa H)) ----------------------------------------------------------------------


def transient(context: StudyContext) -> Study:
    """Without noise, for other H and p, against mu alpha T = pT/(48 kappa H)."""
    study = Study(
        "transient", "Transient, without noise", "mu alpha T = pT / (48 kappa H)", log_x=False
    )
    problem, base, end = Noiseless.like(context.problem), context.setting, 12.0
    choices = [
        (base.sync_every, base.mix_prob),
        (2 * base.sync_every, base.mix_prob),
        (base.sync_every, base.mix_prob / 2),
    ]
    settings = [_transient_setting(context, problem, every, p, end) for every, p in choices]
    if skipped(study, sum(setting.steps for setting in settings)):
        return study
    for number, setting in enumerate(settings):
        at = _marks(setting, 24)
        mean = _Averages(problem, setting, at)
        found = context.outcome(
            problem, setting, distance=context.distance, runs=context.few_runs, snapshots=at,
            watch=None if number else mean.watch,
        )  # fmt: skip
        x = [problem.mu * setting.lr * steps for steps in at]
        label = f"H = {setting.sync_every}, p = {setting.mix_prob:g}"
        excess = [Measured.of(problem.excess(found.at[steps])) for steps in at]
        bound = [explicit_bound(problem, setting, context.distance, steps).total for steps in at]
        study.lines.append(Line(f"F at xhat, {label}", x, excess, bound))
        if not number:
            study.lines.append(Line(f"mean of F at the workers' mean, {label}", x, mean.of_mean))
    averaged, proved = (_decay(line.x, line.measured) for line in study.lines[:2])
    stated = _decay(study.lines[0].x, _exactly(study.lines[0].bound or [])).mean
    twice = (
        "F is quadratic near x* and xhat falls as (mu alpha T) exp(-mu alpha T), so F at xhat "
        "falls twice as fast but for that factor"
    )
    study.exponents = [
        Exponent(
            "ln error by pT/(kappa H), as the theorem prints it",
            -1.0,
            averaged.scaled(1 / 48),
            stated / 48,
            "O~ drops the 48 of alpha = p/(48 L H), but a factor in an exponent is no constant "
            "factor of the error",
            context.few_seeds,
        ),
        Exponent(
            "ln error by pT/(48 kappa H), as the proof has it", -1.0, averaged, stated, twice,
            context.few_seeds,
        ),
        Exponent(
            "ln of the weighted mean of F at xbar, by the same", -1.0, proved, stated,
            "this is the quantity the proof bounds", context.few_seeds,
        ),
    ]  # fmt: skip
    return study


def _transient_setting(
    context: StudyContext, problem: Problem, every: int, mix_prob: float, end: float
) -> Setting:
    lr = largest_lr(problem, every, mix_prob)
    steps = rounds_up(end / (problem.mu * lr), every)
    return theorem_setting(
        problem, workers=context.setting.workers, steps=steps, sync_every=every, mix_prob=mix_prob,
        distance=context.distance, draws=context.setting.draws,
    )  # fmt: skip


def _decay(x: list[float], measured: list[Measured]) -> Measured:
    """The slope of ln error over the last two thirds of x."""
    late = [at for at, value in enumerate(x) if value >= x[-1] / 3]
    return straight_line([x[at] for at in late], [measured[at] for at in late])


def _exactly(values: list[float]) -> list[Measured]:
    return [Measured(value) for value in values]

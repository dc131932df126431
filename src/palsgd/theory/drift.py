"""The term kappa H^2 sigma^2 / (mu T^2): workers that scatter between syncs."""

import math

import torch
from torch import Tensor

from palsgd.theory.bound import explicit_bound
from palsgd.theory.fits import Measured
from palsgd.theory.problems import Bent, Quadratic
from palsgd.theory.studies import (
    Exponent,
    Line,
    Study,
    StudyContext,
    rounds_up,
    say_outside,
    skipped,
    with_,
)
from palsgd.theory.theorem import Setting

# Of the quadratic's kin with a bend at the optimum. With L/mu = 5 its drift is large and runs are
# short. alpha = p/(6 L H) is what Lemmas 3 and 4 ask for; below p/(48 L H), the theorem's own,
# noise would hide the drift of so few workers.
_BENT_CONDITION = 5.0
_BENT_WORKERS = 1024
_SEEDS_PER_RUN = 80  # the mean over so many workers has little noise already
# Workers scatter to both sides, but settle left of x*, where the curvature is mu.
_TWIN_CURVATURE = 1.5  # in units of mu
_FORGOTTEN = 2.0  # mu alpha T: the same share of the way to the level where drift settles


def drift_by_interval(context: StudyContext) -> Study:
    study = Study("interval", "Drift by sync interval", "sync interval H", show_bound=False)
    problem, intervals = bent_problem(context), (4, 8, 16)
    lr = context.setting.mix_prob / (6 * problem.smoothness * intervals[-1])
    steps = math.ceil(_FORGOTTEN / (problem.mu * lr))
    if skipped(study, steps * len(intervals)):
        return study
    settings = [bent_setting(context, lr, every, rounds_up(steps, every)) for every in intervals]
    study.lines = [_drift_line(context, problem, [float(h) for h in intervals], settings)]
    say_outside(study, settings, problem)
    study.exponents.append(
        Exponent(
            "drift by H (H^2)",
            2.0,
            study.lines[0].fit(),
            study.lines[0].bound_slope(),
            f"bent problem, K = {_BENT_WORKERS}, alpha = {lr:.3g}. Lemma 3 bounds the square of a "
            "sum of up to H steps by H times the sum of squares; with independent noise it grows "
            "as the sum of squares, so H is lost there",
            bent_seeds(context),
        )
    )
    return study


def drift_by_steps(context: StudyContext) -> Study:
    every = 4
    xlabel = f"steps T = {_FORGOTTEN:g}/(mu alpha)"
    study = Study("drift", "Drift by number of steps", xlabel, show_bound=False)
    problem = bent_problem(context)
    most = context.setting.mix_prob / (6 * problem.smoothness * every)
    rates = [most / factor for factor in (1, 2, 4, 8)]
    lengths = [rounds_up(_FORGOTTEN / (problem.mu * lr), every) for lr in rates]
    if skipped(study, sum(lengths)):
        return study
    settings = [
        bent_setting(context, lr, every, steps) for lr, steps in zip(rates, lengths, strict=True)
    ]
    study.lines = [_drift_line(context, problem, [float(t) for t in lengths], settings)]
    say_outside(study, settings, problem)
    study.exponents.append(
        Exponent(
            "drift by T (1/T^2)",
            -2.0,
            study.lines[0].fit(),
            study.lines[0].bound_slope(),
            f"bent problem, K = {_BENT_WORKERS}, H = {every}, alpha from p/(6 L H) down to "
            "p/(48 L H)",
            bent_seeds(context),
        )
    )
    return study


def floor_by_workers(context: StudyContext) -> Study:
    """With more workers a quadratic's error keeps falling, and a bent problem's error stops at its
    drift."""
    study = Study("floor", "Where more workers stop helping", "workers K")
    bent, every, numbers = bent_problem(context), 4, (16, 128, 1024)
    lr = context.setting.mix_prob / (6 * bent.smoothness * every)
    steps = rounds_up(_FORGOTTEN / (bent.mu * lr), every)
    if skipped(study, steps * 2 * len(numbers)):
        return study
    ends = torch.tensor([bent.mu, bent.smoothness], dtype=torch.float64)
    for problem in (Quadratic.of(ends, bent.sigma, context.device), bent):
        settings = [with_(bent_setting(context, lr, every, steps), workers=k) for k in numbers]
        measured = [
            context.excess(
                problem, s, distance=0.0, runs=bent_runs(context) * numbers[-1] // s.workers
            )
            for s in settings
        ]
        study.lines.append(Line(problem.name, [float(k) for k in numbers], measured))
    say_outside(study, settings, bent)
    quadratic, flat = (line.fit() for line in study.lines)
    study.notes.append(
        f"From K = {numbers[0]} to {numbers[-1]} the quadratic's error falls as "
        f"K^({quadratic.mean:.2f} ± {quadratic.half():.2f}), that of the bent problem as "
        f"K^({flat.mean:.2f} ± {flat.half():.2f}): the mean of a linear gradient over scattered "
        "workers is the gradient at their mean, so identical data on a quadratic have no drift."
    )
    return study


def bent_runs(context: StudyContext) -> int:
    return max(8, context.runs // _SEEDS_PER_RUN)


def bent_seeds(context: StudyContext) -> int:
    """The seeds that so many runs stand for."""
    return bent_runs(context) * _SEEDS_PER_RUN


def bent_problem(context: StudyContext) -> Bent:
    smoothness = context.problem.smoothness
    sigma = context.problem.sigma or 1.0
    return Bent.of(1, smoothness / _BENT_CONDITION, smoothness, sigma, context.device)


def bent_setting(context: StudyContext, lr: float, every: int, steps: int) -> Setting:
    p = context.setting.mix_prob
    return Setting(
        workers=_BENT_WORKERS, steps=steps, sync_every=every, mix_prob=p, lr=lr,
        mix_rate=p / (2 * every * lr), draws=context.setting.draws,
    )  # fmt: skip


def _drift_line(
    context: StudyContext, problem: Bent, x: list[float], settings: list[Setting]
) -> Line:
    """From x*, so that all error is noise or drift: F at the mean of xhat over runs, from which
    the noise is gone."""
    runs = bent_runs(context)
    parts = [drift_parts(context, problem, setting, runs=runs) for setting in settings]
    bounds = [explicit_bound(problem, setting, 0.0).drift for setting in settings]
    return Line("F at the mean of xhat", x, [Measured.of(each, FITTED) for each in parts], bounds)


FITTED = 1  # number that drift_parts chooses so that its parts spread the least


def drift_parts(
    context: StudyContext, problem: Bent, setting: Setting, average_lr: float | None = None, *,
    runs: int,
) -> Tensor:  # fmt: skip
    """Each run's part in F at the mean of xhat: their mean is F there, and their spread its error.

    A quadratic with the same coins and noise has no drift, so the mean of its xhat is x* exactly.
    What both have in common is chance, and is taken out of the bent problem's xhat by regression.
    """
    curvature = torch.full((problem.dim,), _TWIN_CURVATURE * problem.mu, dtype=torch.float64)
    twin = Quadratic.of(curvature, problem.sigma, context.device)
    xhat, chance = (
        context.outcome(each, setting, distance=0.0, runs=runs, average_lr=average_lr).average
        for each in (problem, twin)
    )
    off, common = xhat - xhat.mean(0), chance - chance.mean(0)
    steady = xhat - (off * common).sum() / common.square().sum() * chance
    mean = steady.mean(0)
    return problem.excess(mean) + ((steady - mean) * problem.gradient(mean)).sum(1)

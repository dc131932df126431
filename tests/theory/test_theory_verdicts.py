"""What the theory lab says: words beyond doubt, what eta is worth, and a conclusion."""

import itertools
import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from palsgd.theory import Bent, Noiseless, Quadratic, RandomSource, Setting, run
from palsgd.theory.conclusion import conclusion
from palsgd.theory.drift import FITTED, drift_parts
from palsgd.theory.eta_worth import DRIFT, NOISE, TRANSIENT, by_mix_rate, shrink
from palsgd.theory.fits import Measured
from palsgd.theory.inequality import Check, check
from palsgd.theory.results import Results
from palsgd.theory.studies import (
    MARGIN,
    RATES,
    Exponent,
    Line,
    Study,
    StudyContext,
    Worth,
    say_outside,
)
from palsgd.theory.theorem import theorem_setting
from palsgd.theory.verdicts import LEVEL, Family, judged

ONE = Family(1)


def word(mean, half, claimed=-1.0, seeds=100):
    return judged(Measured(mean, half / 1.959964), claimed, MARGIN, RATES, ONE, seeds)


@pytest.mark.parametrize(
    ("mean", "half", "expected"),
    [
        (-1.0, 0.24, "as claimed"),
        (-1.1, 0.05, "as claimed"),  # not equal, but nearer to -1 than to any other half
        (-1.3, 0.2, "better than claimed"),
        (-0.5, 0.4, "worse than claimed"),
        (-1.0, 0.3, "undecided"),
        (-0.8, 0.25, "undecided"),
        (math.nan, 0.1, "undecided"),
    ],
)
def test_an_exponent_is_judged_by_its_interval_and_the_margin(mean, half, expected):
    assert word(mean, half).word == expected


@pytest.mark.parametrize(("mean", "half"), [(-1.0, 0.4), (-0.8, 0.3), (-1.2, 0.9)])
def test_the_seeds_that_are_named_for_an_undecided_exponent_decide_it(mean, half):
    found = word(mean, half)
    assert found.word == "undecided"
    assert not found.seeds or f"about {found.seeds:,} seeds would decide" in str(found)
    narrower = half * math.sqrt(100 / found.seeds)
    assert word(mean, narrower).decided
    assert not word(mean, 1.15 * narrower).decided  # and not many fewer would


def test_all_words_of_a_family_are_right_in_nineteen_runs_of_twenty():
    """Forty statements whose truth is known, judged together: no wrong word in 95 % of the runs.
    One at a time, most runs would have one."""
    rng, statements, families, runs = np.random.default_rng(8), 40, {40: 0, 1: 0}, 500
    for _ in range(runs):
        off = rng.normal(size=statements)
        for size in families:
            words = {
                judged(Measured(-1 + 0.2 * each, 0.2), -1.0, MARGIN, RATES, Family(size), 100).word
                for each in off
            }
            families[size] += bool(words & {RATES.below, RATES.above})
    assert families[40] / runs < LEVEL + 3 * math.sqrt(LEVEL * (1 - LEVEL) / runs)
    assert families[1] / runs > 0.5


def test_lemmas_and_exponents_share_one_level():
    """More statements, more evidence for each: what one check shows alone is undecided among
    many."""
    rng = torch.Generator().manual_seed(0)
    margin = torch.randn(1, 400, generator=rng).double()
    margin = margin - margin.mean() + 3 * margin.std() / 20  # three standard errors above 0
    found = check("", "", "", 0 * margin, margin)
    assert found.errors == pytest.approx(3, rel=1e-6)
    assert found.verdict(ONE).word == "holds"
    among = found.verdict(Family(60))
    assert among.word == "undecided"
    # 3.34 standard errors are needed among 60 (normal distribution), so 400 (3.34/3)^2 seeds
    assert 490 <= among.seeds <= 510


def test_a_run_that_diverges_breaks_the_bound():
    left = torch.tensor([[1.0, 2.0], [math.inf, 1e300]]).double()
    assert check("", "", "", left, torch.ones(2, 2).double() * 3).verdict(ONE).word == "fails"


# -- points outside the theorem ----------------------------------------------------------------


def test_points_outside_the_theorem_are_named_with_their_axis_and_reason():
    problem = Quadratic.of(torch.tensor([0.5, 1.0]), sigma=1.0)
    study = Study("", "", "mix probability p", [Line("", [0.1, 0.5, 0.75], [])])
    alpha = 0.5 / (48 * 4)
    settings = [
        Setting(workers=2, steps=8, sync_every=4, mix_prob=p, lr=alpha, mix_rate=p / (8 * alpha))
        for p in study.lines[0].x
    ]
    say_outside(study, settings, problem)
    assert study.notes == [
        "Outside the theorem are the points at mix probability p = 0.1 (alpha is above "
        "p/(48 L H)); 0.75 (p is above 1/2)."
    ]


# -- drift, with the noise taken out -----------------------------------------------------------


def context_of(problem, *, runs, **changes):
    setting = theorem_setting(problem, **{
        "workers": 4, "steps": 256, "sync_every": 4, "mix_prob": 0.5, "distance": 1.0, **changes,
    })  # fmt: skip
    return StudyContext(problem=problem, setting=setting, distance=1.0, runs=runs, seed=3)


def test_a_twin_without_drift_takes_noise_out_of_the_drift_and_leaves_the_drift():
    bent = Bent.of(1, 0.2, 1.0, sigma=2.0)
    lr = 0.5 / 24
    setting = Setting(workers=256, steps=480, sync_every=4, mix_prob=0.5, lr=lr,
                      mix_rate=0.5 / (8 * lr))  # fmt: skip
    context = context_of(bent, runs=100)
    xhat = run(bent, setting, bent.start(0.0), RandomSource(bent, setting, runs=40, seed=3)).average
    mean = xhat.mean(0)
    plain = Measured.of(bent.excess(mean) + (xhat - mean)[:, 0] * bent.gradient(mean))
    steady = Measured.of(drift_parts(context, bent, setting, runs=40), FITTED)
    assert steady.error < plain.error / 3
    assert abs(steady.mean - plain.mean) < 4 * plain.error
    assert steady.mean > 8 * steady.error  # there is a drift


# -- what eta is worth -------------------------------------------------------------------------


@pytest.mark.parametrize(("every", "p", "beta"), [(4, 0.5, 0.125), (5, 0.3, 1.0), (3, 0.7, 0.0)])
def test_shrink_is_a_rounds_progress_over_all_coins(every, p, beta):
    """By hand: constant gradients, every sequence of coins with its probability."""
    alpha, progress = 1e-3, {}
    for weight in (beta, 0.0):
        total = 0.0
        for coins in itertools.product([True, False], repeat=every):
            x = 0.0
            for mixes in coins:
                x = (1 - weight) * x if mixes else x - alpha / (1 - p)
            total += math.prod(p if mixes else 1 - p for mixes in coins) * x
        progress[weight] = total
    setting = Setting(workers=1, steps=every, sync_every=every, mix_prob=p, lr=alpha,
                      mix_rate=beta * p / alpha)  # fmt: skip
    assert shrink(setting) == pytest.approx(progress[beta] / progress[0.0], rel=1e-9)


@pytest.fixture(scope="module")
def eta_study():
    problem = Quadratic.of(torch.ones(2), sigma=2.0)
    return by_mix_rate(context_of(problem, runs=160, sync_every=2))


@pytest.fixture(scope="module")
def worths(eta_study):
    return {(each.regime, each.times, each.alpha == 1): each for each in eta_study.worths}


def test_eta_slows_the_transient_as_a_smaller_alpha_does(worths):
    """In the transient eta > 0 costs, and costs what a smaller alpha with eta = 0 does."""
    for times in (1.0, 4.0):
        assert worths[TRANSIENT, times, True].verdict(Family(18)).word == "costs"
        same = worths[TRANSIENT, times, False]
        assert same.verdict(Family(18)).word == "makes no difference"


def test_no_eta_has_a_lower_floor_than_the_smaller_alpha(worths):
    found = [worths[regime, 4.0, False] for regime in (NOISE, DRIFT)]
    assert all(each.verdict(Family(18)).word != "gains" for each in found)
    assert found[1].verdict(Family(18)).word == "costs"


def test_worths_pair_runs_by_seed(eta_study, worths):
    """The same coins and noise: the interval is several times narrower than that of two
    independent errors."""
    (noise,) = [line for line in eta_study.lines if line.label == NOISE]
    without, stated = noise.measured[:2]
    apart = math.hypot(*(each.error / each.mean for each in (without, stated)))
    found = worths[NOISE, 1.0, True].ratio
    assert found.error < apart / 4
    assert found.mean == pytest.approx(stated.mean / without.mean)


# -- the conclusion ----------------------------------------------------------------------------


def results_of(*, exponents=(), worths=(), checks=(), error=0.5):
    problem = Noiseless.like(Quadratic.of(torch.ones(2), sigma=1.0))
    bound = check("Theorem 2: the explicit bound", "", "T = 1 to 9",
                  error * torch.ones(2, 4), torch.ones(2, 4))  # fmt: skip
    line = Line("F at xhat", [1.0, 9.0], [Measured(error)] * 2, [1.0, 1.0])
    first = Study("bound", "", "", [line], list(exponents), [bound], list(worths))
    return Results(context_of(problem, runs=8), [first], list(checks))


def worth(regime, ratio, alpha, error=0.001):
    return Worth(regime, 1.0, alpha, Measured(ratio, error), 100)


def broken(claim, form):
    return Check(claim, form, "somewhere", 2.0, 1.0, None, True, 1, 1, 1)


def test_the_conclusion_says_how_loose_the_bound_is_or_that_it_fails():
    holds, fails = (conclusion(results_of(error=error))[0] for error in (0.25, 2.0))
    assert (
        "The bound holds at every T that was measured, and is 4 times the error at T = 9" in holds
    )
    assert fails.startswith("The bound: fails, at T = 1 to 9: 2 beside 1")


@pytest.mark.parametrize(
    ("ratio", "error", "said"),
    [
        (1.3, 0.001, "Nothing in this theory rewards mixing"),
        (1.0, 0.001, "Nothing in this theory rewards mixing"),
        (0.7, 0.001, "Mixing is rewarded beyond what a smaller alpha gives in the noise floor"),
        (0.9, 0.2, "No reward for mixing was found; undecided in the noise floor"),
    ],
)
def test_the_conclusion_on_mixing_follows_the_measurement(ratio, error, said):
    """A gain against the same alpha alone is none, as a smaller alpha has it too."""
    found = conclusion(results_of(worths=[worth(NOISE, 0.5, 1.0), worth(NOISE, ratio, 0.9, error)]))
    assert any(said in each for each in found)
    assert any("0.500 ± 0.002 in the noise floor (gains)" in each for each in found)


def test_the_conclusion_counts_printed_statements_once_and_names_them():
    checks = [broken("Lemma 1", "as stated"), broken("Lemma 1", "as stated"),
              broken("Lemma 2", "as defined"), broken("Lemma 2", "as the algorithm")]  # fmt: skip
    found = conclusion(results_of(checks=checks))
    assert (
        "Of the proof, 2 statements fail as printed: Lemma 1 (somewhere); Lemma 2 (somewhere). In "
        "the form that the algorithm has, 1 fails: Lemma 2 (somewhere)."
    ) in found


def test_the_conclusion_states_the_level_and_the_number_of_statements():
    exponents = [Exponent("by K", -1.0, Measured(-1.0, 0.2), None, "", 100)]
    found = conclusion(results_of(exponents=exponents, checks=[broken("Lemma 1", "as stated")]))
    assert "3 statements were judged together" in found[-1]
    assert "at most 5%" in found[-1]
    assert "Undecided: 1, named in the tables." in found[-1]
    assert "Undecided (about" in found[1]


def test_a_pull_is_another_way_to_say_eta():
    """Over a round's p H mixing steps, on average, (1 - beta)^(p H) = 1 - pull is left."""
    problem = Quadratic.of(torch.ones(2), sigma=1.0)
    setting = context_of(problem, runs=8, pull=0.4).setting
    assert (1 - setting.beta) ** (0.5 * 4) == pytest.approx(0.6)
    assert replace(setting, mix_rate=0.0) == context_of(problem, runs=8, mix_rate=0.0).setting
    with pytest.raises(ValueError, match="both say how strongly"):
        context_of(problem, runs=8, pull=0.4, mix_rate=1.0)

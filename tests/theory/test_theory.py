"""The theory lab: that it runs the product's algorithm, and that its verdicts are right."""

import html
import itertools
import math
import subprocess
import sys
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch
from scipy import stats
from torch import nn

import palsgd
from palsgd.schedule import _uniforms
from palsgd.theory import (
    Bent,
    Logistic,
    Noiseless,
    Quadratic,
    RandomSource,
    Setting,
    bound_terms,
    explicit_bound,
    run,
    spectrum,
)
from palsgd.theory.algorithm import WeightedMean, plans
from palsgd.theory.fits import Measured, paired_ratio, power_law, reach
from palsgd.theory.inequality import check
from palsgd.theory.lemmas import ALGORITHM, DEFINED, STATED, Trajectory, all_checks, lemma2
from palsgd.theory.studies import StudyContext
from palsgd.theory.theorem import theorem_setting
from palsgd.theory.verdicts import Family
from support.commands import environment, strict_json
from support.commands import palsgd as command

DRAWS = ("independent", "balanced", "shared")
PROBLEMS = {
    "quadratic": Quadratic.of(spectrum("geometric", 3, 0.2, 1.0), sigma=0.7),
    "bent": Bent.of(3, 0.2, 1.0, sigma=0.7),
    "logistic": Logistic.of(3, 0.2, 1.0, rows=16),
}


# -- the product's algorithm -------------------------------------------------------------------


class Given:
    """Coins and samples that were drawn before, for one run or several."""

    def __init__(self, coins, samples):
        self.all_coins, self.samples = coins, iter(samples)  # (rounds, H, runs, workers)
        self.runs = coins.shape[2]

    def coins(self, round):
        return self.all_coins[round]

    def sample(self):
        return next(self.samples)


def planned(draws, seeds, rounds, setting):
    coins = [
        [
            [
                palsgd.round_plan(
                    seed=seed, worker=k, round=r, sync_every=setting.sync_every,
                    mix_prob=setting.mix_prob, draws=draws,
                )
                for k in range(setting.workers)
            ]
            for seed in seeds
        ]
        for r in range(rounds)
    ]  # fmt: skip
    return torch.tensor(coins).permute(0, 3, 1, 2)


class Point(nn.Module):
    def __init__(self, x):
        super().__init__()
        self.x = nn.Parameter(x.clone())


def loss_of(problem, model, sample):
    """f(x, sample), written out anew; torch finds the gradient."""
    x = model.x
    if isinstance(problem, Quadratic):
        return 0.5 * (problem.curvatures * x * x).sum() + sample @ x
    if isinstance(problem, Bent):
        curvature = problem.mu + (problem.smoothness - problem.mu) * (x > 0).double()
        return 0.5 * (curvature * x * x).sum() + sample @ x
    fit = torch.log1p(torch.exp(-problem.rows[sample] @ x))
    return fit + 0.5 * problem.mu * (x * x).sum()


@pytest.mark.parametrize("draws", DRAWS)
@pytest.mark.parametrize("name", PROBLEMS)
def test_each_run_is_palsgd_in_the_exact_simulator_with_the_same_coins_and_samples(name, draws):
    problem, seeds = PROBLEMS[name], (3, 11)
    setting = Setting(workers=3, steps=32, sync_every=5, mix_prob=0.4, lr=0.05, mix_rate=2.0,
                      draws=draws)  # fmt: skip
    rounds = -(-setting.steps // setting.sync_every)
    coins = planned(draws, seeds, rounds, setting)
    source = RandomSource(problem, setting, runs=len(seeds), seed=5)
    samples = [source.sample() for _ in range(setting.steps)]
    start, anchors = problem.optimum + torch.tensor([1.0, -1.0, 0.01]).double(), []

    def watch(clock, before, after, anchor):
        if (clock + 1) % setting.sync_every == 0 or clock + 1 == setting.steps:
            anchors.append(after.mean(1))

    ours = run(problem, setting, start, Given(coins, samples), watch=watch)
    for number, seed in enumerate(seeds):
        theirs = []

        def used(worker, number=number):
            """A mixing step takes no data."""
            for t, sample in enumerate(samples):
                if not coins[t // setting.sync_every, t % setting.sync_every, number, worker]:
                    yield sample[number, worker]

        result = palsgd.simulate(
            workers=3, steps=setting.steps, model=lambda: Point(start), vectorize=False,
            loss=partial(loss_of, problem), data=used, progress=False,
            method=lambda model, seed=seed: palsgd.PALSGD(
                model, torch.optim.SGD(model.parameters(), lr=setting.lr),
                sync_every=setting.sync_every, mix_prob=setting.mix_prob,
                mix_rate=setting.mix_rate, draws=draws, seed=seed, same_data=True,
                outer=lambda params: torch.optim.SGD(params, lr=1.0),
            ),
            evaluate=lambda model, seen=theirs: seen.append(model.x.detach().clone()) or {},
        )  # fmt: skip
        found = torch.stack([anchor[number] for anchor in anchors])
        torch.testing.assert_close(found, torch.stack(theirs), rtol=1e-12, atol=1e-13)
        torch.testing.assert_close(found[-1], result.model.x.detach(), rtol=1e-12, atol=1e-13)
        # xhat: the anchor of each step, in front of it, with the theorem's weights
        held = torch.stack([start, *theirs])[[t // 5 for t in range(setting.steps)]]
        weights = (1 - problem.mu * setting.lr) ** -torch.arange(1.0, setting.steps + 1).double()
        xhat = (weights[:, None] * held).sum(0) / weights.sum()
        torch.testing.assert_close(ours.average[number], xhat, rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("draws", DRAWS)
def test_plans_of_all_runs_are_round_plan_of_each(draws):
    """From the numbers that round_plan draws, handed over in its order: common, then own."""
    H, seeds, workers, p, round = 7, (0, 5, 2023), 4, 0.3, 6

    def uniforms(steps, runs, width):
        streams = [(round, 0)] if width == 1 else [(round, 1 + k) for k in range(width)]
        drawn = [[_uniforms(seed, stream, steps) for stream in streams] for seed in seeds]
        return torch.tensor(np.array(drawn)).permute(2, 0, 1)

    found = plans(draws, p, H, len(seeds), workers, uniforms)
    for (s, seed), k in itertools.product(enumerate(seeds), range(workers)):
        expected = palsgd.round_plan(
            seed=seed, worker=k, round=round, sync_every=H, mix_prob=p, draws=draws
        )
        assert found[:, s, k].tolist() == expected


def test_weights_that_would_overflow_still_average():
    values = np.random.default_rng(0).normal(size=5000)
    mean = WeightedMean(0.7)  # 0.7^-5000 is far beyond a double
    for value in values:
        mean.add(torch.tensor([value], dtype=torch.float64))
    relative = 0.7 ** np.arange(4999, -1, -1.0)
    assert mean.value.item() == pytest.approx((relative * values).sum() / relative.sum(), rel=1e-12)


def exact_error(problem, setting, distance):
    """E[F(xhat)] - F* on a quadratic, without sampling: second moments of (x_1..x_K, x, sum of
    weighted anchors) for each coordinate, over all coins of a step."""
    K, p, total = setting.workers, setting.mix_prob, 0.0
    noise = problem.sigma**2 / problem.dim * (setting.lr / (1 - p)) ** 2
    weights = (1 - problem.mu * setting.lr) ** -np.arange(1.0, setting.steps + 1)
    for c in problem.curvatures.tolist():
        z = np.array([1.0] * (K + 1) + [0.0]) * distance / math.sqrt(problem.dim)
        moment = np.outer(z, z)
        for t in range(setting.steps):
            following = np.zeros_like(moment)
            for coins in itertools.product([False, True], repeat=K):
                A, added = np.eye(K + 2), np.zeros((K + 2, K + 2))
                A[K + 1, K] = weights[t] / weights.sum()
                for k, mixes in enumerate(coins):
                    A[k, k] = 1 - setting.beta if mixes else 1 - setting.lr / (1 - p) * c
                    A[k, K] = setting.beta if mixes else 0
                    added[k, k] = 0 if mixes else noise
                chance = math.prod(p if mixes else 1 - p for mixes in coins)
                following += chance * (A @ moment @ A.T + added)
            moment = following
            if (t + 1) % setting.sync_every == 0:
                sync = np.eye(K + 2)
                sync[: K + 1, : K + 1] = 0
                sync[: K + 1, :K] = 1 / K
                moment = sync @ moment @ sync.T
        total += c / 2 * moment[K + 1, K + 1]
    return total


@pytest.mark.parametrize(
    "changes", [{}, {"lr": 0.2, "mix_rate": 2.0}, {"mix_prob": 0.8, "sync_every": 5}]
)
def test_the_measured_error_is_the_exact_expectation(changes):
    problem = Quadratic.of(spectrum("ends", 2, 0.5, 1.0), sigma=1.0)
    setting = Setting(**{
        "workers": 2, "steps": 30, "sync_every": 3, "mix_prob": 0.4, "lr": 0.05, "mix_rate": 4.0,
        **changes,
    })  # fmt: skip
    source = RandomSource(problem, setting, runs=20_000, seed=1)
    errors = problem.excess(run(problem, setting, problem.start(0.3), source).average)
    error = errors.std().item() / math.sqrt(len(errors))
    assert abs(errors.mean().item() - exact_error(problem, setting, 0.3)) < 4 * error


# -- the problems' constants -------------------------------------------------------------------


@pytest.mark.parametrize("name", PROBLEMS)
def test_every_sample_is_mu_convex_and_l_smooth_and_the_bounds_are_reached(name):
    problem, generator = PROBLEMS[name], torch.Generator().manual_seed(0)
    x, y = (torch.randn(500, 40, 3, generator=generator).double() for _ in range(2))
    sample = problem.draw(500, 40, generator)
    step = x - y
    change = problem.noisy_gradient(x, sample) - problem.noisy_gradient(y, sample)
    length = step.norm(dim=-1)
    assert (change.norm(dim=-1) <= problem.smoothness * length * (1 + 1e-12)).all()
    assert ((change * step).sum(-1) >= problem.mu * length**2 * (1 - 1e-12)).all()


@pytest.mark.parametrize("name", PROBLEMS)
def test_optimum_sigma_and_gradient_are_what_the_samples_have(name):
    problem, generator = PROBLEMS[name], torch.Generator().manual_seed(0)
    there = problem.optimum.expand(200, 1000, 3)
    drawn = problem.noisy_gradient(there, problem.draw(200, 1000, generator)).reshape(-1, 3)
    error = drawn.std(0) / math.sqrt(len(drawn))
    assert (drawn.mean(0).abs() < 4.5 * error).all()
    squares = drawn.square().sum(1)
    assert abs(squares.mean() - problem.sigma**2) < 4.5 * squares.std() / math.sqrt(len(squares))
    x = torch.randn(3, generator=generator).double().requires_grad_()
    (slope,) = torch.autograd.grad(problem.excess(x), x)
    torch.testing.assert_close(problem.gradient(x.detach()), slope)
    assert problem.gradient(problem.optimum).norm() < 1e-12
    assert problem.excess(problem.optimum).abs() < 1e-15


@pytest.mark.parametrize("kind", ["geometric", "linear", "ends"])
def test_a_spectrum_runs_from_mu_to_l_to_the_last_bit(kind):
    found = spectrum(kind, 5, 0.1, 0.7)
    assert (found[0], found[-1]) == (0.1, 0.7)
    assert ((found >= 0.1) & (found <= 0.7)).all()
    assert Quadratic.of(found, 1.0).mu == 0.1


# -- the theorem as stated ---------------------------------------------------------------------


def test_alpha_eta_and_the_bound_are_those_of_the_theorem():
    problem = Quadratic.of(torch.tensor([0.5, 2.0]), sigma=3.0)
    short, long = (
        theorem_setting(problem, workers=5, steps=steps, sync_every=8, mix_prob=0.25, distance=1.5)
        for steps in (1000, 1_000_000)
    )
    assert short.lr == pytest.approx(0.25 / (48 * 2 * 8))
    alpha = math.log(0.25 * 2.25 * 1e12 * 5 / 9) / (0.5 * 1e6)
    assert long.lr == pytest.approx(alpha)
    assert long.mix_rate == pytest.approx(0.25 / (2 * 8 * alpha))
    assert long.beta == pytest.approx(1 / 16)
    bound = explicit_bound(problem, short, 1.5)
    a = short.lr
    assert bound.transient == pytest.approx(5 * 2.25 / a * math.exp(-0.5 * a * 1000))
    assert bound.drift == pytest.approx(5 * 81 * 2 * 64 * a**2 * 9)
    assert bound.noise == pytest.approx(5 * 12 * a * 9 / 5)
    assert bound.total == bound.transient + bound.drift + bound.noise
    assert short.outside(problem) == long.outside(problem) == []


def test_where_the_theorem_names_no_alpha_its_largest_stands_in_and_this_is_said():
    context = small_context(Quadratic.of(torch.ones(2), sigma=1e4))
    assert context.setting.lr == 0.5 / (48 * 4)
    assert "the theorem names no step size" in bound_terms.convergence(context).notes[1]


def test_runs_that_diverge_are_said_to():
    (note,) = bound_terms.convergence(small_context(lr=1.9, steps=6000, runs=8)).notes
    assert "diverged" in note


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"mix_prob": 0.6}, "mix_prob=0.6 is above 1/2"),
        ({"lr": 0.01}, "lr=0.01 is above p/(48 L H)"),
        ({"mix_rate": 1.0}, "mix_rate=1 is not p/(2 H alpha)"),
        ({"draws": "shared"}, "draws='shared'"),
        ({"draws": "balanced"}, "draws='balanced'"),
    ],
)
def test_what_the_theorem_does_not_cover_is_said(changes, said):
    problem = PROBLEMS["quadratic"]
    setting = theorem_setting(problem, **{
        "workers": 2, "steps": 10, "sync_every": 4, "mix_prob": 0.5, "distance": 1.0, **changes,
    })  # fmt: skip
    (reason,) = setting.outside(problem)
    assert said in reason


# -- fits and verdicts -------------------------------------------------------------------------


def test_intervals_of_exponents_cover_the_truth_nineteen_times_in_twenty():
    rng, hits = np.random.default_rng(4), 0
    x = np.array([1.0, 2.0, 4.0, 8.0, 16.0])
    for _ in range(400):
        errors = 0.02 * np.array([1, 3, 1, 2, 1])
        y = 5 * x**-1.5 * (1 + errors * rng.normal(size=5))
        fit = power_law(x, [Measured(m, e * m) for m, e in zip(y, errors, strict=True)])
        hits += abs(fit.mean + 1.5) < fit.half()
    assert 0.93 <= hits / 400 <= 0.995  # wider than need be where the points scatter by chance


def test_an_interval_widens_where_the_line_is_not_the_law():
    x = [1.0, 2.0, 4.0, 8.0]
    straight, bent = ([Measured(f(v), 1e-3 * f(v)) for v in x]
                      for f in (lambda v: v**-1.0, lambda v: 0.1 + v**-1.0))  # fmt: skip
    assert power_law(x, bent).error > 5 * power_law(x, straight).error


def test_reaches_are_students():
    for freedom in (1, 2, 3, 6, 17, 199, math.inf):
        for doubt in (0.05, 1e-3, 1e-6):
            exact = stats.t.isf(doubt / 2, freedom)
            assert reach(doubt, freedom) == pytest.approx(exact, rel=1e-6)


def test_a_number_that_was_fitted_costs_a_degree_of_freedom():
    """As in a regression: the squares are divided by n - 2."""
    values = torch.tensor([1.0, 2.0, 4.0, 9.0, 3.0], dtype=torch.float64)
    found = Measured.of(values, fitted=1)
    squares = ((values - values.mean()) ** 2).sum().item()
    assert found.freedom == 3
    assert found.error == pytest.approx(math.sqrt(squares / 3 / 5))


def test_a_paired_ratio_covers_the_truth_and_is_narrower_than_its_parts():
    """Parts that share most of their chance, with ratio 1.2."""
    rng, hits, n = np.random.default_rng(5), 0, 60
    for _ in range(400):
        shared = rng.gamma(2.0, size=n)
        own = torch.tensor(1.2 * shared + 0.2 * rng.normal(size=n))
        other = torch.tensor(shared + 0.2 * rng.normal(size=n))
        ratio = paired_ratio(own, other)
        hits += abs(ratio.mean - 1.2) < ratio.half()
    assert 0.92 <= hits / 400 <= 0.98
    assert ratio.error < Measured.of(own).error / Measured.of(own).mean / 2


@pytest.mark.parametrize(
    ("shift", "verdict"), [(1.0, "holds"), (-1.0, "fails"), (0.0, "undecided")]
)
def test_a_verdict_is_given_only_beyond_doubt(shift, verdict):
    rng = torch.Generator().manual_seed(2)
    left = torch.randn(20, 400, generator=rng).double()
    right = left.flip(1) + shift  # the same law, paired with another run
    assert check("", "", "", left, right).verdict(Family(50)).word == verdict


def test_one_step_that_fails_makes_the_whole_fail():
    left = torch.zeros(10, 50).double()
    right = torch.ones(10, 50).double()
    right[7] = -1
    assert check("", "", "", left, right).verdict(Family(50)).word == "fails"


# -- the lemmas --------------------------------------------------------------------------------


def small_context(problem=None, *, runs=400, **changes):
    problem = problem or Quadratic.of(spectrum("linear", 2, 0.5, 1.0), sigma=1.0)
    setting = theorem_setting(problem, **{
        "workers": 4, "steps": 256, "sync_every": 4, "mix_prob": 0.5, "distance": 1.0, **changes,
    })  # fmt: skip
    return StudyContext(problem=problem, setting=setting, distance=1.0, runs=runs, seed=3)


def test_the_measured_variance_of_g_is_its_formula():
    """At the first step of a round, where nobody has departed: ((sigma^2 + p |grad F|^2)/(1-p))/K.
    Later the paper's own definition, with 1/K in its mixing term, has another."""
    context = small_context(runs=20_000)
    problem, p = context.problem, context.setting.mix_prob
    path = Trajectory(context, problem, replace(context.setting, steps=2), form=ALGORITHM,
                      distance=1.0, runs=context.runs)  # fmt: skip
    first = path["variance"][0]
    slope = problem.gradient(problem.start(1.0)).square().sum().item()
    exact = (problem.sigma**2 + p * slope) / (1 - p) / context.setting.workers
    assert abs(first.mean() - exact) < 4 * first.std() / math.sqrt(context.runs)


@pytest.mark.parametrize("problem", [None, Logistic.of(2, 0.5, 1.0, rows=16)])
def test_lemmas_hold_for_the_algorithm_and_fail_as_written_where_documented(problem):
    """Those of docs/theory.md, on both kinds of problem."""
    found = {(c.claim, c.form, c.where): c.verdict(Family(66)).word
             for c in all_checks(small_context(problem))}  # fmt: skip
    failing = {key[:2] for key, verdict in found.items() if verdict != "holds"}
    assert failing == {
        ("Lemma 3: no departure where (t+1) mod H = 0", STATED),
        ("Proof: sum w_t F(x_t) <= sum w_t F(xbar_t)", STATED),
        ("Proof: 8L + 12 eta^2 alpha (1-p)/(pK) <= 9L", STATED),
        ("Lemma 4 for sequences, alpha = p/(6LH), as stated", STATED),
        ("Lemma 1: one step", STATED),
        ("Lemma 2: variance of g", DEFINED),
        ("Lemma 2: variance of g", ALGORITHM),
    }
    # of Lemma 2 in the algorithm's own form only where the coins are not independent
    own = {where: v for (claim, form, where), v in found.items()
           if claim == "Lemma 2: variance of g" and form == ALGORITHM}  # fmt: skip
    assert {where for where, v in own.items() if v == "fails"} == {
        f"{draws} draws, K = 256, H = 4, p = 1/2, no noise" for draws in ("balanced", "shared")
    }


def test_with_one_worker_the_papers_definition_is_the_algorithm():
    context = small_context(workers=1, runs=50)
    paths = [
        Trajectory(context, context.problem, context.setting, form=form, distance=1.0, runs=50)
        for form in (ALGORITHM, DEFINED)
    ]
    checks = [lemma2(path, "", "") for path in paths]
    assert checks[0] == checks[1]
    assert torch.equal(paths[0]["variance"], paths[1]["variance"])


# -- the studies -------------------------------------------------------------------------------


def exponents(study):
    return {each.claim: each for each in study.exponents}


@pytest.mark.parametrize("name", PROBLEMS)
def test_the_bound_holds_for_every_t(name):
    line = bound_terms.convergence(small_context(PROBLEMS[name], runs=50)).lines[0]
    assert line.x[-1] == 256
    assert all(m.mean + m.half() < b for m, b in zip(line.measured, line.bound, strict=True))


def test_error_falls_with_workers_as_claimed():
    problem = Quadratic.of(torch.ones(2), sigma=1.0)
    (found,) = bound_terms.speed_up(small_context(problem, runs=1600, sync_every=2)).exponents
    assert found.verdict(Family(1)).word == "as claimed"


def test_the_transient_is_the_proofs_and_not_the_printed_one():
    problem = Quadratic.of(torch.ones(2), sigma=1.0)
    found = exponents(bound_terms.transient(small_context(problem, sync_every=2)))
    printed = found["ln error by pT/(kappa H), as the theorem prints it"]
    assert printed.verdict(Family(66)).word == "worse than claimed"
    proved = found["ln of the weighted mean of F at xbar, by the same"]
    assert proved.verdict(Family(66)).word == "as claimed"
    assert found["ln error by pT/(48 kappa H), as the proof has it"].measured.mean < -1.5


def test_scattered_workers_drift_on_a_bent_problem_and_not_on_a_quadratic():
    """The mean of xhat over runs, in standard errors from x*."""
    found = {}
    for problem in (Bent.of(1, 0.2, 1.0, sigma=1.0), Quadratic.of(torch.tensor([0.2, 1.0]), 1.0)):
        lr = 0.5 / (6 * 4)
        setting = Setting(workers=1024, steps=480, sync_every=4, mix_prob=0.5, lr=lr,
                          mix_rate=0.5 / (2 * 4 * lr))  # fmt: skip
        source = RandomSource(problem, setting, runs=8, seed=6)
        xhat = run(problem, setting, problem.start(0.0), source).average
        found[problem.name] = (xhat.mean(0) / xhat.std(0) * math.sqrt(8)).tolist()
    assert found["bent"][0] < -8
    assert all(abs(z) < 6 for z in found["quadratic"])


def test_without_noise_the_studies_of_noise_say_so():
    context = small_context(Noiseless.like(Quadratic.of(torch.ones(2), sigma=1.0)))
    for study in (bound_terms.speed_up(context), bound_terms.by_steps(context)):
        assert not study.lines
        assert "sigma = 0" in study.notes[0]


def test_a_regime_out_of_reach_is_said_and_not_run():
    (note,) = bound_terms.by_steps(small_context(mix_prob=1e-5)).notes
    assert note.startswith("Not run: the regime where this term dominates needs")


# -- the command -------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def outside(tmp_path_factory):
    """A run that the theorem does not cover, small in all that can be."""
    out = tmp_path_factory.mktemp("theory") / "out"
    said = command("theory", "--mu", 1, "--dim", 2, "--sync-every", 2, "--steps", 96, "--seeds", 16,
                   "--mix-prob", 0.6, "--draws", "shared", "--quiet", "--out", out)  # fmt: skip
    return said, out


def test_a_setting_outside_the_theorem_runs_and_is_said_to_be_so(outside):
    said, _ = outside
    assert said.code == 0
    assert "Outside the theorem: mix_prob=0.6 is above 1/2. Run all the same." in said.out
    assert "Outside the theorem: draws='shared'" in said.out


def test_the_terminal_shows_claimed_beside_measured_and_each_verdict(outside):
    said, _ = outside
    for text in ("E[F(xhat)] - F*", "error by K (1/K speed-up)", "drift by H (H^2)", "as claimed",
                 "Lemma 4", "holds", "fails"):  # fmt: skip
        assert text in said.out


def test_the_output_ends_with_the_conclusion_of_the_document_and_the_page(outside):
    said, out = outside
    sentences = strict_json((out / "theory.json").read_text())["conclusion"]
    end = " ".join(said.out.split("Conclusion")[1].split())
    assert end.startswith(" ".join(f"- {each}" for each in sentences))
    page = html.unescape((out / "theory.html").read_text())
    assert all(f"<li>{each}</li>" in page for each in sentences)
    assert len(sentences) == 5


def test_results_are_a_document_a_page_and_figures(outside):
    _, out = outside
    found = strict_json((out / "theory.json").read_text())
    judged = [*found["exponents"], *found["eta"], *found["lemmas"]]
    assert found["family"] == {
        "level": 0.05, "statements": len(judged), "method": "Bonferroni",
    }  # fmt: skip
    assert all((each["verdict"] == "undecided") >= (each["seeds"] is not None) for each in judged)
    assert found["schema"] == 2
    assert found["problem"]["kappa"] == 1
    assert found["outside"][0].startswith("mix_prob=0.6")
    assert {each["study"] for each in found["exponents"]} == {
        "workers", "steps", "interval", "drift", "transient",
    }  # fmt: skip
    for study in found["studies"]:
        for kind in ("svg", "png"):
            assert (out / "figures" / f"theory-{study['name']}.{kind}").stat().st_size > 4000
    page = (out / "theory.html").read_text()
    assert page.count("<svg") == len(found["studies"])
    assert "<script" not in page
    assert "http" not in page.replace("http://www.w3.org", "")


def test_a_folder_with_results_is_kept_unless_forced(outside):
    _, out = outside
    said = command("theory", "--out", out)
    assert said.code == 2
    assert "--force" in said.line


def test_help_has_an_example():
    said = command("theory", "--help")
    assert said.code == 0
    assert "Example: palsgd theory" in " ".join(said.out.split())


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--mu", 2), "mu=2 must be in (0, L], here (0, 1]"),
        (("--mu", 0), "mu=0 must be in (0, L]"),
        (("--mu", "nan"), "mu=nan must be in (0, L]"),
        (("--l", -1), "L=-1 must be a finite number > 0"),
        (("--sigma", -1), "sigma=-1 must be a finite number >= 0"),
        (("--mix-prob", 0), "mix_prob=0 must be in (0, 1): the theorem divides by it"),
        (("--mix-prob", 1), "mix_prob=1 must be in (0, 1)"),
        (("--mix-prob", -0.1), "mix_prob=-0.1 must be in (0, 1)"),
        (("--workers", 0), "workers=0 must be a whole number >= 1"),
        (("--steps", 0), "steps=0 must be a whole number >= 1"),
        (("--sync-every", 0), "sync_every=0 must be a whole number >= 1"),
        (("--seeds", 1), "seeds=1 must be a whole number >= 8"),
        (("--seed", -1), "seed=-1 must be a whole number >= 0"),
        (("--dim", 0), "dim=0 must be a whole number >= 1"),
        (("--dim", 1), "dim=1 has one curvature, so mu=0.5 must equal L=1"),
        (("--distance", 0), "distance=0 must be a finite number > 0"),
        (("--lr", 0), "lr=0 must be a finite number > 0"),
        (("--lr", 3), "lr=3 must be below 1/mu = 2"),
        (("--mix-rate", 1e9), "use mix_rate <= 192"),
        (("--pull", 2), "pull=2.0 must be a number in [0, 1]"),
        (("--pull", 0.5, "--mix-rate", 1), "mix_rate=1 and pull=0.5 both say"),
        (("--mix-rate", -1), "mix_rate=-1.0 must be a finite number >= 0"),
        (("--draws", "even"), "draws='even' is unknown"),
        (("--problem", "cubic"), "problem='cubic' is unknown"),
        (("--spectrum", "flat"), "spectrum='flat' is unknown"),
        (("--device", "tpu"), "device='tpu' is unknown"),
        (("--problem", "logistic", "--sigma", 1), "sigma=1 cannot be chosen for logistic"),
        (("--problem", "logistic", "--mu", 1), "mu=1 must be below L=1"),
    ],
)
def test_impossible_values_are_refused_with_field_and_range(words, said, tmp_path):
    found = command("theory", *words, "--quiet", "--out", tmp_path / "out")
    assert found.code == 2
    assert said in found.line
    assert not (tmp_path / "out").exists()


def test_the_theory_imports_nothing_of_the_lab():
    code = (
        "import pkgutil, sys, palsgd.theory\n"
        "for each in pkgutil.iter_modules(palsgd.theory.__path__, 'palsgd.theory.'):\n"
        "    __import__(each.name)\n"
        "print(*[name for name in sys.modules if name.startswith('palsgd.lab')])\n"
    )
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, env=environment(), check=True)
    assert done.stdout.strip() == ""

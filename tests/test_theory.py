"""The theory lab: that it runs the product's algorithm, and that its verdicts are right."""

import itertools
import json
import math
from functools import partial

import numpy as np
import pytest
import torch
from torch import nn

import palsgd
from commands import palsgd as command
from commands import strict_json
from palsgd.draws import _uniforms
from palsgd.theory import Bent, Logistic, Noiseless, Quadratic, RandomSource, Setting
from palsgd.theory import explicit_bound, run, spectrum
from palsgd.theory.running import WeightedMean, plans
from palsgd.theory.setting import theorem_setting

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
        curvature = torch.where(x > 0, problem.smoothness, problem.mu)
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
    start, anchors = problem.start(1.5), []

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
                mix_rate=setting.mix_rate, draws=draws, seed=seed,
                outer=lambda params: torch.optim.SGD(params, lr=1.0),
            ),
            evaluate=lambda model: theirs.append(model.x.detach().clone()) or {},
        )  # fmt: skip
        found = torch.stack([anchor[number] for anchor in anchors])
        torch.testing.assert_close(found, torch.stack(theirs), rtol=1e-12, atol=1e-14)
        torch.testing.assert_close(found[-1], result.model.x.detach(), rtol=1e-12, atol=1e-14)
        # xhat: the anchor of each step, in front of it, with the theorem's weights
        held = torch.stack([start, *theirs])[[t // 5 for t in range(setting.steps)]]
        weights = (1 - problem.mu * setting.lr) ** -torch.arange(1.0, setting.steps + 1).double()
        xhat = (weights[:, None] * held).sum(0) / weights.sum()
        torch.testing.assert_close(ours.average[number], xhat, rtol=1e-12, atol=1e-14)

"""Identities between the methods of the family, on quadratics in double precision.

Each holds exactly in mathematics, so that the numbers differ by rounding alone. Where a wrong rule
could satisfy an identity as well, a neighbour that must differ stands beside it.
"""

import itertools
from dataclasses import dataclass
from functools import partial

import numpy as np
import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR

import palsgd
from palsgd.events import Synced
from palsgd.method import Method
from palsgd.methods.easgd import EASGDMethod
from palsgd.methods.palsgd import PALSGDMethod
from palsgd.methods.scaffold import SCAFFOLDMethod
from palsgd.outer import plain_average
from support.core_access import anchor_of, method_states

K, D, H, ROUNDS, LR = 4, 6, 5, 6, 0.05
RNG = np.random.default_rng(7)
ROOTS = RNG.normal(size=(K, D, D)) / np.sqrt(D)
HESSIANS = ROOTS.transpose(0, 2, 1) @ ROOTS + 0.1 * np.eye(D)
SLOPES = RNG.normal(size=(K, D))
NOISE = 0.3 * RNG.normal(size=(K, H * ROUNDS, D))
START = RNG.normal(size=D)


class Point(nn.Module):
    def __init__(self):
        super().__init__()
        self.x = nn.Parameter(torch.tensor(START))


def loss(model, batch):
    """Its gradient is Q x - b."""
    hessian, slope = batch
    return model.x @ hessian @ model.x / 2 - slope @ model.x


def data(k, hessians=HESSIANS, noise=1.0):
    return [
        (torch.tensor(hessians[k]), torch.tensor(SLOPES[k] - noise * each)) for each in NOISE[k]
    ]


def run(build, *, workers=K, rounds=ROUNDS, length=H, lr=LR, inner=torch.optim.SGD, **given):
    """The global model after every sync, a row each."""
    result = palsgd.simulate(
        workers=workers, steps=rounds * length, model=Point, loss=loss, data=partial(data, **given),
        method=lambda model: build(model, inner(model.parameters(), lr=lr)), vectorize=False,
        evaluate=lambda model: model.x.detach().numpy().copy(),
    )  # fmt: skip
    return np.array([entry["metric"] for entry in result.history])


def with_method(method, outer=None, length=H, **options):
    """Builds an optimizer."""
    return lambda model, inner: palsgd.LocalOptimizer(
        model, inner, method, outer, sync_every=length, **options
    )


def preset(title, length=H, **settings):
    return lambda model, inner: getattr(palsgd.methods, title)(
        model, inner, sync_every=length, **settings
    )


def heavy_ball(lr, momentum):
    return lambda params: torch.optim.SGD(params, lr=lr, momentum=momentum)


LOCAL_SGD = preset("LocalSGD")


def check_same(one, other, tolerance=1e-13):
    assert len(one) == len(other) > 0
    np.testing.assert_allclose(one, other, rtol=0, atol=tolerance)


def apart(one, other):
    return float(np.abs(one - other).max())


# -- FedProx -----------------------------------------------------------------------------------


def test_fedprox_without_its_term_is_local_sgd():
    assert apart(run(preset("FedProx", mu=0.0)), run(LOCAL_SGD)) == 0
    assert apart(run(preset("FedProx", mu=0.5)), run(LOCAL_SGD)) > 1e-3


def test_a_pull_after_each_sgd_step_is_fedprox_with_other_numbers():
    """x - a g, then a pull of weight c, is one step of (1 - c) a on the proximal loss."""
    c = 0.2
    pulled = run(preset("AnchorDecay", decay=c, outer=plain_average()))
    fedprox = preset("FedProx", mu=c / ((1 - c) * LR))
    check_same(pulled, run(fedprox, lr=(1 - c) * LR))
    assert apart(pulled, run(fedprox)) > 1e-3


# -- SlowMo ------------------------------------------------------------------------------------


def decayed(opt):
    """A tenth of the learning rate from the fourth round on."""
    return LambdaLR(opt, lambda t: 1.0 if t < 3 * H else 0.1)


class ShrinkingBall(torch.optim.SGD):
    """Heavy ball whose buffer is multiplied by the ratio of two rounds' learning rates."""

    ratios = (1.0, 1.0, 1.0, 0.1, 1.0, 1.0)
    calls = 0

    def step(self, closure=None):
        for state in self.state.values():
            state["momentum_buffer"].mul_(self.ratios[self.calls])
        self.calls += 1
        return super().step(closure)


def test_slowmo_without_momentum_is_local_sgd():
    check_same(run(preset("SlowMo", momentum=0.0, lr=1.0)), run(LOCAL_SGD))
    assert apart(run(preset("SlowMo", momentum=0.6)), run(LOCAL_SGD)) > 1e-2


def test_slowmo_that_syncs_every_step_is_ddp_with_momentum():
    slow = run(preset("SlowMo", momentum=0.6, lr=1.0, length=1), rounds=30, length=1)
    momentum = partial(torch.optim.SGD, momentum=0.6)
    check_same(slow, run(preset_ddp, rounds=30, length=1, inner=momentum))
    assert apart(slow, run(preset_ddp, rounds=30, length=1)) > 1e-2


def preset_ddp(model, inner):
    return palsgd.DDP(model, inner)


@pytest.mark.parametrize("option", [{}, {"delay": 2}, {"fragments": 2}, {"compress": "int8"}])
def test_slowmo_at_a_constant_rate_is_an_outer_heavy_ball(option):
    slow = run(preset("SlowMo", momentum=0.6, lr=0.8, **option))
    check_same(slow, run(with_method(Method(), heavy_ball(0.8, 0.6), **option)), tolerance=1e-9)


def test_slowmo_under_a_schedule_is_a_heavy_ball_whose_buffer_shrinks_with_the_rate():
    slow = run(preset("SlowMo", momentum=0.6, lr=0.9, scheduler=decayed))
    ball = lambda params: ShrinkingBall(params, lr=0.9, momentum=0.6)  # noqa: E731
    check_same(slow, run(with_method(Method(), ball, scheduler=decayed)))
    plain = run(with_method(Method(), heavy_ball(0.9, 0.6), scheduler=decayed))
    assert apart(slow, plain) > 0.1


# -- PALSGD and FedProx ------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Coins(PALSGDMethod):
    """PALSGD whose coins have fallen already."""

    fallen: tuple[bool, ...]

    def plan(self, worker, round, length, facts):
        return list(self.fallen)


def fallen(coins, p, eta):
    method = Coins(mix_prob=p, mix_rate=eta, fallen=tuple(coins))
    (found,) = run(
        with_method(method, length=len(coins)), workers=1, rounds=1, length=len(coins), noise=0.0
    )
    return found


def likelihood(coins, p):
    return np.prod([p if coin else 1 - p for coin in coins])


def test_the_mean_over_all_coins_of_a_palsgd_round_is_a_fedprox_round():
    p, eta = 0.25, 2.0
    mean = sum(
        likelihood(coins, p) * fallen(coins, p, eta)
        for coins in itertools.product([False, True], repeat=H)
    )
    (fedprox,) = run(preset("FedProx", mu=eta), workers=1, rounds=1, noise=0.0)
    np.testing.assert_allclose(mean, fedprox, rtol=0, atol=1e-13)
    (other,) = run(preset("FedProx", mu=eta / 2), workers=1, rounds=1, noise=0.0)
    assert apart(mean, other) > 1e-3


def test_the_mean_over_the_coin_of_one_palsgd_step_is_a_fedprox_step():
    p, eta = 0.25, 2.0
    before = fallen([False], p, eta)  # away from the anchor, which is where training starts
    mean = sum(likelihood([c], p) * fallen([False, c], p, eta) for c in (False, True))
    gradient = HESSIANS[0] @ before - SLOPES[0] + eta * (before - START)
    np.testing.assert_allclose(mean, before - LR * gradient, rtol=0, atol=1e-14)


# -- SCAFFOLD ----------------------------------------------------------------------------------


class Frozen(SCAFFOLDMethod):
    """Its controls stay zero."""

    def apply(self, w, reduced, outer):
        super().apply(w, reduced, outer)
        torch._foreach_zero_(w.control + w.mean_control)


def test_scaffold_with_controls_at_zero_is_local_sgd_with_an_outer_rate():
    frozen = run(with_method(Frozen(lr=0.8)))
    check_same(frozen, run(with_method(Method(), heavy_ball(0.8, 0.0))))


def test_scaffold_that_syncs_every_step_is_ddp():
    every = run(preset("SCAFFOLD", length=1), rounds=30, length=1)
    check_same(every, run(preset_ddp, rounds=30, length=1))


def test_scaffold_equals_local_sgd_where_all_workers_have_one_hessian():
    """Their drifts are then equal, and the controls have nothing to correct in the mean."""
    equal = np.repeat(HESSIANS[:1], K, axis=0)
    scaffold = preset("SCAFFOLD")
    check_same(run(scaffold, hessians=equal), run(LOCAL_SGD, hessians=equal))
    assert apart(run(scaffold), run(LOCAL_SGD)) > 1e-2


def controls_after_syncs(**options):
    """Of each worker and in common, after every sync."""
    own, common = [[] for _ in range(K)], [[] for _ in range(K)]

    def build(model, inner):
        opt = preset("SCAFFOLD", **options)(model, inner)
        worker = opt.transport.worker

        def look(event):
            states = method_states(opt)
            own[worker].append(states["control"].numpy().copy())
            common[worker].append(states["mean_control"].numpy().copy())

        opt.on(Synced, look)
        return opt

    run(build)
    return np.array(own), np.array(common)


@pytest.mark.parametrize("option", [{}, {"compress": "int4"}, {"fragments": 2}])
def test_the_common_control_is_the_mean_of_all_after_every_sync(option):
    own, common = controls_after_syncs(**option)
    assert np.abs(own).max() > 0.1
    for each in common:
        np.testing.assert_allclose(each, own.mean(0), rtol=0, atol=1e-13)


def test_scaffold_reaches_the_optimum_where_local_sgd_does_not():
    steep = HESSIANS + np.eye(D)
    optimum = np.linalg.solve(steep.sum(0), SLOPES.sum(0))
    given = dict(rounds=120, lr=0.1, hessians=steep, noise=0.0)
    scaffold = preset("SCAFFOLD", same_data=True)  # at the optimum all local models are equal
    assert apart(run(scaffold, **given)[-1], optimum) < 1e-12
    assert apart(run(LOCAL_SGD, **given)[-1], optimum) > 1e-2


# -- EASGD -------------------------------------------------------------------------------------


def models_around_syncs(rate):
    """Local models and centre, (rounds, K + 1, D), before and after each sync."""
    before, after = [[] for _ in range(K)], [[] for _ in range(K)]
    centres = [START]

    def build(model, inner):
        opt = preset("EASGD", rate=rate)(model, inner)
        worker = opt.transport.worker
        steps = []
        opt.inner.register_step_post_hook(lambda *_: steps.append(model.x.detach().clone()))

        def look(event):
            before[worker].append(steps[-1].numpy())
            after[worker].append(model.x.detach().numpy().copy())
            if worker == 0:
                centres.append(anchor_of(opt).numpy().copy())

        opt.on(Synced, look)
        return opt

    run(build)
    rounds = [np.stack([*before, centres[:-1]], 1), np.stack([*after, centres[1:]], 1)]
    return rounds


def test_the_elastic_exchange_conserves_the_sum_of_all_models_and_the_centre():
    before, after = models_around_syncs(rate=0.2)
    np.testing.assert_allclose(after.sum(1), before.sum(1), rtol=0, atol=1e-13)
    assert apart(before, after) > 0.1


def test_an_elastic_exchange_of_rate_0_moves_nothing():
    before, after = models_around_syncs(rate=0.0)
    np.testing.assert_array_equal(after, before)


@dataclass(frozen=True, kw_only=True)
class Elastic(Method):
    """Local models move by `own` towards the centre, which moves by `centre` to their mean."""

    own: float
    centre: float
    centre_first: bool

    local_state = ("old_centre",)

    def apply(self, w, reduced, outer):
        torch._foreach_copy_(w.old_centre, w.anchor)
        torch._foreach_sub_(w.anchor, reduced["model"], alpha=self.centre)

    def restart(self, w):
        target = w.anchor if self.centre_first else w.old_centre
        torch._foreach_lerp_(w.local, target, self.own)


def test_an_elastic_exchange_that_moves_the_centre_first_with_rates_1_is_local_sgd():
    first = Elastic(own=1.0, centre=1.0, centre_first=True)
    check_same(run(with_method(first)), run(LOCAL_SGD))
    together = Elastic(own=1.0, centre=1.0, centre_first=False)
    assert apart(run(with_method(together)), run(LOCAL_SGD)) > 0.1


def test_easgd_moves_both_ends_at_once():
    rate = 0.2
    together = Elastic(own=rate, centre=K * rate, centre_first=False)
    check_same(run(with_method(EASGDMethod(rate=rate))), run(with_method(together)))
    first = Elastic(own=rate, centre=K * rate, centre_first=True)
    assert apart(run(with_method(EASGDMethod(rate=rate))), run(with_method(first))) > 1e-2


@pytest.mark.parametrize("title", ["EASGD", "SCAFFOLD", "SlowMo"])
def test_a_method_with_a_global_step_of_its_own_refuses_another(title):
    with pytest.raises(ValueError, match=rf"^outer=\.\.\. means nothing for {title}: .*leave it"):
        run(preset(title, outer=palsgd.nesterov()))

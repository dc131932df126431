"""Several methods as one."""

from dataclasses import dataclass

import numpy as np
import pytest
import torch

import palsgd
from palsgd.method import Method, Scalar
from palsgd.methods.fedprox import FedProxMethod
from palsgd.methods.palsgd import PALSGDMethod
from palsgd.methods.scaffold import SCAFFOLDMethod
from palsgd.methods.slowmo import SlowMoMethod
from support.core_access import method_states
from support.problems import batches, linear, mse, train, vector


def optimizer(model, method, outer=None, inner=torch.optim.SGD, **options):
    given = dict(sync_every=4, transport=palsgd.Alone()) | options
    return palsgd.LocalOptimizer(model, inner(model.parameters(), lr=0.05), method, outer, **given)


def simulated(method, outer=None):
    result = palsgd.simulate(
        workers=3, steps=16, model=linear, loss=mse, data=batches, vectorize=False,
        method=lambda model: palsgd.LocalOptimizer(
            model, torch.optim.SGD(model.parameters(), lr=0.05), method, outer, sync_every=4
        ),
    )  # fmt: skip
    return vector(result.model)


def test_the_local_rule_of_one_method_goes_with_the_global_rule_of_another():
    """SlowMo at a constant rate is an outer heavy ball, which FedProx can have without it."""
    both = simulated([FedProxMethod(mu=0.5), SlowMoMethod(momentum=0.6, lr=0.8)])
    ball = lambda params: torch.optim.SGD(params, lr=0.8, momentum=0.6)  # noqa: E731
    np.testing.assert_allclose(both, simulated(FedProxMethod(mu=0.5), ball), rtol=1e-10)
    assert not np.allclose(both, simulated(SlowMoMethod(momentum=0.6, lr=0.8)), rtol=1e-3)
    assert not np.allclose(both, simulated(FedProxMethod(mu=0.5)), rtol=1e-3)


def test_two_corrections_of_the_gradient_add_up():
    both = simulated([FedProxMethod(mu=0.2), FedProxMethod(mu=0.3)])
    np.testing.assert_allclose(both, simulated(FedProxMethod(mu=0.5)), rtol=1e-12)


def test_one_method_in_a_list_is_that_method():
    opt = optimizer(linear(), [FedProxMethod(mu=0.5)])
    assert opt.method == FedProxMethod(mu=0.5)


class Doubled(Method):
    def before_gradient(self, w):
        torch._foreach_mul_(w.grad, 2.0)


class Raised(Method):
    def before_gradient(self, w):
        torch._foreach_add_(w.grad, 1.0)


def test_hooks_run_in_the_order_of_the_list():
    moved = []
    for methods in ([Doubled(), Raised()], [Raised(), Doubled()]):
        model = linear()
        start, opt = vector(model), optimizer(model, methods)
        for p in model.parameters():
            p.grad = torch.ones_like(p)
        opt.step()
        moved.append((start - vector(model)) / 0.05)
    np.testing.assert_allclose(moved[0], 3)  # 2 g + 1
    np.testing.assert_allclose(moved[1], 4)  # 2 (g + 1)


def with_slot(slot):
    """A method that says itself what the slot holds."""
    own = property(lambda self: 0.5) if slot == "gradient_share" else lambda self, *given: None
    return type("Own", (Method,), {slot: own})()


@pytest.mark.parametrize(
    "slot", ["plan", "length", "gradient_share", "apply", "restart", "weights", "global_model"]
)
def test_two_methods_that_both_decide_one_thing_are_refused(slot):
    says = f"^Own and Own both override {slot}, which one method alone decides; use one of them$"
    with pytest.raises(ValueError, match=says):
        optimizer(linear(), [with_slot(slot), FedProxMethod(), with_slot(slot)])


def test_two_methods_of_the_family_that_both_take_the_global_step_are_refused():
    with pytest.raises(ValueError, match=r"^SCAFFOLD and SlowMo both override apply"):
        optimizer(linear(), [SCAFFOLDMethod(), SlowMoMethod()])


@dataclass(frozen=True, kw_only=True)
class Counting(Method):
    local_state = (Scalar("calls"), "control")

    def before_gradient(self, w):
        w.calls = w.calls + 1


def test_two_states_of_one_name_are_refused():
    says = r"^two methods of Counting \+ SCAFFOLD keep a state called 'control'; rename one$"
    with pytest.raises(ValueError, match=says):
        optimizer(linear(), [Counting(), SCAFFOLDMethod()])


def test_states_settings_and_checks_of_all_of_them_count():
    methods = [PALSGDMethod(mix_prob=0.25, mix_rate=1.0), SCAFFOLDMethod(lr=0.9)]
    opt = optimizer(linear(), methods)
    assert {"PALSGD.mix_prob": 0.25, "SCAFFOLD.lr": 0.9}.items() <= opt.config.items()
    assert set(method_states(opt)) == {"control", "mean_control"}
    assert opt.config["method"] == "PALSGD + SCAFFOLD"
    with pytest.raises(ValueError, match="SCAFFOLD reads"):
        optimizer(linear(), methods, inner=torch.optim.AdamW)
    with pytest.raises(ValueError, match="mix_rate=1000 gives beta"):
        optimizer(linear(), [PALSGDMethod(mix_prob=0.25, mix_rate=1000.0), SCAFFOLDMethod()])
    with pytest.raises(ValueError, match=r"^delay=2 means nothing for PALSGD \+ SCAFFOLD: steps"):
        optimizer(linear(), methods, delay=2)


def test_a_composed_run_resumed_mid_round_equals_the_uninterrupted_one():
    methods = [PALSGDMethod(mix_prob=0.25, mix_rate=1.0), SCAFFOLDMethod(lr=0.9)]
    data = batches(0)
    model = linear()
    opt, saved = optimizer(model, methods), []

    def save():
        if opt.rounds == 2 and not opt.synced and not saved:
            saved.append((opt.gradient_steps, vector(model), opt.state_dict()))

    train(model, opt, data, 16, on_step=save)
    ((steps, weights, state),) = saved
    other = linear()
    torch.nn.utils.vector_to_parameters(torch.tensor(weights), other.parameters())
    again = optimizer(other, methods)
    again.load_state_dict(state)
    train(other, again, [data[(steps + i) % len(data)] for i in range(16)], 16)
    np.testing.assert_array_equal(vector(other), vector(model))


@pytest.mark.parametrize(
    ("method", "says"),
    [
        (FedProxMethod, "method=FedProxMethod is a class; give an instance of it"),
        ("fedprox", "method='fedprox' must be a palsgd.Method, or a list of them"),
        ([FedProxMethod(), "x"], "must be a palsgd.Method, or a list of them"),
    ],
)
def test_what_is_no_method_is_refused(method, says):
    with pytest.raises(ValueError, match=says):
        optimizer(linear(), method)

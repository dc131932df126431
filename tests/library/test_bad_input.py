"""Bad input is one ValueError: one line that says what was given and what to use instead."""

import math
import re
from dataclasses import dataclass

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.lr_scheduler import LambdaLR

import palsgd
from palsgd.methods.fedprox import FedProxMethod
from support.patience import patient
from support.problems import batches, mse, train
from support.stepping import sgd

GOOD = dict(sync_every=4, mix_prob=0.25, mix_rate=2.0)


def linear():
    return nn.Linear(4, 3).double()


def build(model=None, inner=None, **rules):
    model = model or linear()
    inner = inner or torch.optim.SGD(model.parameters(), lr=0.1)
    return palsgd.PALSGD(model, inner, **(dict(transport=palsgd.Alone()) | GOOD | rules))


def step(model, opt):
    mse(model, batches(0)[0]).backward()
    opt.step()
    opt.zero_grad()


def refused(call, *texts):
    """`call` raises a ValueError of one line that holds every text."""
    with pytest.raises(ValueError) as caught:  # noqa: PT011 (the texts are looked for below)
        call()
    assert caught.type is ValueError
    check_message(str(caught.value), *texts)
    return str(caught.value)


def check_message(message, *texts):
    assert "\n" not in message
    for text in texts:
        assert text in message, f"{text!r} is not in: {message}"


# -- settings ----------------------------------------------------------------------------------

NAN = float("nan")


@pytest.mark.parametrize("value", [-0.1, 1, 1.0, 1.5, NAN, math.inf, None, "0.1", [0.1], True])
def test_mix_prob_must_be_a_number_from_0_up_to_1(value):
    refused(lambda: build(mix_prob=value), f"mix_prob={value!r}", "[0, 1)", "use 0")


@pytest.mark.parametrize("value", [0, -3, 2.5, 4.0, NAN, None, "8", True])
@pytest.mark.parametrize("method", [palsgd.DiLoCo, palsgd.LocalSGD, "PALSGD"])
def test_sync_every_must_be_a_whole_number_from_1(value, method):
    def call():
        if method == "PALSGD":
            return build(sync_every=value)
        model = linear()
        inner = torch.optim.SGD(model.parameters(), lr=0.1)
        return method(model, inner, sync_every=value, transport=palsgd.Alone())

    refused(call, f"sync_every={value!r}", "whole number >= 1")


def test_whole_numbers_of_numpy_are_whole_numbers():
    assert build(sync_every=np.int64(4), seed=np.int32(1), warmup_steps=np.int64(2)).clock == 0


@pytest.mark.parametrize("value", [-1, 2.5, None, "8", NAN])
@pytest.mark.parametrize("name", ["warmup_steps", "seed"])
def test_warmup_steps_and_seed_must_be_whole_and_not_negative(name, value):
    refused(lambda: build(**{name: value}), f"{name}={value!r}", "whole number >= 0")


@pytest.mark.parametrize("value", [-1.0, NAN, math.inf, "2"])
def test_mix_rate_must_be_a_finite_number_from_0(value):
    refused(lambda: build(mix_rate=value), f"mix_rate={value!r}", "finite number >= 0")


@pytest.mark.parametrize(
    ("name", "value", "choices"),
    [
        ("draws", "fair", ("balanced", "independent", "shared")),
        ("draws", None, ("balanced", "independent", "shared")),
        ("buffers", "sum", ("average", "local", "recompute")),
        ("on_nonfinite", "ignore", ("raise", "skip")),
        ("on_nonfinite", True, ("raise", "skip")),
    ],
)
def test_an_unknown_choice_is_answered_with_the_known_ones(name, value, choices):
    refused(lambda: build(**{name: value}), f"{name}={value!r}", *map(repr, choices))


@pytest.mark.parametrize("value", [0, -1.0, NAN, math.inf])
@pytest.mark.parametrize("name", ["max_norm", "bucket_mb"])
def test_max_norm_and_bucket_mb_must_be_positive(name, value):
    refused(lambda: build(**{name: value}), f"{name}={value!r}", "> 0")


@pytest.mark.parametrize("steps", [-1, 2.5, None])
def test_until_needs_a_whole_number_of_steps(steps):
    refused(lambda: next(palsgd.until([], build(), steps=steps)), f"steps={steps!r}", "whole")


@pytest.mark.parametrize("value", ["0.7", None, -1, NAN, [0.1], True, torch.ones(2), 10**400])
@pytest.mark.parametrize("name", ["lr", "momentum"])
def test_nesterov_takes_numbers_from_0(name, value):
    refused(lambda: palsgd.nesterov(**{name: value}), f"{name}=", "a number >= 0")


@pytest.mark.parametrize("loader", [3, None, np.array("text")])
def test_until_needs_a_loader_that_has_batches(loader):
    refused(lambda: next(palsgd.until(loader, build(), steps=4)), "loader=", "give a DataLoader")


@pytest.mark.parametrize("state", [None, 3, "state", {}, {"state": 3}, {"param_groups": [1]}])
def test_what_is_no_state_is_refused(state):
    refused(lambda: build().load_state_dict(state), "no state of an optimizer", "state_dict()")


@pytest.mark.parametrize("model", [None, "model", {}])
def test_what_is_no_model_is_not_attached(model):
    refused(lambda: build().attach(model), "attach() got", "no model")


@pytest.mark.parametrize("name", ["sync_every", "seed", "delay", "compress", "average_state"])
@pytest.mark.parametrize("value", [np.array([1, 2]), torch.ones(2), 10**400, object(), "a\nb" * 99])
def test_arrays_and_the_like_in_place_of_an_option_are_refused(name, value):
    refused(lambda: build(**{name: value}), f"{name}=")


@pytest.mark.parametrize("length", [2**24 + 1, 2**62])
def test_a_round_that_no_memory_holds_is_refused(length):
    plan = dict(seed=0, worker=0, round=0, mix_prob=0.1, draws="balanced")
    refused(lambda: palsgd.round_plan(**plan, sync_every=length), "<= 16777216")
    refused(lambda: build(sync_every=length), f"sync_every={length}", "<= 16777216")


SIMULATION = dict(
    workers=2, steps=4, model=linear, loss=mse, data=lambda worker: batches(worker),
    method=lambda model: palsgd.DiLoCo(model, sgd(model), sync_every=2),
)  # fmt: skip


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("model", nn), ("loss", "mse"), ("data", [1]), ("method", 3), ("evaluate", "loss"),
        ("device", "gpu"), ("device", 3), ("cluster", "1gbit"), ("vectorize", "yes"),
        ("compile", 3), ("compile", "fast"), ("progress", "yes"), ("checkpoint", 3),
        ("workers", 10**400),
    ],
)  # fmt: skip
def test_a_simulation_refuses_what_it_cannot_use(name, value):
    refused(lambda: palsgd.simulate(**SIMULATION | {name: value}), f"{name}=")


@pytest.mark.parametrize(
    ("method", "rules"),
    [
        (palsgd.PALSGD, GOOD),
        (palsgd.DiLoCo, dict(sync_every=4)),
        (palsgd.LocalSGD, dict(sync_every=4)),
        (palsgd.DDP, {}),
    ],
)
def test_an_unknown_keyword_is_a_type_error_that_names_it(method, rules):
    model = linear()
    inner = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(TypeError, match="sync_evry"):
        method(model, inner, transport=palsgd.Alone(), sync_evry=4, **rules)


# -- beta --------------------------------------------------------------------------------------


def two_groups(model, first, second):
    return torch.optim.SGD(
        [{"params": [model.weight], "lr": first}, {"params": [model.bias], "lr": second}]
    )


def test_a_beta_above_1_names_the_group_the_value_and_the_largest_mix_rate():
    """The paper's own example: eta 64, p 0.025, alpha 1e-3 gives 2.56."""
    model = linear()
    refused(
        lambda: build(model, two_groups(model, 1e-6, 1e-3), mix_prob=0.025, mix_rate=64.0),
        "mix_rate=64", "2.56", "group 1", "0.001", "mix_rate <= 25",
    )  # fmt: skip


@pytest.mark.parametrize(("lr", "p"), [(1e-3, 0.025), (0.003, 0.1), (0.003, 0.2), (0.007, 0.3)])
def test_the_largest_mix_rate_that_the_message_names_is_accepted(lr, p):
    model = linear()
    inner = torch.optim.SGD(model.parameters(), lr=lr)
    message = refused(lambda: build(model, inner, mix_prob=p, mix_rate=1e4), "mix_rate <=")
    largest = float(re.search(r"mix_rate <= ([\d.e+-]+)", message)[1])
    assert largest == pytest.approx(p / lr, rel=1e-4)
    (beta,) = mixing_weights(model, inner, mix_prob=p, mix_rate=largest)
    assert beta == pytest.approx(1.0, rel=1e-4)


def mixing_weights(model, inner, **rules):
    """The weights of all mixing steps of some rounds."""
    opt, found = build(model, inner, **rules), set()
    opt.on(palsgd.events.Mixed, lambda event: found.update((event.weight_min, event.weight_max)))
    for _ in palsgd.until([0], opt, steps=200):
        step(model, opt)
    return found


@pytest.mark.parametrize(("mix_rate", "beta"), [(25.0, 1.0), (0.0, 0.0)])
def test_beta_of_exactly_1_and_0_are_legal(mix_rate, beta):
    model = linear()
    inner = torch.optim.SGD(model.parameters(), lr=1e-3)
    assert mixing_weights(model, inner, mix_prob=0.025, mix_rate=mix_rate) == {beta}


def test_a_beta_that_a_schedule_drives_above_1_is_refused_at_construction():
    model = linear()
    inner = torch.optim.SGD(model.parameters(), lr=0.1)
    rise = lambda opt: LambdaLR(opt, lambda t: 1.0 + t / 100)  # noqa: E731
    refused(
        lambda: build(model, inner, mix_prob=0.25, mix_rate=2.0, scheduler=rise),
        "mix_rate=2", "beta=1.0", "group 0", "mix_rate <=", "at clock 26",
    )  # fmt: skip
    assert inner.param_groups[0]["lr"] == 0.1  # a copy was stepped


def test_a_beta_that_the_end_of_a_warm_up_of_the_rate_drives_above_1_is_refused_at_construction():
    model = linear()
    inner = torch.optim.SGD(model.parameters(), lr=0.1)
    torch.optim.lr_scheduler.LinearLR(inner, 0.001, total_iters=20)
    assert inner.param_groups[0]["lr"] < 2e-4
    refused(lambda: build(model, inner, mix_rate=20.0), "beta=8", "lr=0.1", "mix_rate <= 2.5")


def test_a_beta_above_1_that_lies_further_ahead_is_refused_when_the_length_is_known():
    model = linear()
    inner = torch.optim.SGD(model.parameters(), lr=0.1)
    late = lambda opt: LambdaLR(opt, lambda t: 1.0 if t < 3000 else 20.0)  # noqa: E731
    opt = build(model, inner, mix_rate=2.0, scheduler=late)
    list(zip(range(3), palsgd.until([1], opt, steps=3000), strict=False))
    refused(lambda: next(palsgd.until([1], opt, steps=4000)), "beta=16", "at clock 3000")


def test_a_beta_above_1_that_nobody_foresaw_leaves_the_clock_at_the_steps_that_were_taken():
    """The mixing step that is refused is not counted, and is taken once the rate is right again."""
    model = linear()
    opt = build(model, sync_every=16, mix_prob=0.5, mix_rate=2.0)
    chosen = dict(seed=0, worker=0, round=0, sync_every=16, mix_prob=0.5, draws="balanced")
    plan = palsgd.round_plan(**chosen)
    first = plan.index(True, plan.index(False))  # the first mixing step that changes the model
    for _ in range(plan[:first].count(False) - 1):
        step(model, opt)
    opt.param_groups[0]["lr"] = 1.0
    refused(lambda: step(model, opt), "beta=4")
    assert opt.clock == first
    opt.param_groups[0]["lr"] = 0.05
    step(model, opt)
    taken = opt.ledger.mixing_steps, opt.gradient_steps
    assert taken == (plan[: opt.clock].count(True), plan[: opt.clock].count(False))
    assert opt.ledger.beta_max == pytest.approx(0.2)  # the step was mixed, not only counted


# -- the model and its inner optimizer ---------------------------------------------------------


def test_an_inner_optimizer_of_another_model_is_refused():
    stranger = torch.optim.SGD(nn.Linear(5, 2).parameters(), lr=0.1)
    refused(lambda: build(linear(), stranger), "2 tensor(s)", "(2, 5)", "model.parameters()")


def test_an_inner_optimizer_that_misses_a_trainable_parameter_is_refused():
    model = linear()
    partial = torch.optim.SGD([model.weight], lr=0.1)
    refused(lambda: build(model, partial), "1 trainable", "bias", "requires_grad_(False)")
    model.bias.requires_grad_(False)
    build(model, partial)


def test_a_model_with_nothing_to_train_is_refused():
    model = linear().requires_grad_(False)
    refused(lambda: build(model), "no trainable parameter", "unfreeze")


def test_a_model_on_several_devices_is_refused():
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 3, device="meta"))
    refused(lambda: build(model), "cpu", "meta", "one device", "fully_shard")


def test_a_complex_parameter_is_refused():
    model = nn.Linear(4, 3, dtype=torch.complex64)
    refused(lambda: build(model), "weight", "floating-point", "freeze")


def test_a_run_without_a_process_group_is_refused():
    assert not dist.is_initialized()
    refused(lambda: build(transport=None), "not initialised", "init_process_group", "torchrun")


@pytest.mark.parametrize("outer", [lambda params: None, list])
def test_an_outer_that_does_not_make_an_optimizer_is_refused(outer):
    refused(lambda: build(outer=outer), "outer", "optimizer", "palsgd.nesterov(")


@pytest.mark.parametrize("outer", ["nesterov", 0.7])
def test_an_outer_that_cannot_be_called_is_refused(outer):
    refused(lambda: build(outer=outer), "outer", "palsgd.nesterov(")


def test_a_parameter_group_cannot_be_added_afterwards():
    opt = build()
    group = {"params": [nn.Parameter(torch.zeros(2))]}
    refused(lambda: opt.add_param_group(group), "cannot be added", "inner optimizer")
    assert len(opt.param_groups) == 1


def frozen_bias():
    model = linear()
    model.bias.requires_grad_(False)
    return model, build(model, torch.optim.SGD(model.parameters(), lr=0.1))


def run_a_round(model, opt):
    for _ in range(2 * GOOD["sync_every"]):
        step(model, opt)


def test_a_parameter_that_is_unfrozen_afterwards_is_refused_at_the_sync():
    model, opt = frozen_bias()
    step(model, opt)
    model.bias.requires_grad_(True)
    refused(lambda: run_a_round(model, opt), "unfrozen", "build a new")


def test_a_parameter_that_is_frozen_afterwards_is_refused_at_the_sync():
    model = linear()
    opt = build(model)
    step(model, opt)
    model.bias.requires_grad_(False)
    refused(lambda: run_a_round(model, opt), "frozen", "build a new")


def test_a_parameter_unfrozen_in_place_of_another_is_refused_at_the_sync():
    model, opt = frozen_bias()
    step(model, opt)
    model.bias.requires_grad_(True)
    model.weight.requires_grad_(False)
    refused(lambda: run_a_round(model, opt), "unfrozen", "build a new")


# -- settings that differ between ranks --------------------------------------------------------


def batch_norm(there):
    last = [nn.BatchNorm1d(3, affine=False)] if there else []
    return nn.Sequential(nn.Linear(4, 3), *last).double()


OTHER = {
    "sync_every": dict(sync_every=5),
    "seed": dict(seed=77),
    "mix_prob": dict(mix_prob=0.5),
    "mix_rate": dict(mix_rate=1.25),
    "warmup_steps": dict(warmup_steps=6),
    "draws": dict(draws="shared"),
    "buffers": dict(buffers="local"),
    "on_nonfinite": dict(on_nonfinite="skip"),
    "max_norm": dict(max_norm=1.5),
    "outer lr": dict(outer=palsgd.nesterov(lr=0.125)),
    "bucket_mb": dict(bucket_mb=64 / 2**20),
}


def mismatched(name, odd):
    torch.manual_seed(0)
    me = dist.get_rank() == odd
    model = nn.Linear(4, 3).double()
    wrapper = DistributedDataParallel(model)  # on every rank: its constructor sends messages
    if name == "shape" and me:
        model = nn.Linear(3, 4).double()
    if name == "dtype" and me:
        model = nn.Linear(4, 3)
    if name == "frozen" and me:
        model.bias.requires_grad_(False)
    if name == "batch norm":
        model = batch_norm(me)
    if name == "wrapped" and me:
        model = wrapper
    inner = torch.optim.AdamW if name == "inner" and me else torch.optim.SGD
    inner = inner(model.parameters(), lr=0.1)
    if name == "method" and me:
        opt = palsgd.DDP(model, inner)
    else:
        opt = palsgd.PALSGD(model, inner, **(GOOD | (OTHER.get(name, {}) if me else {})))
    for batch in palsgd.until(batches(), opt, steps=8):  # no hang, whatever was missed
        mse(model, batch).backward()
        opt.step()
        opt.zero_grad()


MISMATCHES = {
    "sync_every": ("sync_every", "4", "5"),
    "seed": ("seed", "0", "77"),
    "mix_prob": ("mix_prob", "0.25", "0.5"),
    "mix_rate": ("mix_rate", "2.0", "1.25"),
    "warmup_steps": ("warmup_steps", "0", "6"),
    "draws": ("draws", "'balanced'", "'shared'"),
    "buffers": ("buffers", "'average'", "'local'"),
    "on_nonfinite": ("on_nonfinite", "'raise'", "'skip'"),
    "max_norm": ("max_norm", "None", "1.5"),
    "outer lr": ("outer", "lr=0.7", "lr=0.125"),
    "method": ("method", "'PALSGD'", "'DDP'"),
    "inner": ("inner", "'SGD'", "'AdamW'"),
    "shape": ("parameters",),
    "dtype": ("parameters",),
    "frozen": ("parameters", "15", "12"),
    "wrapped": ("Wrapped", "InStep"),
    "bucket_mb": ("bucket_mb", "128"),
    "batch norm": ("buffers",),
}


@pytest.mark.parametrize("name", MISMATCHES)
def test_a_setting_that_differs_is_told_on_every_rank_with_rank_and_both_values(world, name):
    for got in world.outcomes(mismatched, workers=2, timeout=8, name=name, odd=1):
        assert got.error == "ValueError", got.trace
        check_message(got.message, "rank 0", "rank 1", *MISMATCHES[name])
        assert got.seconds < patient(8)


@pytest.mark.parametrize("odd", [1, 2])
def test_of_three_ranks_the_odd_one_is_named(world, odd):
    for got in world.outcomes(mismatched, workers=3, timeout=8, name="sync_every", odd=odd):
        assert got.error == "ValueError", got.trace
        check_message(got.message, f"rank {odd} has 5", "rank 0 has 4")


class Idle:
    """A schedule that is not torch's, of something else than an optimizer."""

    def __init__(self):
        self.steps = 0

    def step(self):
        self.steps += 1


def test_a_schedule_of_ones_own_needs_no_optimizer():
    schedule = Idle()
    model = linear()
    opt = palsgd.LocalSGD(
        model, sgd(model), sync_every=2, transport=palsgd.Alone(), scheduler=schedule
    )
    train(model, opt, batches(0), 6)
    assert schedule.steps == 6


@pytest.mark.parametrize(
    ("scheduler", "message"),
    [
        (torch.optim.lr_scheduler.ReduceLROnPlateau, "ReduceLROnPlateau needs a metric"),
        (
            lambda _: torch.optim.lr_scheduler.StepLR(sgd(linear()), 1),
            "StepLR is bound to another SGD, whose learning rates are not those of inner",
        ),
    ],
)
def test_a_schedule_that_the_clock_cannot_step_is_refused(scheduler, message):
    model = linear()
    with pytest.raises(ValueError, match=message):
        palsgd.LocalSGD(
            model, sgd(model), sync_every=2, transport=palsgd.Alone(), scheduler=scheduler
        )


@dataclass(frozen=True, kw_only=True)
class OwnSeed(palsgd.Method):
    seed: int = 5


@pytest.mark.parametrize(
    ("method", "settings", "message"),
    [
        (OwnSeed(), {}, "OwnSeed has a setting 'seed', which is the optimizer's own"),
        ([], {}, r"method=\[\] has no rules"),
        (palsgd.Method(), dict(warmup_steps=math.inf, delay=1), "delay=1 is about syncs"),
        (palsgd.Method(), dict(warmup_steps=math.inf, compress="int8"), "compress='int8' is about"),
        (palsgd.Method(), dict(max_norm=True), "max_norm=True must be a number > 0"),
    ],
)
def test_settings_that_mean_nothing_are_refused(method, settings, message):
    model = linear()
    with pytest.raises(ValueError, match=message):
        palsgd.LocalOptimizer(
            model, sgd(model), method, sync_every=4, transport=palsgd.Alone(), **settings
        )


def test_two_methods_of_one_kind_both_have_their_settings_compared():
    model = linear()
    two = [FedProxMethod(mu=0.1), FedProxMethod(mu=0.2)]
    opt = palsgd.LocalOptimizer(model, sgd(model), two, sync_every=4, transport=palsgd.Alone())
    assert opt.config["FedProx.mu"] == 0.1
    assert opt.config["FedProx2.mu"] == 0.2


@pytest.mark.parametrize(
    "settings",
    [
        {"draws": "paced", "speeds": "9" * 300},
        {"draws": "paced", "speeds": "several\nlines"},
        {"draws": "balanced", "speeds": [{"round": 0, "speeds": [9.0] * 300}]},
        {"scheduler": range(3)},
    ],
    ids=["digits", "lines", "long", "a range, which has a step"],
)
def test_what_is_shown_of_bad_input_fits_a_line(settings):
    model = linear()
    with pytest.raises(ValueError, match=r"(must|use|give) ") as caught:
        palsgd.PALSGD(model, sgd(model), transport=palsgd.Alone(), **settings)
    assert len(str(caught.value)) < 400
    assert "\n" not in str(caught.value)

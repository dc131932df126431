"""Settings: what is accepted, what is refused and how, and what follows from them."""

import math
import re

import numpy as np
import pytest
import torch
from torch import nn

import palsgd
from palsgd import registry
from palsgd.events import Mixed, Synced
from palsgd.lab import workloads
from palsgd.lab.clock_values import function_of_clock, separated
from palsgd.lab.factory import (
    build_optimizer,
    inner_optimizer,
    learning_rate_factor,
    outer_optimizer,
)
from palsgd.lab.forecast import forecast
from palsgd.lab.methods import default_names, method_of, own_settings, without_effect
from palsgd.lab.run_folder import RunFolder
from palsgd.lab.run_set import check_method, grid_of, random_points
from palsgd.lab.settings import FIELDS, Settings, assignments, parsed
from palsgd.lab.worker_loop import split_batch
from palsgd.transports import Alone, ambient
from support.commands import apart, lines
from support.commands import palsgd as palsgd_command

METHODS = default_names()

base = Settings(workload="digits", steps=100)


def test_every_field_can_be_given_as_text():
    for name in FIELDS:
        value = getattr(base, name)
        if value is not None:
            assert base.changed({name: str(value)}) == base
    assert base.changed({"max_norm": "0.5"}).max_norm == 0.5
    assert base.changed({"max_norm": "0.5"}).changed({"max_norm": "none"}).max_norm is None


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"stepz": "3"}, "there is no setting 'stepz'; did you mean 'steps'?"),
        ({"steps": "abc"}, "steps=abc is no whole number"),
        ({"steps": "1.5"}, "steps=1.5 is no whole number"),
        ({"lr": "fast"}, "lr=fast is no number"),
        ({"lr": "nan"}, "lr=nan"),
        ({"lr": "-1"}, "lr=-1"),
        ({"workers": 0}, "workers=0 must be at least 1"),
        ({"workers": "-2"}, "workers=-2 must be at least 1"),
        ({"epochs": "-1"}, "epochs=-1"),
        ({"warmup_steps": "-1"}, "warmup_steps=-1"),
        ({"mix_prob": "1"}, "mix_prob=1"),
        ({"mix_rate": "-1"}, "mix_rate=-1"),
        ({"max_norm": "0"}, "max_norm=0"),
        ({"method": "palsgdd"}, "method='palsgdd' is unknown; use one of 'anchordecay', 'ddp'"),
        ({"batch_size": 10, "micro_batches": 4}, "not a multiple of micro_batches=4"),
        ({"sharding": "dirichlet"}, "sharding=dirichlet is unknown; use fixed, reshuffled or"),
        ({"sharding": "dirichlet:0"}, "sharding=dirichlet:0 is unknown; use fixed, reshuffled or"),
        ({"sharding": "dirichlet:x"}, "sharding=dirichlet:x is unknown; use fixed, reshuffled or"),
        ({"split": "valid"}, "split='valid' is unknown; use one of 'test', 'choose'"),
        ({"target": "nan"}, "target=nan"),
        ({"target_on": "accuracy"}, "target_on='accuracy' is unknown; use one of 'loss', 'metric'"),
        ({"margin": "-0.1"}, "margin=-0.1"),
        ({"context": "0"}, "context=0 must be at least 1"),
        ({"schedule": "step"}, "add for instance schedule_every=1000"),
        ({"outer_schedule": "step"}, "add for instance schedule_every=1000"),
        ({"schedule_factor": "1.5"}, "schedule_factor=1.5 must be in [0, 1]"),
        ({"schedule_at": "0.5:1.2"}, "schedule_at='0.5:1.2' must be rising shares of the run"),
        ({"schedule_at": "0.7:0.5"}, "schedule_at='0.7:0.5' must be rising shares of the run"),
        ({"schedule_at": "half"}, "schedule_at='half' must be rising shares of the run"),
        (
            {"schedule_at": "0.5", "schedule_every": "10"},
            "schedule_at=0.5 and schedule_every=10 both say when",
        ),
        ({"discard_batches": "true"}, "draws=balanced: batches are counted by the steps"),
        (
            {"discard_batches": "true", "draws": "shared", "delay": "1"},
            "delay=1: batches are counted by the steps at which all workers mix; add delay=0",
        ),
        (
            {"discard_batches": "true", "draws": "shared", "sync_every": "auto"},
            "sync_every=auto: rounds must have one length",
        ),
        ({"outer_schedule": "cosine", "sync_every": "auto"}, "outer_schedule=cosine needs to know"),
        ({"mix_rate": "0:16,0:8"}, "mix_rate=0:16,0:8 is no number and does not say how one"),
        ({"mix_rate": "5:16"}, "mix_rate=5:16 is no number and does not say how one changes"),
        ({"mix_rate": "square:1..0"}, "give a number, 0:16,1000:8 or cosine:0.5..0"),
        ({"mix_rate": "0:16,100:-8"}, "mix_rate=-8"),
        ({"pull": "cosine:0.5..1.5"}, "pull=1.5 must be in [0, 1]"),
        ({"sync_every": "0:16,10:0"}, "sync_every=0 must be at least 1"),
        ({"sync_every": "0:1.5"}, "0:16,1000:64 or qsr:16:0.05"),
        ({"sync_every": "cosine:8..16"}, "0:16,1000:64 or qsr:16:0.05"),
        ({"sync_every": "qsr:16:0"}, "0:16,1000:64 or qsr:16:0.05"),
        ({"sync_every": "0:8,9:16", "delay": 2}, "delay=2 needs rounds of one length"),
        ({"speeds": "1:0.5", "workers": 2}, "add draws=paced, or leave it out"),
        ({"speeds": "1:0.5:1", "draws": "paced", "workers": 2}, "must be 2 numbers > 0, one for"),
        ({"speeds": "1:fast", "draws": "paced", "workers": 2}, "such as speeds=1:0.5"),
        ({"speeds": "1:0", "draws": "paced", "workers": 2}, "speeds='1:0' must be 2 numbers > 0"),
    ],
)
def test_a_bad_value_is_refused_with_the_value(changes, said):
    with pytest.raises(ValueError, match=re.escape(said)):
        base.changed(changes)


class Unprintable:
    def __repr__(self):
        raise RuntimeError


STRANGE = (
    (), [], {}, [1], b"1", 1j, 10**400, -(10**400), 2**63, math.nan, "\0", "a\ud800", "9" * 5000,
    "two\nlines", object(), Unprintable(), print, Settings, np.array([1, 2]), torch.ones(2),
)  # fmt: skip


@pytest.mark.parametrize("name", [*FIELDS, "method_settings"])
def test_any_object_in_place_of_a_setting_is_refused_in_one_short_line(name):
    for value in STRANGE:
        for make in (base.changed, lambda given: Settings(**base.as_dict() | given)):
            said = answer(make, {name: value})
            # a workload is looked for later, and the name of a tuned file is any text
            assert said or name in ("workload", "tuned", "method_settings"), (name, value)
            assert "\n" not in said
            assert len(said) < 500


def answer(make, given):
    """What is said of settings that are refused; nothing of others."""
    try:
        make(given)
    except ValueError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("value", [True, False, 2.0, "2", None])
def test_a_whole_number_is_neither_a_flag_nor_a_fraction(value):
    with pytest.raises(ValueError, match=f"workers={value!r} must be a whole number"):
        Settings(workload="digits", workers=value)


def test_numbers_of_numpy_become_numbers_that_files_hold():
    found = Settings(workload="digits", workers=np.int64(3), lr=np.float32(0.5), steps=np.int8(7))
    assert [type(each) for each in (found.workers, found.lr, found.steps)] == [int, float, int]


@pytest.mark.parametrize("changes", [None, 3, [("lr", 1)], {1: 2}, {None: 3}, {"lr\0": 1}])
def test_changes_that_are_no_settings_are_refused(changes):
    with pytest.raises(ValueError, match=r"must be|no text"):
        base.changed(changes)


def test_a_flag_is_true_or_false_and_nothing_else():
    assert base.changed({"whole_rounds": "yes"}).whole_rounds is True
    assert base.changed({"whole_rounds": "0"}).whole_rounds is False
    with pytest.raises(ValueError, match="whole_rounds='maybe' is neither true nor false"):
        base.changed({"whole_rounds": "maybe"})


def test_a_word_that_is_no_assignment_is_refused():
    for word in ("lr", "lr=", "=3"):
        with pytest.raises(ValueError, match=r"field=value|no setting"):
            assignments([word])


def test_steps_and_epochs_exclude_each_other():
    epochs = base.changed({"epochs": 2})
    assert (epochs.steps, epochs.epochs) == (None, 2)
    assert epochs.total_steps(1280) == 2 * 1280 // (4 * 32)
    assert epochs.changed({"steps": 7}).total_steps(1280) == 7
    with pytest.raises(ValueError, match="add for instance --steps 1000"):
        Settings(workload="digits").total_steps(100)


def test_a_grid_is_all_combinations_and_their_names_tell_the_values():
    points = grid_of(base, {"sync_every": ["8", "16"], "seed": ["1", "2"]})
    assert list(points) == [
        "sync_every=8,seed=1", "sync_every=8,seed=2", "sync_every=16,seed=1", "sync_every=16,seed=2"
    ]  # fmt: skip
    assert [(x.sync_every, x.seed) for x in points.values()] == [(8, 1), (8, 2), (16, 1), (16, 2)]


def test_random_points_are_distinct_within_their_ranges_and_the_same_each_time():
    ranges = {"lr": ["1e-4..1e-1"], "sync_every": ["8..64"], "method": ["diloco", "palsgd"]}
    points = random_points(base, ranges, 40, seed=3)
    assert points == random_points(base, ranges, 40, seed=3) != random_points(base, ranges, 40, 4)
    assert len(points) == 40
    assert all(1e-4 <= x.lr <= 1e-1 and 8 <= x.sync_every <= 64 for x in points.values())
    assert {x.method for x in points.values()} == {"diloco", "palsgd"}
    below = sum(x.lr < 10**-2.5 for x in points.values())
    assert 10 <= below <= 30  # even in the logarithm: about half
    assert len(random_points(base, {"seed": ["1", "2"]}, 40, seed=3)) == 2  # there are no more
    for text in ("1e-1..1e-4", "a..b", "0..1"):
        with pytest.raises(ValueError, match="is no range"):
            random_points(base, {"lr": [text]}, 2, seed=3)


def test_the_learning_rate_falls_after_the_given_shares_of_a_run():
    settings = base.changed({"schedule": "step", "schedule_at": "0.5:0.75", "lr_warmup_steps": 4})
    factors = [learning_rate_factor(settings, 40, clock) for clock in range(40)]
    assert factors[:4] == [(clock + 1) / 5 for clock in range(4)]
    assert set(factors[4:20]) == {1.0}
    assert factors[20:30] == pytest.approx([0.1] * 10)
    assert factors[30:] == pytest.approx([0.01] * 10)


def test_the_inner_momentum_may_be_nesterovs():
    kinds = [
        inner_optimizer(base.changed({"inner": kind, "momentum": momentum}), nn.Linear(2, 1))
        for kind, momentum in (("sgd", 0.9), ("nesterov", 0.9), ("nesterov", 0.0))
    ]
    assert [kind.defaults["nesterov"] for kind in kinds] == [False, True, False]


def test_the_learning_rate_warms_up_then_falls_as_half_a_cosine():
    settings = base.changed({"lr_warmup_steps": 10, "schedule": "cosine"})
    factors = [learning_rate_factor(settings, 110, clock) for clock in range(111)]
    assert factors[:10] == [(clock + 1) / 11 for clock in range(10)]
    assert factors[10] == 1.0
    assert factors[60] == pytest.approx(0.5)
    assert factors[110] == pytest.approx(0.0)
    assert factors[35] == pytest.approx(0.5 * (1 + math.cos(math.pi / 4)))
    constant = base.changed({"lr_warmup_steps": 10})
    assert learning_rate_factor(constant, 110, 100) == 1.0


def test_the_learning_rate_falls_by_a_factor_every_so_many_steps():
    settings = base.changed(
        {"schedule": "step", "schedule_every": 30, "schedule_factor": 0.5, "lr_warmup_steps": 10}
    )
    factors = [learning_rate_factor(settings, 100, clock) for clock in (4, 10, 29, 30, 59, 60, 99)]
    assert factors == [5 / 11, 1, 1, 0.5, 0.5, 0.25, 0.125]


def test_epochs_of_a_schedule_become_steps_with_the_examples():
    settings = Settings(
        workload="digits",
        epochs=9,
        sync_every=30,
        schedule="step",
        schedule_every_epochs=3,
        lr_warmup_epochs=0.5,
    )
    with pytest.raises(ValueError, match=r"^lr_warmup_epochs=0.5 is not known in steps; use"):
        learning_rate_factor(settings, 90, 0)
    resolved = settings.in_steps(1280)  # ten steps of four workers with 32 each
    assert (resolved.steps, resolved.schedule_every, resolved.lr_warmup_steps) == (90, 30, 5)
    assert resolved.epochs == 9
    assert resolved.in_steps(1280) == resolved
    in_steps = settings.changed({"lr_warmup_steps": 7})
    assert (in_steps.lr_warmup_steps, in_steps.lr_warmup_epochs) == (7, 0.0)
    assert in_steps.changed({"lr_warmup_epochs": 1}).in_steps(1280).lr_warmup_steps == 10


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("sync_every", [8, "0:8,16:24"])
@pytest.mark.parametrize("schedule", ["cosine", "step"])
def test_the_outer_learning_rate_follows_the_clock_at_which_a_round_begins(schedule, sync_every):
    settings = base.changed(
        {"method": "diloco", "outer_schedule": schedule, "schedule_every": 20, "outer_lr": 0.5,
         "sync_every": sync_every, "warmup_steps": 4}
    )  # fmt: skip
    model = torch.nn.Linear(3, 1)
    opt = build_optimizer(settings, 52, model)
    began = {0: 4} | ({1: 12, 2: 20, 3: 44} if sync_every != 8 else {1: 12, 2: 20, 3: 28})
    seen = []
    opt.outer.register_step_pre_hook(lambda outer, *_: seen.append(outer.param_groups[0]["lr"]))
    for _ in palsgd.until([0], opt, steps=52):
        model(torch.ones(2, 3)).sum().backward()
        opt.step()
    cosine = {at: 0.5 * (0.5 + 0.5 * math.cos(math.pi * clock / 52)) for at, clock in began.items()}
    step = {at: 0.5 * 0.1 ** (clock // 20) for at, clock in began.items()}
    expected = cosine if schedule == "cosine" else step
    assert seen[: len(expected)] == pytest.approx(list(expected.values()))


@pytest.mark.parametrize(
    ("outer", "kind", "wanted"),
    [
        ("nesterov", torch.optim.SGD, {"momentum": 0.8, "nesterov": True}),
        ("sgd_m", torch.optim.SGD, {"momentum": 0.8, "nesterov": False}),
        ("sgd", torch.optim.SGD, {"momentum": 0.0, "nesterov": False}),
        ("adam", torch.optim.Adam, {"betas": (0.9, 0.999)}),
        ("adamw", torch.optim.AdamW, {"betas": (0.9, 0.999)}),
    ],
)
def test_every_outer_optimizer_is_the_one_its_name_says(outer, kind, wanted):
    settings = base.changed(
        {"outer": outer, "outer_lr": 0.3, "outer_momentum": 0.8, "outer_weight_decay": 0.02}
    )
    built = outer_optimizer(settings)([torch.nn.Parameter(torch.zeros(2))])
    assert type(built) is kind
    for name, value in ({"lr": 0.3, "weight_decay": 0.02} | wanted).items():
        assert built.param_groups[0][name] == value
    still = outer_optimizer(settings.changed({"outer_momentum": 0}))
    assert still([torch.nn.Parameter(torch.zeros(2))]) is not None


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("method", METHODS)
def test_the_schedule_follows_the_clock_and_mixing_steps_are_ticks(method):
    settings = base.changed(
        {"method": method, "schedule": "cosine", "mix_prob": 0.5, "sync_every": 8, "lr": 0.1}
    )
    model = torch.nn.Linear(3, 1)
    opt = build_optimizer(settings, 100, model)
    while opt.clock < 60:
        model(torch.ones(2, 3)).sum().backward()
        opt.step()
        expected = 0.1 * learning_rate_factor(settings, 100, opt.clock)
        assert opt.param_groups[0]["lr"] == pytest.approx(expected)
    assert (opt.gradient_steps < opt.clock) == (method == "palsgd")


# -- settings that change with the clock -----------------------------------------------------------


def test_a_setting_changes_at_steps_or_along_a_course():
    pieces = function_of_clock("mix_rate", "0:16,10:8,20:0", steps=100)
    assert [pieces(clock) for clock in (0, 9, 10, 19, 20, 99)] == [16, 16, 8, 8, 0, 0]
    line = function_of_clock("pull", "linear:0.5..0.1", steps=5)
    assert [line(clock) for clock in range(6)] == pytest.approx([0.5, 0.4, 0.3, 0.2, 0.1, 0.1])
    cosine = function_of_clock("pull", "cosine:0.5..0", steps=101)
    assert [cosine(clock) for clock in (0, 50, 100)] == pytest.approx([0.5, 0.25, 0.0])
    assert cosine(25) == pytest.approx(0.25 * (1 + math.cos(math.pi / 4)))


def test_a_list_of_values_may_have_some_that_change():
    assert separated("8,0:16,1000:8,2,cosine:1..0") == ["8", "0:16,1000:8", "2", "cosine:1..0"]
    assert separated("0:1,5:2,0:3,5:4") == ["0:1,5:2", "0:3,5:4"]


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize(
    ("name", "text"), [("mix_rate", "0:0.5,16:2"), ("mix_rate", "cosine:2..0"), ("pull", "0:1")]
)
def test_mixing_steps_are_as_strong_as_the_setting_says_at_their_clock(name, text):
    settings = base.changed(
        {name: text, "mix_prob": 0.5, "sync_every": 8, "lr": 0.1, "schedule": "cosine"}
    )
    opt, seen = build_optimizer(settings, 32, model := torch.nn.Linear(3, 1)), {}
    opt.on(Mixed, lambda event: seen.__setitem__(opt.clock, (event.steps, event.weight_max)))
    assert opt.config[name] == text
    while opt.clock < 32:
        model(torch.ones(2, 3)).sum().backward()
        opt.step()
    value = function_of_clock(name, text, 32)
    assert seen
    for clock, (steps, weight) in seen.items():  # the clock after the last of its steps
        clocks = range(clock - steps, clock)
        lrs = [0.1 * learning_rate_factor(settings, 32, c) for c in clocks]
        eta = [lr * value(c) / 0.5 for lr, c in zip(lrs, clocks, strict=True)]
        pull = [1 - (1 - value(c)) ** (1 / (0.5 * 8)) for c in clocks]
        assert weight == pytest.approx(max(eta if name == "mix_rate" else pull))


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("method", ["palsgd", "diloco", "localsgd", "slowmo"])
@pytest.mark.parametrize(
    ("rule", "expected"),
    [
        ("0:4,12:8", [14, 22, 30, 38, 40]),
        # alpha / lr is 3 up to step 20 and 6 from then on: rounds of 9, then of 36, cut by the end
        ("qsr:4:0.3", [19, 28, 40]),
        ("qsr:12:0.3", [22, 40]),
    ],
)
def test_rounds_are_as_long_as_the_rule_says_when_they_begin(method, rule, expected):
    settings = base.changed(
        {"method": method, "sync_every": rule, "warmup_steps": 10, "lr": 0.1, "momentum": 0,
         "schedule": "step", "schedule_every": 20, "schedule_factor": 0.5, "pull": 0.1}
    )  # fmt: skip
    opt, seen = build_optimizer(settings, 40, model := torch.nn.Linear(3, 1)), []
    opt.on(Synced, lambda event: seen.append(opt.clock))
    for _ in palsgd.until([0], opt, steps=40):
        model(torch.ones(2, 3)).sum().backward()
        opt.step()
    assert seen == expected
    told = forecast(settings.changed({"steps": 40}))
    assert [clock for clock, _ in told.schedule.exchanges(40, start=10)] == expected


def test_parts_of_a_batch_are_its_parts():
    batch = (torch.arange(8), {"y": torch.arange(16).reshape(8, 2)})
    parts = split_batch(batch, 4)
    assert len(parts) == 4
    assert torch.equal(torch.cat([part[0] for part in parts]), batch[0])
    assert torch.equal(torch.cat([part[1]["y"] for part in parts]), batch[1]["y"])


def test_every_recipe_builds_and_its_grids_fit_it():
    names = workloads.recipes()
    assert {each.workload for each in names.values()} == set(workloads.names())
    for name, fields in workloads.grids().items():
        points = grid_of(names[name.partition("/")[0]], fields)
        assert len(points) == math.prod(len(values) for values in fields.values())


def test_values_that_are_no_text_pass_as_they_are():
    assert parsed("lr", 0.5) == 0.5
    assert parsed("steps", None) is None


# -- settings of methods ---------------------------------------------------------------------------


def test_a_setting_of_a_method_is_written_as_any_other():
    settings = base.changed({"method": "fedprox", "mu": "0.5"})
    assert own_settings(settings) == {"mu": 0.5}
    assert settings.as_dict()["mu"] == 0.5
    assert Settings.from_dict(settings.as_dict()) == settings
    assert base.changed({"method": "fedprox", "method.mu": "0.5"}) == settings


def test_a_setting_whose_name_is_taken_has_a_prefix():
    settings = base.changed({"method": "slowmo", "lr": "0.3", "method.lr": "0.7"})
    assert own_settings(settings) == {"lr": 0.7}
    assert (settings.lr, settings.as_dict()["method.lr"]) == (0.3, 0.7)
    assert own_settings(base.changed({"method": "slowmo"})) == {}


def test_what_the_recipe_has_for_a_method_is_the_methods():
    settings = base.changed({"mix_prob": "0.3", "method.mix_rate": "2"})
    assert own_settings(settings) == {"mix_prob": 0.3, "mix_rate": 2.0}
    assert settings.mix_rate == 2.0


def test_pull_takes_the_place_of_mix_rate_and_the_reverse():
    pulled = base.changed({"mix_rate": "2"}).changed({"pull": "0.3"})
    assert own_settings(pulled) == {"mix_prob": 0.1, "pull": 0.3}
    assert own_settings(pulled.changed({"mix_rate": "2"})) == {"mix_prob": 0.1, "mix_rate": 2.0}
    with pytest.raises(ValueError, match=r"mix_rate=2 and pull=0.3 both say"):
        base.changed({"mix_rate": "2", "pull": "0.3"})
    with pytest.raises(ValueError, match=r"pull=1.5 must be in \[0, 1\]"):
        base.changed({"pull": "1.5"})


def test_every_recipe_says_how_strong_its_mixing_steps_are():
    for settings in workloads.recipes().values():
        assert settings.mix_rate is not None or settings.pull is not None


def test_a_setting_may_be_none_where_the_method_says_so():
    assert base.changed({"rate": "none"}).method_settings == {"rate": None}
    assert base.changed({"rate": "0.1"}).method_settings == {"rate": 0.1}


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("muu", "there is no setting 'muu'; did you mean 'mu'?"),
        ("method.muu", "there is no setting 'method.muu'; did you mean 'method.mu'?"),
    ],
)
def test_a_setting_that_no_method_has_is_refused_with_the_nearest(name, said):
    with pytest.raises(ValueError, match=re.escape(said)):
        base.changed({name: "1"})


def test_a_value_that_a_method_cannot_take_is_refused_before_anything_runs():
    with pytest.raises(ValueError, match="mu=-1"):
        check_method(base.changed({"method": "fedprox", "mu": "-1"}))
    with pytest.raises(ValueError, match="mix_rate <= "):
        check_method(base.changed({"method": "palsgd", "mix_rate": "1000"}))


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("method", registry.names())
def test_every_method_is_built_from_a_recipe(method):
    settings = base.changed({"method": method, "momentum": 0, "sync_every": 8})
    opt = build_optimizer(settings, 100, torch.nn.Linear(3, 1))
    assert opt.method == method_of(settings)
    assert (opt.schedule.warmup == math.inf) == (not registry.row(method).rounds)


@pytest.mark.parametrize("method", registry.names())
def test_settings_without_effect_change_nothing_in_the_optimizer(method):
    others = {"outer_lr": 0.9, "draws": "shared", "mix_rate": 0.5, "mu": 0.3, "sync_every": 9}
    settings = base.changed({"method": method, "momentum": 0, "sync_every": 8})
    for name, value in others.items():
        configs = []
        for each in (settings, settings.changed({name: value})):
            with ambient(Alone()):
                configs.append(build_optimizer(each, 100, torch.nn.Linear(3, 1)).config)
        assert (configs[0] == configs[1]) == (name in without_effect(method)), name


# -- whole runs ------------------------------------------------------------------------------------


@pytest.mark.slow
def test_processes_and_the_simulator_agree_on_settings_that_change_with_the_clock(tmp_path):
    words = (
        "digits", "sync_every=0:8,20:12", "pull=cosine:0.5..0", "outer_schedule=cosine",
        "schedule=step", "schedule_every_epochs=1", "lr_warmup_epochs=0.5",
        "sharding=dirichlet:0.3", "warmup_steps=3", "evaluate_every=9", "--workers", 2,
        "--steps", 45, "--no-report",
    )  # fmt: skip
    said = apart("train", *words, "--out", tmp_path / "real")
    assert said.code == 0, said.err
    assert palsgd_command("train", *words, "--simulate", "--out", tmp_path / "simulated").code == 0
    real, simulated = (lines(tmp_path / name / "palsgd") for name in ("real", "simulated"))
    assert [line["step"] for line in real] == [line["step"] for line in simulated]
    for name in ("loss", "metric", "train_metric", "lr"):
        values = [[line[name] for line in each if "loss" in line] for each in (real, simulated)]
        assert values[0] == pytest.approx(values[1], abs=1e-5), name
    config = RunFolder(tmp_path / "real" / "palsgd").config()
    assert (config["schedule_every"], config["lr_warmup_steps"]) == (22, 11)  # of 22 steps
    again = palsgd_command(
        "train", *words, "--simulate", "--resume", "--out", tmp_path / "simulated"
    )
    assert again.code == 0, again.err  # what was given in epochs is not taken for another setting


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("stories sharding=dirichlet:1", "sharding=dirichlet:1 deals out examples by their labels"),
        ("stories target_on=train_metric", "stories has no metric on training examples; use"),
        ("digits context=9", "context=9 is for texts that are cut, and digits has none"),
        ("digits mix_rate=0:1,100:1000", "use mix_rate <= 50"),
    ],
)
def test_what_a_workload_or_a_method_cannot_follow_is_one_line_and_exit_code_2(
    words, said, tmp_path
):
    answer = palsgd_command("train", *words.split(), "--simulate", "--out", tmp_path / "p")
    assert answer.code == 2, answer.err
    assert said in " ".join(answer.err.split())


def test_the_optimizers_of_the_papers_figure_are_different_programs():
    points = grid_of(
        workloads.recipe("tinystories-gptneo-8m"),
        workloads.grid("tinystories-gptneo-8m/optimizers"),
    )
    found = set()
    for settings in points.values():
        inner = inner_optimizer(settings, torch.nn.Linear(2, 1))
        outer = outer_optimizer(settings)([torch.nn.Parameter(torch.zeros(2))])
        found.add(tuple((type(each).__name__, str(each.defaults)) for each in (inner, outer)))
    assert len(found) == len(points) == 3 * 4 * 3


def test_the_papers_search_for_vgg16_has_its_points_and_some_overshoot():
    points = grid_of(workloads.recipe("cifar10-vgg16"), workloads.grid("cifar10-vgg16/search"))
    assert len(points) == 135
    refused = [
        settings
        for settings in points.values()
        if settings.lr * settings.mix_rate / settings.mix_prob > 1
    ]
    assert len(refused) == 10
    for settings in points.values():
        if settings in refused:
            with pytest.raises(ValueError, match=r"mix_rate <= "):
                check_method(settings)
        else:
            check_method(settings)


def test_a_paced_simulation_takes_the_speeds_of_its_cluster(tmp_path):
    words = ("train", "digits", "draws=paced", "--workers", 3, "--steps", 24, "--sync-every", 8,
             "warmup_steps=0", "--simulate", "--no-report", "--quiet",
             "--cluster", "1gbit,1ms,step=10ms,straggler=3")  # fmt: skip
    found = []
    for more in ((), (f"speeds=1:1:{1 / 3!r}",), ("draws=balanced",)):
        out = tmp_path / str(len(found))
        assert palsgd_command(*words, *more, "--out", out).code == 0
        found.append([line["train_loss"] for line in lines(out / "palsgd")])
    assert found[0] == found[1] != found[2]

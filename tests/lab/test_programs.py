"""Settings that are the same program are known before they run, and others are not taken for it."""

import gc
import weakref
from types import SimpleNamespace

import pytest
import torch

from palsgd.lab import simulated_program, workloads
from palsgd.lab.programs import first_of_each, program, settings_in
from palsgd.lab.run_set import Options, run_all
from palsgd.lab.simulated_program import in_turn
from palsgd.simulator import program as simulator_program
from support.commands import lines

BASE = workloads.recipe("digits").changed(
    {"workers": 2, "steps": 24, "sync_every": 4, "warmup_steps": 4}
)
MEAN = {"method": "diloco", "outer": "sgd", "outer_lr": 1.0}

# Two settings, each as changes of BASE, that say the same in different words
SAME = {
    "a warm-up as long as the run is DDP": (
        {"method": "ddp"},
        {"method": "palsgd", "warmup_steps": 24},
    ),
    "one worker averages with nobody": (
        {"method": "ddp", "workers": 1},
        {"method": "localsgd", "workers": 1, "warmup_steps": 0},
    ),
    "PALSGD that never mixes is DiLoCo": (
        {"method": "palsgd", "mix_prob": 0.0},
        {"method": "diloco"},
    ),
    "DiLoCo whose outer step is the mean is Local SGD": (MEAN, {"method": "localsgd"}),
    "Nesterov without momentum is SGD": (
        MEAN,
        {"method": "diloco", "outer": "nesterov", "outer_lr": 1.0, "outer_momentum": 0.0},
    ),
    "AdamW without weight decay is Adam": (
        {"method": "ddp", "inner": "adamw"},
        {"method": "ddp", "inner": "adam", "momentum": 0.5},
    ),
    "DDP is not paced": (
        {"method": "ddp"},
        {"method": "ddp", "draws": "paced", "speeds": "1:0.5"},
    ),
    "no pull, in either unit": (
        {"method": "palsgd", "mix_rate": 0.0},
        {"method": "palsgd", "pull": 0.0},
    ),
}
DIFFERENT = {
    "another seed": ({"seed": 1}, {"seed": 2}),
    "a warm-up that ends": ({"method": "ddp"}, {"method": "palsgd", "warmup_steps": 23}),
    "one worker with an outer step": (
        {"method": "ddp", "workers": 1},
        {"method": "diloco", "workers": 1, "warmup_steps": 0},
    ),
    "one worker with a late sync": (
        {"method": "ddp", "workers": 1},
        {"method": "localsgd", "workers": 1, "warmup_steps": 0, "delay": 1},
    ),
    "momentum": (MEAN, {**MEAN, "outer": "sgd_m", "outer_momentum": 0.5}),
    "momentum of SGD": ({"inner": "sgd", "momentum": 0.5}, {"inner": "sgd", "momentum": 0.9}),
    "a pull": ({"mix_rate": 0.0}, {"mix_rate": 1.0}),
    "draws of a method that mixes": ({"draws": "balanced"}, {"draws": "independent"}),
    "a codec": ({"compress": None}, {"compress": "int8"}),
    "paced draws of a method that does not mix": (
        {"method": "diloco"},
        {"method": "diloco", "draws": "paced", "speeds": "1:0.5"},
    ),
    "other speeds": (
        {"draws": "paced", "speeds": "1:0.4"},
        {"draws": "paced", "speeds": "1:0.5"},
    ),
    "weight decay": ({"inner": "adam", "weight_decay": 0.1}, {"weight_decay": 0.1}),
}
same = pytest.mark.parametrize("pair", SAME.values(), ids=SAME)


@same
def test_settings_in_other_words_are_one_program(pair):
    one, other = (program(BASE.changed(changes)) for changes in pair)
    assert one == other


@same
def test_programs_that_are_called_the_same_end_the_same(pair, tmp_path):
    """The proof by training: what is linked would have given these lines."""
    ends = []
    for number, changes in enumerate(pair):
        run_all({"run": BASE.changed(changes)}, tmp_path / str(number),
                Options(simulate=True, quiet=True))  # fmt: skip
        ends.append(lines(tmp_path / str(number) / "run")[-1])
    assert ends[0]["loss"] == pytest.approx(ends[1]["loss"], rel=1e-5)
    assert ends[0]["gradient_steps"] == ends[1]["gradient_steps"]


@pytest.mark.parametrize("pair", DIFFERENT.values(), ids=DIFFERENT)
def test_settings_with_an_effect_tell_programs_apart(pair):
    one, other = (program(BASE.changed(changes)) for changes in pair)
    assert one != other


def test_a_methods_ignored_settings_do_not_count():
    ddp = BASE.changed({"method": "ddp"})
    for change in ({"sync_every": 8}, {"mix_prob": 0.5}, {"outer_lr": 9.0}, {"margin": 0.5}):
        assert program(ddp.changed(change)) == program(ddp)


def test_the_first_of_each_program_keeps_its_name():
    runs = {
        f"{method}-{every}": BASE.changed({"method": method, "sync_every": every})
        for method in ("ddp", "palsgd")
        for every in (4, 8)
    }
    assert first_of_each(runs) == {
        "ddp-4": "ddp-4", "ddp-8": "ddp-4", "palsgd-4": "palsgd-4", "palsgd-8": "palsgd-8",
    }  # fmt: skip


def test_a_run_in_epochs_is_the_one_in_as_many_steps_once_its_config_says_so():
    epochs = BASE.changed({"epochs": 2.0})
    config = epochs.as_dict() | {"steps": 24}
    assert program(settings_in(config)) == program(BASE)


def test_settings_of_a_version_that_knew_more_are_unknown():
    assert settings_in({"workload": "digits", "method": "adasgd"}) is None


def test_workers_whose_gradients_are_graphs_train_in_turn_unless_told_otherwise():
    def chosen(vectorize, *, graphs=True, device="cuda"):
        return in_turn(SimpleNamespace(graphs=graphs), torch.device(device), vectorize)

    assert chosen("auto")
    assert chosen(False, graphs=False, device="cpu")
    assert not chosen(True)
    assert not chosen("auto", graphs=False)
    assert not chosen("auto", device="cpu"), "graphs are those of a GPU"


def test_a_program_that_has_ended_is_gone_before_the_next_one_is_made(monkeypatch, tmp_path):
    """Workers that train in turn, one run at a time: each has the memory to itself."""
    models, alive = [], []
    check = simulator_program.check_copies

    def watched(model):
        gc.collect()
        alive.append(sum(each() is not None for each in models))
        models.append(weakref.ref(model))
        check(model)

    monkeypatch.setattr(simulator_program, "check_copies", watched)
    monkeypatch.setattr(simulator_program, "runs_that_fit", lambda model, workers: 1)
    monkeypatch.setattr(simulated_program, "in_turn", lambda *_: True)
    runs = {f"seed={seed}": BASE.changed({"seed": seed, "sync_every": 12}) for seed in (1, 2, 3)}
    run_all(runs, tmp_path / "runs", Options(simulate=True, quiet=True))
    assert alive == [0, 0, 0]

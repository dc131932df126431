"""When runs are evaluated, on what, and with which buffers: alike in simulated and real runs."""

import random

import numpy as np
import pytest
import torch
from torch import nn

from palsgd.lab import classification, evaluation, workloads
from palsgd.lab.evaluation import evaluation_is_due
from palsgd.lab.run_folder import RunFolder
from palsgd.lab.settings import Settings
from palsgd.lab.simulated_program import simulate_runs
from palsgd.lab.simulated_run import SimulatedRun
from palsgd.lab.trainer import Trainer
from palsgd.lab.workloads.digits import Digits
from palsgd.schedule import Schedule
from support.commands import apart, lines, palsgd

DELAYED = (
    "compare", "digits", "sync_every=16", "delay=16", "evaluate_every=160", "warmup_steps=0",
    "--methods", "diloco", "--workers", 2, "--steps", 640, "--quiet", "--no-report",
    "--device", "cpu",
)  # fmt: skip


@pytest.mark.parametrize("seed", range(30))
def test_a_run_is_evaluated_at_the_first_change_at_or_after_each_multiple(seed):
    rng = random.Random(seed)
    fragments, every, end = rng.choice((1, 2, 3)), rng.randint(1, 40), rng.randint(1, 150)
    length = rng.randint(fragments, 20)
    schedule = Schedule.fixed(
        sync_every=length, fragments=fragments, delay=rng.randint(0, length // fragments),
        warmup=rng.choice((0, 5, 33)), end=end,
    )  # fmt: skip
    changes = [clock for clock in range(1, end + 1) if schedule.changes_model(clock)]
    firsts = {
        next((c for c in changes if c >= multiple), None)
        for multiple in range(every, end + 1, every)
    }
    found = [clock for clock in changes if evaluation_is_due(schedule, every, clock)]
    assert found == sorted(firsts - {None})


def evaluated(folder):
    return [line["step"] for line in lines(folder / "diloco") if "metric" in line]


def test_a_simulated_run_with_the_longest_delay_is_evaluated_when_asked(tmp_path):
    said = palsgd(*DELAYED, "--simulate", "--out", tmp_path / "p")
    assert said.code == 0, said.err
    assert evaluated(tmp_path / "p") == [0, 160, 320, 480, 640]


@pytest.mark.slow
def test_a_real_run_with_the_longest_delay_is_evaluated_when_asked(tmp_path):
    said = apart(*DELAYED, "--out", tmp_path / "p")
    assert said.code == 0, said.err
    assert evaluated(tmp_path / "p") == [0, 160, 320, 480, 640]


# -- on what, and with which buffers ---------------------------------------------------------------


class NormedDigits(Digits):
    """With statistics that must be taken, and dropout that must draw nothing for them."""

    def model(self):
        return nn.Sequential(
            nn.Linear(64, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.2), nn.Linear(16, 10)
        )


SETTINGS = Settings(
    workload="digits", workers=1, steps=24, sync_every=4, mix_prob=0.3, warmup_steps=6,
    evaluate_every=6, lr=0.05, pull=0.5,
)  # fmt: skip


def in_a_process(settings, folder):
    Trainer(settings, NormedDigits(seed=settings.seed), RunFolder(folder), quiet=True).train()
    return [line for line in RunFolder(folder).lines() if "loss" in line]


def simulated(settings, folder):
    run = SimulatedRun(settings, NormedDigits(seed=settings.seed), RunFolder(folder))
    simulate_runs([run], quiet=True, vectorize=False)
    return [line for line in RunFolder(folder).lines() if "loss" in line]


@pytest.mark.usefixtures("alone")
def test_processes_and_the_simulator_recompute_buffers_alike(tmp_path):
    settings = SETTINGS.changed({"buffers": "recompute"})
    real = in_a_process(settings, tmp_path / "real")
    twin = simulated(settings, tmp_path / "exact")
    for name in ("loss", "metric", "train_metric"):
        values = [[line[name] for line in lines] for lines in (real, twin)]
        assert values[0] == pytest.approx(values[1], rel=1e-5), name
    assert len(real) == 5


def test_recomputed_buffers_are_the_mean_over_the_batches_of_all_workers(tmp_path):
    settings = SETTINGS.changed({"buffers": "recompute", "workers": 3})
    workload = NormedDigits(seed=settings.seed)
    run = SimulatedRun(settings, workload, RunFolder(tmp_path))
    torch.manual_seed(0)
    model = workload.model()
    run.recompute_buffers(model)
    before = nn.Sequential(*list(model)[:1])
    activations = [
        before(workload.batch(worker=worker, workers=3, size=32, index=index)[0]).detach()
        for worker in range(3)
        for index in range(16)
    ]
    means = torch.stack([each.mean(0) for each in activations]).mean(0)
    spreads = torch.stack([each.var(0) for each in activations]).mean(0)
    assert torch.allclose(model[1].running_mean, means, atol=1e-5)
    assert torch.allclose(model[1].running_var, spreads, atol=1e-5)


@pytest.mark.usefixtures("alone")
def test_taking_statistics_changes_nothing_in_training(tmp_path):
    """The local buffers of one worker are the global ones, but for what is recomputed; so two
    runs that differ in the policy alone train to the same weights."""
    found = {}
    for policy in ("local", "recompute"):
        settings, folder = SETTINGS.changed({"buffers": policy}), RunFolder(tmp_path / policy)
        trainer = Trainer(settings, NormedDigits(seed=settings.seed), folder, quiet=True)
        trainer.train()
        found[policy] = [p.detach().clone() for p in trainer.net.parameters()]
    pairs = zip(found["local"], found["recompute"], strict=True)
    assert all(torch.equal(one, other) for one, other in pairs)


@pytest.mark.parametrize("vectorize", [False, True])
def test_lines_have_the_metric_on_training_examples_where_the_workload_has_one(tmp_path, vectorize):
    digits = workloads.load("digits", seed=SETTINGS.seed)
    run = SimulatedRun(SETTINGS.changed({"workers": 2}), digits, RunFolder(tmp_path))
    simulate_runs([run], quiet=True, vectorize=vectorize)
    lines = [line for line in RunFolder(tmp_path).lines() if "loss" in line]
    best = RunFolder(tmp_path).best()
    model = digits.model()
    model.load_state_dict(best["model"])
    with torch.no_grad():
        right = model(digits.train_images).argmax(1) == digits.train_labels
    line = next(line for line in lines if line["step"] == best["step"])
    assert line["train_metric"] == pytest.approx(float(right.float().mean()))
    assert len(lines) == len([line for line in lines if 0 <= line["train_metric"] <= 1]) > 3


def test_stories_have_no_metric_on_training_examples():
    stories = workloads.load("stories")
    assert set(evaluation.evaluated(stories, stories.model())) == {"loss", "metric"}


@pytest.mark.parametrize(("examples", "every"), [(7, 1), (20, 1), (21, 2), (50, 3)])
def test_a_sample_is_every_so_many_examples_and_its_parts_are_the_whole(
    examples, every, monkeypatch
):
    monkeypatch.setattr(classification, "SAMPLE", 20)
    found = [
        i
        for part in range(3)
        for own in classification.sample_slices(examples, part, 3, size=4)
        for i in range(examples)[own]
    ]
    assert found == list(range(0, examples, every))


def test_scores_of_numpy_are_plain_numbers_which_a_checkpoint_may_hold():
    workload = Digits(device=torch.device("cpu"), data=None)
    workload.score = lambda totals: (np.float64(0.5), np.float64(0.25))
    found = evaluation.evaluated(workload, workload.model())
    assert {type(value) for value in found.values()} == {float}
    assert (found["loss"], found["metric"]) == (0.5, 0.25)

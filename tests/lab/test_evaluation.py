"""When runs are evaluated: one rule for simulated and real ones."""

import random

import pytest

from palsgd.lab.evaluation import evaluation_is_due
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

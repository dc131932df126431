"""Workers of several processes in the lab, against workers of one."""

import os
import signal

import pytest

from palsgd.lab.settings import Settings
from support.commands import (
    alive,
    apart,
    children,
    lines,
    palsgd,
    saved_step,
    started,
    summary,
    wait_for,
)
from support.patience import patient

DIGITS = (
    "digits", "warmup_steps=4", "evaluate_every=6", "micro_batches=2", "--workers", 2, "--steps",
    24, "--sync-every", 6, "--mix-prob", 0.2, "--seed", 7, "--no-report", "--quiet",
)  # fmt: skip


@pytest.mark.slow
def test_workers_of_two_processes_train_as_workers_of_one_and_send_as_much(tmp_path):
    one, two = tmp_path / "one", tmp_path / "two"
    for out, ranks in ((one, 1), (two, 2)):
        said = apart(
            "compare", *DIGITS, "--methods", "ddp,palsgd", "--ranks-per-worker", ranks, "--out", out
        )
        assert said.code == 0, said.err
    for method in ("ddp", "palsgd"):
        want, got = summary(one)[method], summary(two)[method]
        assert got["final_loss"] == pytest.approx(want["final_loss"], rel=1e-4)
        assert got["gradient_steps"] == want["gradient_steps"]
        assert got["syncs"] == want["syncs"]
        # DDP inside `step()` also sends a header with every gradient, and DDP in backward does not.
        assert got["bytes_sent"] == pytest.approx(want["bytes_sent"], rel=0.02)
        for mine, theirs in zip(lines(two / method), lines(one / method), strict=True):
            assert len(mine["distance"]) == len(theirs["distance"]) == 2
            assert mine["distance"] == pytest.approx(theirs["distance"], rel=1e-2)
            if theirs["train_loss"] is not None:
                assert mine["train_loss"] == pytest.approx(theirs["train_loss"], rel=1e-4)


@pytest.mark.slow
def test_a_killed_run_of_workers_of_two_processes_goes_on_bit_for_bit(tmp_path):
    once, killed = tmp_path / "once", tmp_path / "killed"
    words = ("train", *DIGITS, "--steps", 200, "--ranks-per-worker", 2)
    assert apart(*words, "--out", once).code == 0
    with started(*words, "--out", killed) as process:
        wait_for(lambda: saved_step(killed / "palsgd") >= 18, process=process)
        workers = children(process.pid)
        os.kill(process.pid, signal.SIGKILL)
        process.wait(timeout=patient(30))
        wait_for(lambda: not alive(workers), process=None, timeout=20)
    assert 0 < saved_step(killed / "palsgd") < 200
    assert apart(*words, "--out", killed, "--resume").code == 0
    want, got = (
        [{**line, "time_s": 0} for line in lines(out / "palsgd")] for out in (once, killed)
    )
    assert got == want


def test_a_simulation_with_several_ranks_per_worker_is_refused_in_one_line(tmp_path):
    said = palsgd("train", *DIGITS, "--ranks-per-worker", 2, "--simulate", "--out", tmp_path)
    assert said.code == 2
    assert "--ranks-per-worker 2 is for real processes" in said.line
    assert "leave out --simulate" in said.line


def test_a_batch_that_the_ranks_of_a_worker_cannot_share_is_refused(tmp_path):
    said = palsgd("train", *DIGITS, "--ranks-per-worker", 3, "--out", tmp_path)
    assert said.code == 2
    assert "batch_size=32, of a worker, is not a multiple of 6" in said.line


def test_a_link_of_a_worker_of_several_ranks_is_refused(tmp_path):
    words = ("--workers", 2, "--out", tmp_path)
    said = palsgd("bench", "link", "digits", "ranks_per_worker=2", *words)
    assert said.code == 2
    assert "use ranks_per_worker=1" in said.line


def test_processes_are_workers_times_ranks():
    assert Settings(workload="digits", workers=3, ranks_per_worker=4).processes == 12

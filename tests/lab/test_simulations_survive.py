"""Simulated runs that are stopped, killed or refused: what is said of them is true, and they go on
bit for bit."""

import math
import os
import random
import shlex
import shutil
import signal

import pytest
import torch
import yaml

from palsgd import interrupts
from palsgd.lab import simulated_program, simulated_run
from palsgd.lab.run_folder import RunFolder
from palsgd.lab.simulated_run import SimulatedRun
from palsgd.simulator import Checkpoints
from support.commands import lines, palsgd, records, started, summary, wait_for
from support.exact_engine import use_exact_engine
from support.places import ROOT, SOURCE

NAMES = ["method=diloco,seed=1", "method=diloco,seed=2", "method=palsgd,seed=1",
         "method=palsgd,seed=2"]  # fmt: skip
STEPS, EVERY = 80, 8


def sweep(out, *more, steps=STEPS):
    """Four points that share a program where they are stacked."""
    return (
        "sweep", "digits", "method=diloco,palsgd", "seed=1,2", "workers=2", f"steps={steps}",
        "sync_every=4", "warmup_steps=6", f"evaluate_every={EVERY}", "inner=adamw", "lr=0.002",
        "schedule=cosine", "--simulate", "--no-report", "--quiet", "--out", out, *more,
    )  # fmt: skip


@pytest.fixture(params=["vectorized", "exact"])
def engine(request, monkeypatch):
    if request.param == "exact":
        use_exact_engine(monkeypatch.setattr)
    return request.param


def config(folder):
    return yaml.safe_load((folder / "config.yaml").read_text())


def untimed(record):
    return {k: v for k, v in record.items() if not k.endswith("_s") and k != "metric_at_equal_time"}


def assert_same_files(mine, theirs):
    for name in NAMES:
        own, other = mine / name, theirs / name
        assert list(map(untimed, lines(own))) == list(map(untimed, lines(other)))
        assert untimed(summary(own)) == untimed(summary(other))
        assert config(own)["engine"] == config(other)["engine"]
        best, wanted = (RunFolder(folder).best() for folder in (own, other))
        assert (best["step"], best["metric"]) == (wanted["step"], wanted["metric"])
        for key, x in wanted["model"].items():
            assert torch.equal(best["model"][key], x)
        assert not (own / "checkpoints").exists()


@pytest.mark.slow
def test_a_sweep_that_was_killed_goes_on_bit_for_bit(engine, tmp_path):
    assert palsgd(*sweep(tmp_path / "whole")).code == 0
    out, moment = tmp_path / "killed", random.Random().randrange(2, 18)
    written = out / NAMES[0] / "metrics.jsonl"
    tests = os.pathsep.join([str(SOURCE), str(ROOT / "tests")])
    with started(
        *sweep(out),
        module="support.exact_engine" if engine == "exact" else "palsgd",
        before=("env", f"PYTHONPATH={tests}"),
    ) as process:
        wait_for(
            lambda: written.exists() and len(written.read_text().splitlines()) >= moment,
            process=process,
        )
        os.kill(process.pid, signal.SIGKILL)
        process.wait(timeout=30)
    assert not (out / NAMES[0] / "summary.json").exists(), f"killed too late, at line {moment}"
    together = NAMES if engine == "vectorized" else NAMES[:1]
    assert config(out / NAMES[0])["program"] == together
    said = palsgd(*sweep(out, "--resume"))
    assert said.code == 0, (moment, said.err)
    assert_same_files(out, tmp_path / "whole")


def stop_at(monkeypatch, thing, name, call, number=signal.SIGINT):
    """Ctrl-C, or another signal, at a call of a method, before it has done anything."""
    original, calls = getattr(thing, name), []

    def stopping(*arguments, **known):
        calls.append(arguments)
        if len(calls) == call:
            signal.raise_signal(number)
        return original(*arguments, **known)

    monkeypatch.setattr(thing, name, stopping)


def go_on(said):
    """The command that the last line names."""
    return palsgd(*shlex.split(said.line.partition("Go on with: palsgd ")[2]))


def test_after_ctrl_c_is_said_what_is_kept_and_how_to_go_on(engine, tmp_path, monkeypatch):
    steps, out = 32, tmp_path / "stopped"
    assert palsgd(*sweep(tmp_path / "whole", steps=steps)).code == 0
    with monkeypatch.context() as patch:
        stop_at(patch, Checkpoints, "save", 1)
        said = palsgd(*sweep(out, steps=steps))
    assert said.code == 130
    nothing = "stopped; nothing is kept, as no run had its first checkpoint yet. Go on with: palsgd"
    assert nothing in said.line
    with monkeypatch.context() as patch:
        stop_at(patch, Checkpoints, "save", 3)
        said = palsgd(*sweep(out, "--resume", steps=steps))
    count = "4 runs" if engine == "vectorized" else "1 run"
    assert f"stopped; kept: {count} up to the last checkpoint (step 1" in said.line
    assert go_on(said).code == 0
    assert_same_files(out, tmp_path / "whole")


@pytest.mark.parametrize(
    ("more", "seconds", "saves"),
    [((), 0.5, 10), ((), 20.0, 1), ((), 2.0, 5), (("checkpoint_every=2",), 20.0, 10)],
)
def test_saves_that_take_seconds_are_made_for_a_tenth_of_the_time(
    more, seconds, saves, tmp_path, monkeypatch
):
    """Each stretch between two pauses takes 10 seconds here; there are ten, the last at the end."""
    now, count = [0.0], []
    whole, pause = Checkpoints.save, SimulatedRun.pause

    def slow(self, *args):
        count.append(now[0])
        now[0] += seconds
        whole(self, *args)

    def paused(self, history):
        now[0] += 10.0
        pause(self, history)

    monkeypatch.setattr(simulated_program.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(Checkpoints, "save", slow)
    monkeypatch.setattr(SimulatedRun, "pause", paused)
    out = tmp_path / "run"
    words = ("digits", *more, "workers=2", "sync_every=4", "evaluate_every=8", "warmup_steps=0")
    done = palsgd("train", *words, "steps=80", "--simulate", "--quiet", "--out", out)
    assert done.code == 0
    assert len(count) == saves


@pytest.mark.parametrize("number", interrupts.ENDING)
def test_signals_that_end_a_command_keep_what_ctrl_c_keeps(number, tmp_path, monkeypatch):
    steps, out, before = 16, tmp_path / "stopped", signal.getsignal(number)
    assert palsgd(*sweep(tmp_path / "whole", steps=steps)).code == 0
    with monkeypatch.context() as patch:
        stop_at(patch, Checkpoints, "save", 2, number)
        said = palsgd(*sweep(out, steps=steps))
    assert said.code == 128 + number
    assert "stopped; kept: 4 runs up to the last checkpoint (step 10). Go on with: " in said.line
    assert signal.getsignal(number) is before
    assert go_on(said).code == 0
    assert_same_files(out, tmp_path / "whole")


def test_runs_go_on_beside_those_of_their_program_that_are_finished(tmp_path, monkeypatch):
    steps, out = 16, tmp_path / "stopped"
    assert palsgd(*sweep(tmp_path / "whole", steps=steps)).code == 0
    with monkeypatch.context() as patch:
        stop_at(patch, SimulatedRun, "finish", 3)
        said = palsgd(*sweep(out, steps=steps))
    assert "kept: 2 runs finished, 2 runs up to the last checkpoint (step 16)" in said.line
    before = {path: path.stat().st_mtime_ns for path in out.glob("*seed=1/*.json*")}
    finished = [path for path in before if (path.parent / "summary.json").exists()]
    assert go_on(said).code == 0
    for path in (path for path in finished if path.name == "metrics.jsonl"):
        assert path.stat().st_mtime_ns == before[path]
    assert_same_files(out, tmp_path / "whole")


def test_a_run_without_a_checkpoint_starts_over_and_says_so(tmp_path, monkeypatch, caplog):
    out = tmp_path / "stopped"
    with monkeypatch.context() as patch:
        stop_at(patch, Checkpoints, "save", 2)
        assert palsgd(*sweep(out, steps=16)).code == 130
    shutil.rmtree(out / NAMES[0] / "checkpoints")
    assert palsgd(*sweep(out, "--resume", steps=16)).code == 0
    for name in NAMES:
        assert f"{out / name} starts over from step 0, as it has no checkpoint" in caplog.text
    assert [line["step"] for line in lines(out / NAMES[0])][-1] == 16


def test_nothing_is_deleted_where_no_checkpoint_can_be_read(tmp_path, monkeypatch):
    out = tmp_path / "stopped"
    with monkeypatch.context() as patch:
        stop_at(patch, Checkpoints, "save", 3)
        assert palsgd(*sweep(out, steps=32)).code == 130
    for path in out.rglob("contents.json"):
        path.write_text("")
    before = {path: path.stat().st_mtime_ns for path in out.rglob("*") if path.is_file()}
    with pytest.warns(UserWarning, match="is damaged and left out"):
        said = palsgd(*sweep(out, "--resume", steps=32))
    assert said.code == 2
    place = out / NAMES[0] / "checkpoints"
    assert said.line == (
        f"palsgd: no checkpoint in {place} is whole; restore one, use --force to start over, or "
        "another --out"
    )
    after = {path: path.stat().st_mtime_ns for path in out.rglob("*") if path.is_file()}
    assert after == before


def test_runs_whose_company_is_gone_start_over_and_say_so(tmp_path, monkeypatch, caplog):
    out = tmp_path / "stopped"
    with monkeypatch.context() as patch:
        stop_at(patch, Checkpoints, "save", 2)
        assert palsgd(*sweep(out, steps=16)).code == 130
    fewer = [word.replace("seed=1,2", "seed=2,3") if isinstance(word, str) else word
             for word in sweep(out, "--resume", steps=16)]  # fmt: skip
    assert palsgd(*fewer).code == 0
    assert (
        f"{out / NAMES[1]} starts over from step 0, as it shared a program with {NAMES[0]}"
        in caplog.text
    )
    assert set(records(out)) == {"method=diloco", "method=palsgd"}
    assert all(record["seeds"] == [2, 3] for record in records(out).values())


def test_the_best_model_is_written_with_a_state_or_at_the_end_and_not_at_every_evaluation(
    engine, tmp_path, monkeypatch
):
    write, written = RunFolder.write_best, []

    def counted(folder, best):
        written.append(folder.path.name)
        write(folder, best)

    monkeypatch.setattr(RunFolder, "write_best", counted)
    monkeypatch.setattr(simulated_program, "QUICK_S", 0.0)  # one state, and none soon after it
    assert palsgd(*sweep(tmp_path / "out", steps=24)).code == 0
    for name in NAMES:
        assert len([line for line in lines(tmp_path / "out" / name) if "metric" in line]) > 3
        assert 1 <= written.count(name) <= 2
        best = RunFolder(tmp_path / "out" / name).best()
        assert best["step"] == summary(tmp_path / "out" / name)["best_step"]


def test_a_model_whose_first_metric_is_nan_is_kept_with_its_step(engine, tmp_path, monkeypatch):
    evaluated = simulated_run.evaluated
    monkeypatch.setattr(
        simulated_run, "evaluated", lambda *args: evaluated(*args) | {"metric": math.nan}
    )
    assert palsgd(*sweep(tmp_path / "out", steps=8)).code == 0
    assert RunFolder(tmp_path / "out" / NAMES[0]).best()["step"] == 0


def test_there_is_something_to_look_at_while_runs_are_simulated(engine, tmp_path, monkeypatch):
    save, seen = Checkpoints.save, []

    def looking(checkpoints, clock, state):
        folder = checkpoints.folder.parent
        found, rows = config(folder), lines(folder)
        assert found["engine"] == engine
        assert folder.name in found["program"]
        assert (rows[0]["step"], rows[-1]["step"]) == (0, clock)
        assert rows[-1]["simulation_s"] > 0
        assert "metric" in rows[-1]
        assert RunFolder(folder).best()["step"] <= clock
        assert all((tmp_path / "out" / name / "config.yaml").exists() for name in NAMES)
        seen.append(clock)
        save(checkpoints, clock, state)

    monkeypatch.setattr(Checkpoints, "save", looking)
    assert palsgd(*sweep(tmp_path / "out", steps=24)).code == 0
    assert seen == [10, 18, 24] * (1 if engine == "vectorized" else 4)


# -- points that cannot work -----------------------------------------------------------------------


def point(out, *words):
    return ("sweep", "digits", *words, "workers=2", "steps=8", "sync_every=4", "warmup_steps=0",
            "--simulate", "--no-report", "--quiet", "--out", out)  # fmt: skip


@pytest.mark.parametrize(
    ("words", "kept", "reason"),
    [
        (("mix_rate=10,1e6",), "mix_rate=10", "mix_rate=1e6: mix_rate=1e+06 gives beta="),
        (("delay=1,7",), "delay=1", "delay=7: delay=7"),
    ],
)
def test_points_that_are_refused_are_listed_and_skipped(words, kept, reason, tmp_path, caplog):
    out = tmp_path / "out"
    said = palsgd(*point(out, *words))
    assert said.code == 1
    assert f"1 of the runs were refused and skipped ({reason}" in said.err
    assert " is skipped: " in caplog.text
    assert set(records(out)) == {kept}
    assert [path.name for path in out.iterdir() if path.is_dir()] == [kept]


def test_a_sweep_of_refused_points_runs_nothing(tmp_path):
    said = palsgd(*point(tmp_path / "out", "mix_rate=1e6,1e7"))
    assert said.code == 2
    assert "beta=" in said.line
    assert not (tmp_path / "out").exists()

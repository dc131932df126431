"""`palsgd train --go-on`: a run goes on without worker processes that die, takes them in again, and
says who took part."""

import os
import signal
import sys
from itertools import groupby, pairwise

import pytest
import yaml

from palsgd.lab.run_folder import read_run
from support.commands import children, lines, palsgd, started, summary, wait_for
from support.patience import patient

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")

# Workers say which gradient they are at, and wait there until the test lets them go on. One that
# comes again says when it asks to be let in.
HELD = """
import os, pathlib, sys, time
if "palsgd.lab.worker_main" in sys.orig_argv:
    from palsgd.lab.workloads.digits import Digits
    place, batch = pathlib.Path(os.environ["HELD"]), Digits.batch

    def held(self, *, index, **how):
        for gate in (40, 80):
            if index == gate:
                (place / f"{gate}-{os.environ['RANK']}").touch()
            while index >= gate and not (place / f"open-{gate}").exists():
                time.sleep(0.01)
        time.sleep(0.002)
        return batch(self, index=index, **how)

    from palsgd.transports.elastic.membership import Membership
    join = Membership.join

    def announced(self, *, fresh):
        (place / "announced").touch()
        return join(self, fresh=fresh)

    Digits.batch, Membership.join = held, announced
"""
RUN = ("train", "digits", "warmup_steps=0", "checkpoint_every=2", "--workers", 3, "--sync-every", 8,
       "--no-report", "--quiet", "--go-on")  # fmt: skip


@pytest.fixture
def place(tmp_path, monkeypatch):
    """Where workers and the test leave notes for each other."""
    (tmp_path / "sitecustomize.py").write_text(HELD)
    path = os.pathsep.join(filter(None, [str(tmp_path), os.environ.get("PYTHONPATH")]))
    monkeypatch.setenv("PYTHONPATH", path)
    monkeypatch.setenv("HELD", str(tmp_path))
    return tmp_path


def kill_at(place, process, gate, victim, workers, *, count):
    """Kill a worker when `count` of them are at the gate. The others are let go on."""
    wait_for(lambda: len(list(place.glob(f"{gate}-*"))) == count, process=process)
    os.kill(workers[victim], signal.SIGKILL)
    (place / f"open-{gate}").touch()


def members(run):
    """Who took part in the syncs, each list once."""
    found = [line["members"] for line in lines(run) if "members" in line]
    return [each for each, _ in groupby(found)]


def config(run):
    return yaml.safe_load((run / "config.yaml").read_text())


@pytest.mark.slow
def test_a_run_goes_on_without_its_first_worker_and_resumes_when_too_few_were_left(place):
    out, run = place / "out", place / "out" / "palsgd"
    words = (*RUN, "--steps", 160, "--min-workers", 2, "--out", out)
    with started(*words) as process:
        wait_for(lambda: len(children(process.pid)) == 3, process=process)
        workers = children(process.pid)
        kill_at(place, process, 40, 0, workers, count=3)
        kill_at(place, process, 80, 1, workers, count=2)
        _, err = process.communicate(timeout=patient(60))
    assert process.returncode == 1, err
    first, second, last = err.splitlines()
    assert first == "palsgd: worker 0 failed: SIGKILL ended it; the others go on without it"
    assert second == "palsgd: worker 1 failed: SIGKILL ended it; the others go on without it"
    assert "SyncError: 1 of at least 2 workers are left (2)" in last
    assert members(run) == [[0, 1, 2], [1, 2]]
    (change,) = config(run)["changes"]
    assert change["workers"] == [3, 2]
    with started(*words, "--resume") as process:
        _, err = process.communicate(timeout=patient(60))
    assert (process.returncode, err) == (0, "")
    assert members(run) == [[0, 1, 2], [1, 2], [0, 1, 2]]
    found = lines(run)
    assert [line["step"] for line in found] == sorted({line["step"] for line in found})
    assert all(a["bytes_sent"] <= b["bytes_sent"] for a, b in pairwise(found))
    assert [each["workers"] for each in summary(run)["changes"]] == [[3, 2], [2, 3]]
    assert summary(run)["steps"] == 160
    assert "3 workers until step 40, then 2" in read_run(run).notes[0]


@pytest.mark.slow
def test_a_worker_that_is_started_again_joins_at_a_sync(place):
    out, run = place / "out", place / "out" / "palsgd"
    with started(*RUN, "--steps", 400, "--restarts", 1, "--out", out) as process:
        wait_for(lambda: len(children(process.pid)) == 3, process=process)
        kill_at(place, process, 40, 1, children(process.pid), count=3)
        wait_for((place / "announced").exists, process=process)
        (place / "open-80").touch()
        _, err = process.communicate(timeout=patient(90))
    assert process.returncode == 0, err
    assert err.count("\n") == 1, err
    line = err.strip()
    assert line.startswith("palsgd: worker 1 failed: SIGKILL ended it; the others go on without ")
    assert line.endswith("it, and it starts again (1 of 1) and joins them at a sync")
    assert members(run) == [[0, 1, 2], [0, 2], [0, 1, 2]]
    assert {line["by"] for line in lines(run) if "by" in line} == {0}
    assert summary(run)["steps"] == 400
    assert not (run / "checkpoints").exists()


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--min-workers", 2), "--min-workers 2 is for runs that go on; add --go-on"),
        (("--deadline", 5), "--deadline 5 is for runs that go on; add --go-on"),
        (("--go-on", "--simulate"), "--go-on is for worker processes"),
        (("--go-on", "--deadline", 0), "deadline=0.0 must be a number of seconds > 0"),
        (("--go-on", "--min-workers", 3), "--min-workers 3 of 2 workers; lower it"),
        (("--go-on",), "warmup_steps=40 with an ElasticTransport: "),
        (("--go-on", "warmup_steps=0", "draws=paced"), "use draws='balanced'"),
        (("--go-on", "warmup_steps=0", "buffers=recompute"), "use buffers=average"),
        (("--go-on", "warmup_steps=0", "ranks_per_worker=2"), "use ranks_per_worker=1"),
    ],
)
def test_what_cannot_go_on_is_refused_before_anything_is_started(tmp_path, words, said):
    got = palsgd("train", "digits", "--workers", 2, *words, "--out", tmp_path / "out")
    assert got.code == 2
    assert said in got.line
    assert not (tmp_path / "out").exists()


def test_a_run_is_not_resumed_in_the_other_way(tmp_path):
    out = tmp_path / "out"
    (out / "palsgd").mkdir(parents=True)
    made = {"schema": 1, "workload": "digits", "method": "palsgd", "goes_on": True}
    (out / "palsgd" / "config.yaml").write_text(yaml.safe_dump(made))
    got = palsgd("train", "digits", "--workers", 2, "--resume", "--out", out)
    assert got.code == 2
    assert "was run with --go-on" in got.line

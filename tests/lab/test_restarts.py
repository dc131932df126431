"""Nothing hangs, and everything starts again: workers that are killed, stopped or asked to leave
end in the weights of a run that nobody disturbed."""

import os
import random
import shlex
import signal
import sys
import time
from pathlib import Path

import pytest

from support.commands import (
    alive,
    apart,
    assert_same_run,
    children,
    palsgd,
    saved_step,
    started,
    wait_for,
)
from support.patience import patient

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc"),
]

STEPS = 800
LOOPBACK = {"0100007F", "00000000000000000000000001000000", "0000000000000000FFFF00000100007F"}
WAYS = {"plain": (), "delay": ("compress=int8", "delay=4")}


def words(way, out):
    changes = ("checkpoint_every=6", "warmup_steps=20", "evaluate_every=400", *WAYS[way])
    return (
        "train", "digits", *changes, "--workers", 2, "--steps", STEPS, "--sync-every", 16,
        "--seed", 5, "--no-report", "--quiet", "--out", out,
    )  # fmt: skip


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    """The folder of such a run."""
    found = {}

    def run(way):
        if way not in found:
            out = tmp_path_factory.mktemp(way)
            assert apart(*words(way, out)).code == 0
            found[way] = out / "palsgd"
        return found[way]

    return run


def listening(processes):
    """The addresses on which these processes listen, as the kernel writes them."""
    inodes = set()
    for process in processes:
        for entry in Path(f"/proc/{process}/fd").iterdir():
            try:
                inodes.add(os.readlink(entry))
            except OSError:  # closed meanwhile
                continue
    found = set()
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A" and f"socket:[{fields[9]}]" in inodes:
                found.add(fields[1].partition(":")[0])
    return found


def disturbed(run, process, signals, rng):
    """Send each signal to a worker, at an instant after the next checkpoint. Those that end a
    worker have all of them started again."""
    before = []
    for number in signals:
        last = saved_step(run)
        wait_for(
            lambda: len(set(children(process.pid)) - set(before)) == 2 and saved_step(run) > last,  # noqa: B023
            process=process,
        )
        workers = children(process.pid)
        time.sleep(rng.uniform(0, 0.2))
        victim = rng.choice(workers)
        os.kill(victim, number)
        if number == signal.SIGSTOP:
            time.sleep(0.5)
            os.kill(victim, signal.SIGCONT)
        else:
            before = workers


@pytest.mark.parametrize(
    ("way", "signals", "seed"),
    [
        ("plain", (signal.SIGKILL, signal.SIGTERM), 1),
        ("delay", (signal.SIGSTOP, signal.SIGKILL), 2),
    ],
)
def test_a_run_whose_workers_are_ended_at_any_moment_ends_in_the_same_weights(
    undisturbed, tmp_path, way, signals, seed
):
    run = tmp_path / "palsgd"
    with started(*words(way, tmp_path), "--restarts", 2) as process:
        disturbed(run, process, signals, random.Random(seed))
        _, err = process.communicate(timeout=patient(120))
    assert process.returncode == 0, err
    again = [line for line in err.splitlines() if "start again from the last checkpoint" in line]
    assert len(again) == sum(number != signal.SIGSTOP for number in signals), err
    assert "Traceback" not in err
    assert_same_run(run, undisturbed(way))


def test_a_worker_that_stalls_for_good_is_replaced_after_the_timeout(undisturbed, tmp_path):
    run = tmp_path / "palsgd"
    flags = ("--restarts", 1, "--timeout", patient(6))
    with started(*words("plain", tmp_path), *flags) as process:
        wait_for(lambda: saved_step(run), process=process)
        os.kill(children(process.pid)[1], signal.SIGSTOP)
        _, err = process.communicate(timeout=patient(120))
    assert process.returncode == 0, err
    # The worker that waits may be in a sync, or in another exchange, such as that of a save.
    assert "SyncError: worker 0 could not exchange with worker 1" in err
    assert "all workers start again from the last checkpoint (1 of 1)" in err
    assert_same_run(run, undisturbed("plain"))


@pytest.fixture(scope="module")
def asked(tmp_path_factory):
    """A run whose launcher was sent SIGTERM."""
    out = tmp_path_factory.mktemp("asked")
    run = out / "palsgd"
    with started(*words("delay", out)) as process:
        wait_for(lambda: saved_step(run), process=process)
        workers, before = children(process.pid), saved_step(run)
        addresses = listening([process.pid, *workers])
        process.terminate()
        _, err = process.communicate(timeout=patient(40))
        left = alive(workers)
    return {
        "run": run, "addresses": addresses, "before": before, "after": saved_step(run),
        "code": process.returncode, "err": err, "left": left,
    }  # fmt: skip


def test_sigterm_to_the_launcher_saves_ends_with_143_and_says_how_to_go_on(asked, undisturbed):
    assert asked["code"] == 143
    assert not asked["left"]
    assert asked["after"] >= asked["before"]
    (line,) = asked["err"].splitlines()
    kept = f"kept: 1 run up to the last checkpoint (step {asked['after']})"
    assert line.startswith(f"palsgd: stopped; {kept}. Go on with: palsgd train digits")
    assert apart(*shlex.split(line.partition("Go on with: palsgd ")[2])).code == 0
    assert_same_run(asked["run"], undisturbed("delay"))


def test_nothing_of_a_local_run_listens_beyond_loopback(asked):
    assert asked["addresses"]
    assert asked["addresses"] <= LOOPBACK


def test_torchrun_starts_workers_again_that_go_on_without_being_told(undisturbed, tmp_path):
    run = tmp_path / "palsgd"
    launcher = (
        "--nproc-per-node", 2, "--master-port", "0", "--rdzv-backend", "c10d", "--max-restarts", 1,
        "--rdzv-endpoint", "localhost:0", "-m", "palsgd",
    )  # fmt: skip
    with started(
        *launcher, *words("plain", tmp_path), "--force", module="torch.distributed.run"
    ) as process:
        wait_for(lambda: saved_step(run), process=process)
        os.kill(children(process.pid)[-1], signal.SIGTERM)
        _, err = process.communicate(timeout=patient(120))
    assert process.returncode == 0, err
    assert err.count("palsgd: stopped; kept: 1 run") == 1
    assert_same_run(run, undisturbed("plain"))


# -- the end of a run ----------------------------------------------------------------------------

# Holds the second worker after everything is written.
LATE = """
import os, sys
if "palsgd.lab.worker_main" in sys.orig_argv and os.environ["RANK"] == "1":
    import time
    import torch.distributed as dist
    dist.destroy_process_group = lambda: time.sleep(600)
"""


def test_a_worker_that_is_killed_after_everything_was_done_is_a_warning(tmp_path, monkeypatch):
    (tmp_path / "sitecustomize.py").write_text(LATE)
    path = os.pathsep.join(filter(None, [str(tmp_path), os.environ.get("PYTHONPATH")]))
    monkeypatch.setenv("PYTHONPATH", path)
    out = tmp_path / "out"
    command = ("train", "digits", "--workers", 2, "--steps", 64, "--no-report", "--out", out)
    with started(*command, "--quiet", fresh=True) as process:
        wait_for((out / "palsgd" / "summary.json").exists, process=process)
        os.kill(children(process.pid)[1], signal.SIGKILL)
        _, err = process.communicate(timeout=patient(60))
    assert process.returncode == 0
    assert err == "palsgd: worker 1 failed: SIGKILL ended it, after everything was done\n"


# -- what is refused -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (("--restarts", 2, "--simulate"), "--restarts 2 is for worker processes"),
        (("--restarts", -1), "'--restarts'"),
        (("--timeout", 0), "timeout=0.0 must be a number of seconds > 0"),
        (("--timeout", "nan"), "timeout=nan"),
    ],
)
def test_restarts_and_timeouts_that_mean_nothing_are_refused(tmp_path, flags, words):
    said = palsgd("train", "digits", "--workers", 2, *flags, "--out", tmp_path / "out")
    assert said.code == 2
    assert words in said.line


def test_torchrun_restarts_by_itself(tmp_path, monkeypatch):
    for name, value in (("TORCHELASTIC_RUN_ID", "x"), ("RANK", "0"), ("WORLD_SIZE", "2")):
        monkeypatch.setenv(name, value)
    said = palsgd("train", "digits", "--workers", 2, "--restarts", 1, "--out", tmp_path / "out")
    assert said.code == 2
    assert "use torchrun --max-restarts" in said.line

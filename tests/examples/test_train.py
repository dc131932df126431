"""examples/train.py, the script that users copy: it goes on after kills, and leaves no process
behind."""

import os
import re
import signal
import sys

import pytest

import palsgd
from support.commands import alive, children, started, wait_for
from support.patience import patient
from support.places import ROOT

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc"),
]


def torchrun(folder, restarts=0):
    return started(
        "--nproc-per-node", 2, "--master-port", "0", "--rdzv-backend", "c10d", "--rdzv-endpoint",
        "localhost:0", "--max-restarts", restarts, ROOT / "examples" / "train.py", folder,
        module="torch.distributed.run",
    )  # fmt: skip


def saved(folder):
    return max((each.step for each in palsgd.checkpoint.find(folder) if each.whole), default=0)


def assert_trained(process):
    """To the end, and counting on: 600 steps are 18 rounds of 32 and a last one. A plain loader
    begins its epoch anew after a load, so the last digits depend on when that was."""
    out, err = process.communicate(timeout=patient(120))
    assert process.returncode == 0, err
    accuracy, syncs = re.search(r"accuracy (\S+), (\d+) syncs", out).groups()
    assert float(accuracy) > 0.85
    assert int(syncs) == 19


def test_a_worker_that_is_killed_has_all_of_them_go_on_under_torchrun(tmp_path):
    with torchrun(tmp_path, restarts=1) as process:
        wait_for(lambda: saved(tmp_path), process=process)
        os.kill(children(process.pid)[-1], signal.SIGKILL)
        assert_trained(process)


def test_sigterm_to_torchrun_saves_and_its_workers_end_with_it_if_it_is_killed(tmp_path):
    with torchrun(tmp_path) as process:
        wait_for(lambda: saved(tmp_path), process=process)
        process.terminate()
        process.communicate(timeout=patient(60))
    assert process.returncode != 0
    left_at = saved(tmp_path)
    assert 0 < left_at < 600
    with torchrun(tmp_path) as process:
        wait_for(lambda: saved(tmp_path) > left_at, process=process)
        workers = children(process.pid)
        os.kill(process.pid, signal.SIGKILL)
        wait_for(lambda: not alive(workers), process=None, timeout=20)
    with torchrun(tmp_path) as process:
        assert_trained(process)

"""One command at a time writes into a folder: whoever comes second is told who was first."""

import errno
import fcntl
import os
import signal
import socket
import subprocess
import sys
import threading

import pytest

from palsgd.lab.folder_lock import NAME, locked
from support.commands import environment, palsgd, started, wait_for
from support.patience import patient

HOLD = """
import sys, time
from pathlib import Path
from palsgd.lab.folder_lock import locked
with locked(Path(sys.argv[1])):
    print("held", flush=True)
    time.sleep(600)
"""


class Forgetful(set):
    def __contains__(self, place):
        return False

    def remove(self, place):
        self.discard(place)


SWEEP = ("sweep", "digits", "seed=1,2", "workers=2", "steps=8", "--simulate", "--no-report",
         "--quiet")  # fmt: skip


@pytest.fixture
def holder(tmp_path):
    """Another process that has locked the folder."""
    process = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(tmp_path / "out")], env=environment(),
        stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert process.stdout.readline() == "held\n"
    yield process
    process.kill()
    process.communicate(timeout=patient(30))


def test_the_second_process_is_refused_in_a_line_that_names_the_first(holder, tmp_path):
    with pytest.raises(ValueError, match="is in use by process") as error, locked(tmp_path / "out"):
        pass
    assert f"process {holder.pid} on {socket.gethostname()} since 20" in str(error.value)


def test_a_lock_ends_with_its_process_however_that_ends(holder, tmp_path):
    holder.send_signal(signal.SIGKILL)
    holder.wait(timeout=patient(30))
    assert (tmp_path / "out" / NAME).exists()  # what it wrote is there, the lock is not
    with locked(tmp_path / "out"):
        assert f"process {os.getpid()} " in (tmp_path / "out" / NAME).read_text()
    assert not (tmp_path / "out" / NAME).exists()


@pytest.mark.parametrize(
    "command",
    [
        (*SWEEP, "--resume"),
        (*SWEEP, "--force"),
        SWEEP,
        ("train", "digits", "steps=8", "--workers", 2),
        ("compare", "digits", "steps=8", "--workers", 2, "--simulate"),
        ("demo",),
        ("bench", "link", "digits"),
    ],
    ids=lambda words: " ".join(map(str, words[:1] + words[-1:])),
)
def test_no_command_writes_into_a_folder_that_another_one_has(holder, tmp_path, command):
    said = palsgd(*command, "--out", tmp_path / "out")
    assert said.code == 2
    assert f"{tmp_path / 'out'} is in use by process {holder.pid} on" in said.line
    assert [path.name for path in (tmp_path / "out").iterdir()] == [NAME]


def test_tuning_locks_the_folder_of_its_trials(tmp_path, monkeypatch):
    monkeypatch.setattr("palsgd.lab.folder_lock._held", Forgetful())  # as if of two processes
    with locked(tmp_path / "tuned-runs"):
        said = palsgd("tune", "digits", "--trials", 1, "--out", tmp_path / "tuned.yaml")
    assert said.code == 2
    assert f"tuned-runs is in use by process {os.getpid()} on" in said.line


@pytest.mark.slow
def test_a_simulation_that_runs_is_not_resumed_beside_itself(tmp_path):
    """As a user meets it: the second of two commands ends at once, the first is not disturbed."""
    out = tmp_path / "out"
    words = ("train", "digits", "steps=2000", "--workers", 2, "--simulate", "--no-report",
             "--quiet", "--out", out)  # fmt: skip
    with started(*words) as process:
        wait_for((out / "palsgd" / "metrics.jsonl").exists, process=process)
        said = palsgd(*words, "--resume")
        assert palsgd("report", out).code == 0  # reading disturbs nobody
        assert process.poll() is None
    assert said.code == 2
    assert f"is in use by process {process.pid} on" in said.line


def test_of_many_that_come_at_once_one_is_in_at_a_time(tmp_path, monkeypatch):
    """Also while lock files are removed and made again."""
    monkeypatch.setattr("palsgd.lab.folder_lock._held", Forgetful())  # as if of many processes
    inside, most, refused = [], [], []

    def come_and_go():
        for _ in range(200):
            try:
                with locked(tmp_path):
                    inside.append(1)
                    most.append(len(inside))
                    inside.pop()
            except ValueError:
                refused.append(1)

    threads = [threading.Thread(target=come_and_go) for _ in range(4)]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    assert len(most) + len(refused) == 800
    assert set(most) == {1}


def test_a_lock_on_a_file_that_its_owner_has_just_removed_counts_for_nothing(tmp_path, monkeypatch):
    flock, calls = fcntl.flock, []

    def late(handle, how):
        if not calls:
            (tmp_path / NAME).unlink()
        calls.append(handle)
        flock(handle, how)

    monkeypatch.setattr(fcntl, "flock", late)
    with locked(tmp_path):
        assert (tmp_path / NAME).exists()
    assert len(calls) == 2


def test_a_disk_without_locks_is_said_to_have_none_and_used(tmp_path, monkeypatch):
    def none(handle, how):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", none)
    said = "disk that has no locks .*No locks available.*start only one"
    with pytest.warns(UserWarning, match=said), locked(tmp_path):
        assert list(tmp_path.iterdir()) == []


def test_a_folder_in_which_nothing_was_put_is_gone_again(tmp_path):
    with locked(tmp_path / "runs" / "one"):
        pass
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "mine").mkdir()
    with locked(tmp_path / "mine"):
        pass
    assert (tmp_path / "mine").exists()

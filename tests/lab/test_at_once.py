"""Several simulated programs at once, each in a process of its own: same results, same errors, and
nothing is left running."""

import os
import signal
import sys
from types import SimpleNamespace

import pytest

from palsgd.lab import at_once, compare, sweep
from palsgd.lab.order import Failure
from palsgd.lab.run_folder import RunFolder
from palsgd.lab.run_set import check_importable
from palsgd.lab.simulated_program import OutOfTimeError
from support.commands import (
    alive,
    apart,
    children,
    palsgd,
    ran,
    records,
    started,
    wait_for,
)
from support.patience import patient
from support.simulated_runs import assert_same_runs, config, runs_in

SHORT = ("batch_size=4", "evaluate_every=4", "lr=0.002", "--no-report")
# It does something odd at its fifth batch, as long as there is a file that says so.
WORKLOAD = """
import os, pathlib, signal, time
from palsgd.lab.settings import Settings
from palsgd.lab.workloads.digits import Digits

RECIPES = {{"Odd": Settings(workload="digits")}}

def wait_for(path):
    while not path.exists():
        time.sleep(0.01)

class Odd(Digits):
    name = "Odd"

    def joint_batch(self, *, workers, size, index):
        place = pathlib.Path({place!r})
        if index == 4 and (place / "odd").exists():
            {what}
        return super().joint_batch(workers=workers, size=size, index=index)
"""


def odd(place, what):
    """The workload; it is `sober` later, with the same code."""
    path = place / "odd.py"
    (place / "odd").touch()
    path.write_text(WORKLOAD.format(place=str(place), what=what))
    return f"{path}:Odd"


def sober(place):
    (place / "odd").unlink()


def untold(folder):
    """The config without the command: they differ in --at-once and --out."""
    return {key: value for key, value in config(folder).items() if key != "command"}


def assert_same_files(mine, theirs):
    assert_same_runs(mine, theirs)
    for name in runs_in(mine):
        assert untold(mine / name) == untold(theirs / name)


# -- results ---------------------------------------------------------------------------------------


def grid(out, *more):
    """Four programs: those of equally many workers have a warm-up in common."""
    return ("sweep", "digits", "workers=2,3", "sync_every=4,8", "seed=1,2", "warmup_steps=6",
            "steps=20", *SHORT, "--simulate", "--out", out, *more)  # fmt: skip


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """The same grid by one process and by two at once, with what the second command said."""
    one, two = (tmp_path_factory.mktemp(name) / "out" for name in ("one", "two"))
    assert palsgd(*grid(one, "--quiet")).code == 0
    said = apart(*grid(two, "--at-once", 2))
    assert said.code == 0, said.err
    return one, two, said


def test_programs_at_once_leave_the_files_that_one_process_leaves(folders):
    one, two, said = folders
    assert len(runs_in(two)) == 8
    assert_same_files(two, one)
    assert set(records(two)) == set(records(one))
    assert all("--at-once 2" in config(two / name)["command"] for name in runs_in(two))
    told = [line for line in said.err.splitlines() if "simulated" in line]
    assert told == [f"{count} of 8 runs are simulated" for count in (2, 4, 6, 8)]


def test_processes_share_a_warm_up_and_leave_none(folders):
    _, out, _ = folders
    for workers in (2, 3):
        found = config(out / f"workers={workers},sync_every=8,seed=2")
        assert found["warmup_computed_by"] == f"workers={workers},sync_every=4,seed=2"
    assert not (out / ".warmups").exists()


def test_a_process_simulates_one_program_after_another_and_loads_data_once(tmp_path):
    (tmp_path / "noted.py").write_text(
        "import os, pathlib\n"
        "from palsgd.lab.settings import Settings\n"
        "from palsgd.lab.workloads.digits import Digits\n"
        "RECIPES = {'Noted': Settings(workload='digits')}\n"
        "class Noted(Digits):\n"
        "    name = 'Noted'\n"
        "    def __init__(self, *args, **options):\n"
        "        super().__init__(*args, **options)\n"
        "        assert os.read(0, 1) == b''\n"  # it waits for nobody's answer
        f"        with open({str(tmp_path / 'loads')!r}, 'a') as file:\n"
        "            print(os.getpid(), file=file)\n"
    )
    sweep(f"{tmp_path / 'noted.py'}:Noted", out=tmp_path / "out", sync_every=[2, 4, 8, 16],
          workers=2, steps=16, warmup_steps=0, batch_size=4, lr=0.002, simulate=True,
          options={"at_once": 2, "quiet": True})  # fmt: skip
    loads = [int(each) for each in (tmp_path / "loads").read_text().split()]
    theirs = [each for each in loads if each != os.getpid()]
    assert len(runs_in(tmp_path / "out")) == 4
    assert len(theirs) == len(set(theirs)) == 2


def test_runs_that_cannot_be_parted_need_no_other_process(tmp_path):
    words = ("sweep", "digits", "seed=1,2", "workers=2", "steps=8", *SHORT, "--simulate")
    said = palsgd(*words, "--at-once", 3, "--out", tmp_path / "out")
    assert said.code == 0
    assert "are simulated" not in said.err


# -- an end before the end -------------------------------------------------------------------------

UNTIL = """
import sys, time
from palsgd.lab import sweep
from palsgd.lab.simulated_program import OutOfTimeError

until = None if sys.argv[3] == "None" else time.monotonic() + float(sys.argv[3])
try:
    sweep(
        sys.argv[1], out=sys.argv[2], workers=[2, 3], steps=20, batch_size=4, evaluate_every=4,
        warmup_steps=0, sync_every=4,
        options={"at_once": 2, "until": until, "resume": True},
    )
except OutOfTimeError as error:
    print(error)
"""


def test_runs_at_once_that_were_out_of_time_are_saved_and_go_on(tmp_path):
    given = patient(8.0)
    workload = odd(tmp_path, f"time.sleep({given})")  # all are in the middle when it is over
    (tmp_path / "call.py").write_text(UNTIL)
    call = (tmp_path / "call.py", workload)
    said = ran(*call, tmp_path / "out", given)
    assert said.code == 0, said.err
    assert said.out == "the time is over; the same command with resume goes on\n"
    folders = [RunFolder(tmp_path / "out" / f"workers={workers}") for workers in (2, 3)]
    assert [len(folder.saved_steps) for folder in folders] == [1, 1]
    sober(tmp_path)
    for out in ("out", "whole"):
        assert ran(*call, tmp_path / out, None).out == ""
    assert_same_files(tmp_path / "out", tmp_path / "whole")


# The first process goes on until the second has failed, and a little longer.
FAULTS = {
    "{}['gone']": (1, "palsgd: odd.py, line 20: KeyError: 'gone'"),
    "os.kill(os.getpid(), signal.SIGKILL)": (
        1,
        "palsgd: a process of the simulation died (SIGKILL ended it); the same command with "
        "--resume goes on",
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_an_error_in_one_process_is_raised_and_what_others_finish_is_kept(fault, tmp_path):
    fails = f"""if workers == 3:
                (place / "failed").touch()
                {fault}
            wait_for(place / "failed")
            time.sleep({patient(0.5)})"""
    out = tmp_path / "out"
    words = ("sweep", odd(tmp_path, fails), "workers=2,3,4", "steps=8", "warmup_steps=0", *SHORT,
             "--simulate", "--quiet", "--at-once", 2, "--out", out)  # fmt: skip
    code, line = FAULTS[fault]
    said = apart(*words)
    assert said.code == code
    assert said.err.splitlines()[-1] == line
    assert "Traceback" not in said.err
    assert RunFolder(out / "workers=2").finished
    assert not RunFolder(out / "workers=3").finished
    assert not (out / "workers=4").exists()  # it had not begun
    if "--resume" in line:
        sober(tmp_path)
        said = apart(*words, "--resume")
        assert said.code == 0, said.err
        assert set(records(out)) == {"workers=2", "workers=3", "workers=4"}


class MineError(Exception):
    """As a user's code may raise it."""


@pytest.mark.parametrize(
    ("error", "kind", "said"),
    [
        (ValueError("no batch"), ValueError, "no batch"),
        (RuntimeError("no disk"), RuntimeError, "no disk"),
        (OSError("no file"), RuntimeError, "no file"),
        (OutOfTimeError(), OutOfTimeError, "the time is over"),
        (MineError("gone"), RuntimeError, "a process of the simulation failed: MineError: gone"),
        (KeyError("gone"), RuntimeError, "a process of the simulation failed: KeyError: 'gone'"),
    ],
)
def test_an_error_of_a_process_is_raised_as_its_kind_is_shown(error, kind, said):
    found = at_once._raised_here(Failure.of(error))
    assert type(found) is kind
    assert str(found).startswith(said)


@pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_a_command_that_is_stopped_leaves_no_process(number, tmp_path):
    out = tmp_path / "out"
    words = ("sweep", "digits", "workers=2,3", "steps=100000", "warmup_steps=0",
             "evaluate_every=50", "batch_size=4", "sync_every=4", "--no-report", "--simulate",
             "--quiet", "--at-once", 2, "--out", out)  # fmt: skip
    with started(*words) as process:
        saved = [RunFolder(out / f"workers={workers}") for workers in (2, 3)]
        wait_for(lambda: all(folder.saved_steps for folder in saved), process=process)
        simulating = children(process.pid)
        assert len(simulating) == 2
        os.killpg(process.pid, number)
        _, err = process.communicate(timeout=patient(30))
    wait_for(lambda: not alive(simulating), process=None)
    if number == signal.SIGKILL:
        return
    assert not (out / ".warmups").exists()
    assert process.returncode == 128 + number
    (line,) = err.splitlines()
    assert line.startswith("palsgd: stopped; kept: 2 runs up to the last checkpoint")
    assert "--at-once 2" in line
    assert line.endswith("--resume")


# -- bad values ------------------------------------------------------------------------------------


@pytest.mark.parametrize("own", [{"workload": "__main__:Mine"}, {"method": "__main__:Mine"}])
def test_what_other_processes_cannot_import_is_refused(own):
    run = SimpleNamespace(**{"workload": "digits", "method": "ddp", **own})
    with pytest.raises(ValueError, match="__main__:Mine is of the program that runs, and other"):
        check_importable([run])


@pytest.mark.parametrize("value", [0, -1, 1.5, True, "2"])
def test_a_number_of_programs_that_is_none_is_refused(value, tmp_path):
    with pytest.raises(ValueError, match=r"at_once=.* must be a whole number >= 1"):
        compare("digits", ["ddp"], out=tmp_path / "out", options={"at_once": value})
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("command", ["compare digits", "sweep digits seed=1,2", "tune digits"])
def test_commands_refuse_to_simulate_no_program(command):
    said = palsgd(*command.split(), "--at-once", 0)
    assert said.code == 2
    assert "--at-once" in said.line


@pytest.mark.parametrize(
    "command", ["compare digits", "sweep digits seed=1,2", "tune digits --processes --trials 1"]
)
def test_programs_at_once_are_refused_for_real_processes(command, tmp_path):
    out = tmp_path / "out" / ("tuned.yaml" if "tune" in command else "runs")
    said = palsgd(*command.split(), "--at-once", 3, "--quiet", "--out", out)
    assert said.code == 2
    assert said.line == (
        "palsgd: --at-once 3 is for simulated programs, real workers are processes already; add "
        "--simulate, or leave it out"
    )
    assert not list(tmp_path.rglob("config.yaml"))

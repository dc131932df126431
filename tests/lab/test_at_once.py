"""Several simulated programs at once, each in a process of its own: same results, same errors, and
nothing is left running."""

import os
import signal
import sys
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
import yaml

from palsgd.lab import at_once, compare, sweep
from palsgd.lab.at_once import Share
from palsgd.lab.order import Failure
from palsgd.lab.run_folder import RunFolder
from palsgd.lab.run_set import check_importable, simulate
from palsgd.lab.settings import Settings
from palsgd.lab.simulated_program import Group, OutOfTimeError
from palsgd.lab.warmups import given_up, warmup_name
from support.commands import (
    alive,
    apart,
    children,
    lines,
    palsgd,
    ran,
    records,
    started,
    summary,
    wait_for,
)
from support.patience import patient

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


def untimed(record):
    return {key: value for key, value in record.items() if not key.endswith("_s")}


def config(folder):
    found = yaml.safe_load((folder / "config.yaml").read_text())
    found.pop("command")  # they differ in --at-once and --out
    return found


def names_in(folder):
    return sorted(path.parent.name for path in folder.glob("*/config.yaml"))


def assert_same_files(mine, theirs):
    assert names_in(mine) == names_in(theirs)
    for name in names_in(mine):
        own, other = mine / name, theirs / name
        assert config(own) == config(other)
        assert list(map(untimed, lines(own))) == list(map(untimed, lines(other)))
        assert untimed(summary(own)) == untimed(summary(other))
        best, wanted = RunFolder(own).best(), RunFolder(other).best()
        for key, x in wanted["model"].items():
            assert torch.equal(best["model"][key], x)


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
    assert len(names_in(two)) == 8
    assert_same_files(two, one)
    assert set(records(two)) == set(records(one))
    commands = [yaml.safe_load((two / name / "config.yaml").read_text())["command"]
                for name in names_in(two)]  # fmt: skip
    assert all("--at-once 2" in command for command in commands)
    told = [line for line in said.err.splitlines() if "simulated" in line]
    assert told == [f"{count} of 8 runs are simulated" for count in (2, 4, 6, 8)]


def test_processes_share_a_warm_up_and_leave_none(folders):
    _, out, _ = folders
    for workers in (2, 3):
        found = config(out / f"workers={workers},sync_every=8,seed=2")
        assert found["warmup_computed_by"] == f"workers={workers},sync_every=4,seed=2"
    assert not (out / ".warmups").exists()


NOISY = """
from torch import nn
from palsgd.lab.settings import Settings
from palsgd.lab.workloads.digits import Digits

RECIPES = {"Noisy": Settings(workload="digits")}

class Noisy(Digits):
    name = "Noisy"

    def model(self):
        return nn.Sequential(nn.Linear(64, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.2),
                             nn.Linear(16, 10))
"""


HOT = dict(workers=2, steps=16, warmup_steps=8, batch_size=4, evaluate_every=2, lr=0.3,
           inner="adamw", schedule="cosine")  # fmt: skip


def swept(workload, out, count, vectorize, **more):
    """By so many processes at once."""
    options = {"at_once": count, "vectorize": vectorize, "quiet": True, "resume": True}
    settings = {**HOT, "sync_every": [2, 4], **more}
    sweep(workload, out=out, simulate=True, options=options, **settings)
    return out


@pytest.mark.parametrize("vectorize", [True, False])
def test_runs_go_on_from_the_warm_up_of_another_process_bit_for_bit(vectorize, tmp_path):
    """With statistics of each worker's own, random numbers, an optimizer that counts, and the best
    model in the warm-up."""
    (tmp_path / "noisy.py").write_text(NOISY)
    one, two = (
        swept(f"{tmp_path / 'noisy.py'}:Noisy", tmp_path / f"by-{count}", count, vectorize)
        for count in (1, 2)
    )
    assert_same_files(two, one)
    assert config(two / "sync_every=4")["warmup_computed_by"] == "sync_every=2"
    assert 0 < RunFolder(two / "sync_every=4").best()["step"] <= HOT["warmup_steps"]


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
    swept(f"{tmp_path / 'noted.py'}:Noted", tmp_path / "out", 2, True, sync_every=[2, 4, 8, 16],
          warmup_steps=0, lr=0.002)  # fmt: skip
    loads = [int(each) for each in (tmp_path / "loads").read_text().split()]
    theirs = [each for each in loads if each != os.getpid()]
    assert len(names_in(tmp_path / "out")) == 4
    assert len(theirs) == len(set(theirs)) == 2


def test_seeds_of_workers_in_turn_are_programs_of_their_own():
    """Else others would wait for the whole training of the first seed."""
    share = replace(share_of([[1, 2]]), groups=[Group(["0,1", "0,2"], False)])
    assert [part.waiting for part in share.parts()] == [["0,1"], ["0,2"]]
    assert len(share_of([[1, 2]]).parts()) == 1


def test_a_run_that_diverges_in_its_warm_up_leaves_word_that_it_leaves_none(tmp_path):
    """Else others would wait for the end of all that is stacked with it."""
    runs = {str(lr): Settings(workload="digits", workers=2, steps=16, warmup_steps=8, batch_size=4,
                              evaluate_every=4, sync_every=4, inner="sgd", lr=lr)
            for lr in (0.01, 1e30)}  # fmt: skip
    (tmp_path / ".warmups").mkdir()
    files = [tmp_path / ".warmups" / f"{warmup_name(run)}.pt" for run in runs.values()]
    share = Share(runs=runs, waiting=list(runs), groups=[Group(list(runs), True)], out=tmp_path,
                  data=None, download=False, device="cpu", quiet=True, until=None,
                  warmups=files)  # fmt: skip
    simulate(share)
    assert [path.exists() for path in files] == [True, False]
    assert [given_up(path).exists() for path in files] == [False, True]


def test_runs_that_are_resumed_in_their_warm_up_still_share_it(tmp_path):
    """Two that had begun when the command was killed, and have no checkpoint."""
    out = swept("digits", tmp_path / "out", 1, False, lr=0.002)
    for name in names_in(out):
        for file in ("summary.json", "best.safetensors"):
            (out / name / file).unlink()
    swept("digits", out, 2, False, lr=0.002)
    found = [config(out / name).get("warmup_computed_by") for name in names_in(out)]
    assert found == [None, "sync_every=2"]


def share_of(warmups, workload="digits"):
    """Of a program for each entry, whose runs have the warm-ups of these seeds."""
    groups = [[f"{number},{seed}" for seed in seeds] for number, seeds in enumerate(warmups)]
    runs = {
        name: Settings(workload=workload, steps=20, warmup_steps=6, seed=int(name.split(",")[1]))
        for names in groups
        for name in names
    }
    return Share(
        runs=runs, waiting=list(runs), groups=[Group(names, "auto") for names in groups], out="",
        data=None, download=False, device="cpu", quiet=True, until=None,
    )  # fmt: skip


class FakeProcess(at_once._Process):
    def __init__(self):
        self.share, self._past = None, set()


@pytest.fixture
def pool(tmp_path):
    """Of these warm-ups, two at a time; its processes do nothing."""

    def made(*warmups):
        shares = at_once._with_files(share_of(warmups).parts(), tmp_path)
        found = at_once._Pool(shares, 2, tmp_path, quiet=True)
        found._processes = [FakeProcess(), FakeProcess()]
        return found

    return made


def begun(pool):
    """The number of the program that may begin now, and begins; None: none may."""
    share = pool._next()
    if share is None:
        return None
    pool._left.remove(share)
    next(each for each in pool._processes if each.share is None).share = share
    return int(share.waiting[0][0])


def test_a_program_waits_while_another_computes_its_warm_up_and_those_behind_it_go_first(pool):
    found = pool([1], [1, 2], [3], [2])
    assert [begun(found) for _ in range(3)] == [0, 2, None]  # two at a time
    found._busy[1].share = None
    assert begun(found) is None  # 1 waits for 0, and 3 for 1, as in one process
    (path,) = found._busy[0].share.warmups
    path.touch()
    assert [begun(found), begun(found)] == [1, None]


def test_a_warm_up_that_a_process_has_not_left_is_computed_by_the_next(pool):
    found = pool([1], [1], [1])
    assert [begun(found), begun(found)] == [0, None]
    (path,) = found._busy[0].share.warmups
    given_up(path).touch()
    assert begun(found) == 1
    found._busy[1].share = None  # it has ended without a word
    assert begun(found) == 2


def test_a_word_that_no_warm_up_is_left_is_of_the_process_that_computes_it(pool):
    found = pool([1], [1], [1])
    begun(found)
    (path,) = found._busy[0].share.warmups
    for _ in range(2):
        given_up(path).touch()
        assert not found._busy[-1].may_leave()
        begun(found)
    first, second = found._busy
    given_up(path).touch()
    assert (first.may_leave(), second.may_leave()) == (set(), set())


def test_a_warm_up_is_deleted_when_no_share_needs_it(pool):
    found = pool([1], [1], [2])
    begun(found)
    (path,) = found._busy[0].share.warmups
    path.touch()
    first = found._busy[0].share
    begun(found)
    found._busy[0].share = None
    found._drop_warmups(first)
    assert path.exists()
    second = found._busy[0].share
    found._busy[0].share = None
    found._drop_warmups(second)
    assert not path.exists()


@pytest.mark.parametrize(("step", "count"), [(4, 1), (8, 0)])
def test_a_run_that_is_resumed_after_its_warm_up_is_not_waited_for(step, count, tmp_path):
    runs = {"a": Settings(workload="digits", steps=20, warmup_steps=6)}
    (tmp_path / "a" / "checkpoints" / f"step-{step}").mkdir(parents=True)
    share = replace(share_of([[1]]), runs=runs, waiting=["a"], out=tmp_path,
                    groups=[Group(["a"], True, resumed=True)])  # fmt: skip
    assert len(share.warmup_names()) == count


def test_warm_ups_of_one_process_alone_have_no_file(pool):
    assert [len(share.warmups) for share in pool([1, 2], [2, 3], [4])._left] == [1, 1, 0]


def test_what_a_killed_command_has_left_of_warm_ups_is_gone(tmp_path):
    (tmp_path / "out" / ".warmups").mkdir(parents=True)
    swept("digits", tmp_path / "out", 1, True, lr=0.002)
    assert not (tmp_path / "out" / ".warmups").exists()


def test_a_share_is_the_same_when_it_is_read_again(tmp_path):
    share = replace(share_of([[1], [1, 2]]), warmups=[tmp_path / "a.pt"])
    share.write(tmp_path / "share.json", ["palsgd", "sweep"])
    found, command = Share.read(tmp_path / "share.json")
    assert (found.runs, found.groups, command) == (share.runs, share.groups, ["palsgd", "sweep"])
    assert found.warmups == share.warmups


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
    "{}['gone']": (1, "palsgd: a process of the simulation failed: KeyError: 'gone'"),
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
    assert ("Traceback" in said.err) == ("KeyError" in line)
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

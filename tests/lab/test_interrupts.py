"""Ctrl-C at any moment, also in the first seconds: one line, exit code 130, no traceback. So is
SIGTERM, with exit code 143."""

import os
import signal
import subprocess
import sys

import pytest

from palsgd import interrupts
from support.commands import environment, interruptible, started, wait_for
from support.patience import patient

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="signals of its own")

# Holds the import of one module, as the import of a large library takes its time. Like some of
# them it makes an ImportError of whatever happens meanwhile.
HOLD = """
import os, sys, time

class Hold:
    def find_spec(name, path=None, target=None):
        child = "palsgd.lab.worker_main" in sys.orig_argv
        if name != os.environ["HOLD_AT"] or child != ("HOLD_CHILD" in os.environ):
            return None
        open(f"{os.environ['HOLD_FILE']}-{os.getpid()}", "w").close()
        try:
            while True:
                time.sleep(0.01)
        except BaseException:
            raise ImportError("cannot load module more than once per process") from None

sys.meta_path.insert(0, Hold)
"""
TRAIN = ("train", "digits", "--workers", 2, "--steps", 12, "--no-report", "--quiet")


@pytest.fixture
def held(tmp_path, monkeypatch):
    """The files that say who is held; at which import is set by `at`."""
    (tmp_path / "sitecustomize.py").write_text(HOLD)
    path = os.pathsep.join(filter(None, [str(tmp_path), os.environ.get("PYTHONPATH")]))
    monkeypatch.setenv("PYTHONPATH", path)
    monkeypatch.setenv("HOLD_FILE", str(tmp_path / "held"))
    return lambda: list(tmp_path.glob("held-*"))


def stopped(process, number=signal.SIGINT) -> list[str]:
    """What is said after Ctrl-C, which a terminal sends to all processes, or another signal."""
    os.killpg(process.pid, number)
    out, err = process.communicate(timeout=patient(60))
    assert process.returncode == 128 + number, err
    assert out == ""
    return err.splitlines()


@pytest.mark.parametrize(
    "module", ["palsgd.lab.cli", "typer", "torch", "palsgd.lab.trainer", "sklearn"]
)
def test_an_import_that_is_interrupted_ends_in_one_line(module, held, tmp_path, monkeypatch):
    monkeypatch.setenv("HOLD_AT", module)
    with started(*TRAIN, "--simulate", "--out", tmp_path / "out", fresh=True) as process:
        wait_for(held, process=process)
        assert stopped(process) == ["palsgd: stopped"]


@pytest.mark.slow
def test_workers_that_still_import_torch_say_nothing(held, tmp_path, monkeypatch):
    monkeypatch.setenv("HOLD_AT", "torch")
    monkeypatch.setenv("HOLD_CHILD", "yes")
    with started(*TRAIN, "--out", tmp_path / "out", fresh=True) as process:
        wait_for(lambda: len(held()) == 2, process=process)
        said = stopped(process)
    assert len(said) == 1, said
    assert said[0].startswith("palsgd: stopped; ")


@pytest.fixture
def watched(tmp_path, monkeypatch):
    """The command line as a module of its own, which runs some lines before each batch. Before the
    tenth everything is imported. Returns the file that they make."""

    def write(*lines):
        (tmp_path / "watched.py").write_text(
            "import pathlib\n"
            "from palsgd.__main__ import main\n"
            "from palsgd.lab.workloads.digits import Digits\n"
            "batch = Digits.joint_batch\n"
            "def noted(*args, **options):\n"
            + "".join(f"    {line}\n" for line in lines)
            + "    return batch(*args, **options)\n"
            "Digits.joint_batch = noted\n"
            "main()\n"
        )
        return tmp_path / "begun"

    path = os.pathsep.join(filter(None, [str(tmp_path), os.environ.get("PYTHONPATH")]))
    monkeypatch.setenv("PYTHONPATH", path)
    return write


def said_in_training(command, begun, number) -> str:
    """What is said after a signal that comes once `begun` is there."""
    words = (command, "digits", "steps=100000", "--simulate", "--quiet")
    with started(*words, "--out", begun.parent / "out", module="watched") as process:
        wait_for(begun.exists, process=process)
        (line,) = stopped(process, number)
    return line


@pytest.mark.parametrize(
    ("command", "number"),
    [("train", signal.SIGINT), ("train", signal.SIGTERM), ("compare", signal.SIGTERM)],
)
def test_training_that_is_interrupted_says_how_to_go_on(command, number, tmp_path, watched):
    begun = watched(f"if options['index'] == 9: pathlib.Path({str(tmp_path / 'begun')!r}).touch()")
    line = said_in_training(command, begun, number)
    assert line.startswith("palsgd: stopped; ")
    assert "--resume" in line


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_import_in_the_middle_of_training_ends_before_the_training_does(
    number, tmp_path, watched
):
    """Else nobody would say how to go on. There is one at a run's first checkpoint."""
    (tmp_path / "late.py").write_text(
        "import pathlib, time\n"
        f"pathlib.Path({str(tmp_path / 'begun')!r}).touch()\n"
        "try:\n"
        "    time.sleep(0.5)\n"
        "except BaseException:\n"
        "    raise ImportError('half there') from None\n"
    )
    begun = watched("if options['index'] == 9: import late")
    line = said_in_training("train", begun, number)
    assert line.startswith("palsgd: stopped; ")
    assert "--resume" in line


def test_a_signal_waits_for_an_import_for_a_while_and_a_second_one_does_not(monkeypatch):
    monkeypatch.setattr(interrupts, "_deadline", None)
    monkeypatch.setattr(interrupts, "_sent_again", False)
    assert interrupts._may_wait()
    interrupts._sent_again = True
    assert interrupts._may_wait()
    assert not interrupts._may_wait()  # the user's second
    interrupts._sent_again, interrupts._deadline = True, 0.0
    assert not interrupts._may_wait()


@pytest.mark.parametrize(("trap", "code"), [("trap '' INT; ", 0), ("", 130)])
def test_a_command_and_its_workers_ignore_ctrl_c_if_they_were_started_so(trap, code):
    """As a shell starts the background jobs of a script."""
    for role, ended in (("install", code), ("leave_to_parent", code and -signal.SIGINT)):
        program = (
            f"import os, signal; from palsgd import interrupts; interrupts.{role}(); "
            "os.kill(os.getpid(), signal.SIGINT)"
        )
        shell = ["bash", "-c", trap + 'exec "$@"', "-", sys.executable, "-c", program]
        with interruptible():
            done = subprocess.run(shell, env=environment(), timeout=patient(60))
        assert done.returncode == ended, role

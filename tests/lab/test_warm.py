"""Processes that begin with torch imported behave as a fresh interpreter's do."""

import signal
import sys

import pytest

from support.commands import ran, running, wait_for

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="elsewhere all are fresh")

ways = pytest.mark.parametrize("fresh", [True, False])

# What this process is, and what becomes of its children.
TOLD = """
import atexit, os, signal, subprocess, sys, tempfile
import palsgd, neighbour

def told():
    print(__name__, neighbour.NAME, sys.argv[1:], os.getcwd(), os.environ.get("MINE"), flush=True)
    print(signal.getsignal(signal.SIGUSR1) is signal.SIG_DFL)
    print(signal.getsignal(signal.SIGINT) is signal.default_int_handler, palsgd.__file__)
    print(os.getsid(0) == os.getpid(), sys.stdin.read(), len(os.listdir("/proc/self/fd")))

told()
if len(sys.argv) == 2:
    print("not yet written", end="")
    folder = tempfile.TemporaryDirectory()
    atexit.register(print, "the end of", os.getcwd())
    signal.signal(signal.SIGUSR1, lambda number, frame: None)
    neighbour.NAME = "changed"
    command, env = [sys.executable, sys.argv[0], "a", "b"], os.environ | {"MINE": "c"}
    how = dict(stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    child = subprocess.Popen(command, env=env, cwd="/", start_new_session=True, **how)
    print(child.communicate("from the parent"), child.returncode, os.getpid() == child.pid)
    print(os.path.exists(folder.name))
    print(child.pid in {int(name) for name in os.listdir("/proc") if name.isdigit()})
sys.exit("enough" if len(sys.argv) == 2 else 7)
"""


def test_a_program_and_its_child_are_told_the_same_as_fresh_ones(tmp_path, monkeypatch):
    (tmp_path / "told.py").write_text(TOLD)
    (tmp_path / "neighbour.py").write_text("NAME = 'new'\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MINE", "own")
    warm, fresh = (ran(tmp_path / "told.py", "a", fresh=each) for each in (False, True))
    assert warm == fresh
    assert (warm.code, warm.err) == (1, "enough\n")
    assert "from the parent" in warm.out
    assert "__main__ new ['a', 'b'] / c" in warm.out


# A file that is handed on through two programs, in one process.
HANDED = """
import os, subprocess, sys
if sys.argv[1] == "last":
    os.write(int(sys.argv[2]), b"handed on")
elif sys.argv[1] == "first":
    os.execvp(sys.executable, [sys.executable, __file__, "last", sys.argv[2]])
else:
    ours, theirs = os.pipe()
    command = [sys.executable, "-S", "-E", __file__, "first", str(theirs)]
    subprocess.run(command, pass_fds=[theirs], check=True)
    os.close(theirs)
    print(os.read(ours, 100).decode())
"""


@ways
def test_files_are_handed_on_to_a_child_and_to_the_program_that_it_becomes(fresh, tmp_path):
    (tmp_path / "handed.py").write_text(HANDED)
    said = ran(tmp_path / "handed.py", "start", fresh=fresh)
    assert (said.code, said.out, said.err) == (0, "handed on\n", "")


@ways
def test_an_error_is_a_traceback_and_exit_code_1(fresh):
    said = ran("-c", "import os; os.nothing", fresh=fresh)
    assert said.code == 1
    assert said.err.splitlines()[-1].startswith("AttributeError: module 'os' has no attribute")


@ways
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL, signal.SIGINT])
def test_a_signal_ends_a_program(fresh, number, tmp_path):
    code = f"open({str(tmp_path / 'begun')!r}, 'w').close(); import time; time.sleep(600)"
    with running("-c", code, fresh=fresh) as process:
        wait_for((tmp_path / "begun").exists, process=process)
        process.send_signal(number)
        assert process.wait(timeout=60) == -number

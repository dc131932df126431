"""Some hundred hostile inputs: none ends in a traceback, hangs, or takes the machine's memory."""

import subprocess
import sys
from pathlib import Path

import pytest

from support.commands import environment
from support.patience import patient

FUZZ = Path(__file__).with_name("fuzz.py")


def fuzz(*words):
    command = [sys.executable, str(FUZZ), *map(str, words)]
    return subprocess.run(
        command, capture_output=True, text=True, timeout=patient(280), env=environment(),
        check=False,
    )  # fmt: skip


@pytest.mark.slow
def test_six_hundred_hostile_inputs_are_refused_or_work():
    done = fuzz("--count", 600, "--seed", 7)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert " 0 broken" in done.stdout
    assert "refused" in done.stdout
    assert "worked" in done.stdout


BROKEN = """
import sys
sys.path.insert(0, {folder!r})
import fuzz

def raises(error):
    def call():
        raise error
    return fuzz.outcome_of(call)

def endless():
    while True:
        pass

foreign = [AttributeError("x"), OverflowError("x"), KeyError("x"), RecursionError("x"),
           ZeroDivisionError("x"), UnicodeDecodeError("ascii", b"", 0, 1, "x"), RuntimeError("x"),
           MemoryError(), ValueError("two\\nlines"), ValueError("not by the library"), TypeError()]
print(all(raises(error).broken for error in foreign))
print(fuzz.outcome_of(endless, 0.2).word)
print(fuzz.outcome_of(lambda: fuzz.palsgd.round_plan(**(fuzz.fuzz_calls.PLAN | dict(seed=-1)))))
"""


@pytest.mark.slow
def test_the_harness_tells_broken_outcomes_from_right_ones():
    code = BROKEN.format(folder=str(FUZZ.parent))
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=patient(100),
        env=environment(), check=True,
    )  # fmt: skip
    broken, endless, refused = done.stdout.splitlines()
    assert broken == "True"
    assert endless == "took too long"
    assert refused == "Outcome(word='refused', broken=False, about='')"

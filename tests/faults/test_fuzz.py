"""Some hundred hostile inputs: none ends in a traceback, hangs, or takes the machine's memory."""

from pathlib import Path

import pytest

from support.commands import ran

FUZZ = Path(__file__).with_name("fuzz.py")


def fuzz(*words):
    return ran(FUZZ, *words, timeout=280)


@pytest.mark.slow
def test_six_hundred_hostile_inputs_are_refused_or_work():
    said = fuzz("--count", 600, "--seed", 7)
    assert said.code == 0, said.out[-3000:] + said.err[-3000:]
    assert " 0 broken" in said.out
    assert "refused" in said.out
    assert "worked" in said.out


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
    said = ran("-c", code)
    assert said.code == 0, said.err
    broken, endless, refused = said.out.splitlines()
    assert broken == "True"
    assert endless == "took too long"
    assert refused == "Outcome(word='refused', broken=False, about='')"

"""Mutants are what the mutation run says they are."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
from mutation import chosen, mutants_of
from run import SOURCE, core_files, named_mutants

PROGRAM = '''
LIMIT = 3

def middle(low, high, *, half=2):
    """Text 1."""
    assert low < 4
    if not low:
        print(5)
        return [a for a, b in zip([low], [high], strict=True)]
    return (low + high) // half if low is None or high == 6 else -1
'''


def test_a_mutant_changes_one_line_of_a_function_and_still_compiles():
    lines = PROGRAM.splitlines()
    for mutant in mutants_of(PROGRAM):
        changed = mutant.applied(PROGRAM).splitlines()
        differing = [
            n for n, pair in enumerate(zip(lines, changed, strict=True)) if len(set(pair)) > 1
        ]
        assert differing == [mutant.line - 1]
        compile(mutant.applied(PROGRAM), "mutant", "exec")


@pytest.mark.parametrize(
    "line",
    [
        "if low:",
        "pass",
        "print(6)",
        "(low - high)",
        ") * half",
        "is not None",
        "and high",
        "!= 6",
        "== 7",
    ],
)
def test_every_kind_of_bug_is_made(line):
    assert any(line in mutant.what for mutant in mutants_of(PROGRAM))


def test_signatures_constants_assertions_and_strict_are_left_alone():
    kept = ("LIMIT", "half=", "assert", "strict=False", "Text", "-2")
    assert not [m for m in mutants_of(PROGRAM) if any(text in m.what for text in kept[2:])]
    assert not [m for m in mutants_of(PROGRAM) if m.what.startswith(("LIMIT", "def"))]


def test_the_same_seed_draws_the_same_mutants_on_as_many_lines():
    first, again = (chosen(core_files(), SOURCE, count=60, seed=1) for _ in range(2))
    assert first == again
    assert len({(m.file, m.line) for m in first}) == 60
    assert first != chosen(core_files(), SOURCE, count=60, seed=2)


def test_every_named_mutant_changes_a_line_that_is_there():
    for mutant in named_mutants():
        source = (SOURCE / mutant.file).read_text()
        assert mutant.applied(source) != source

"""examples/simulate.ipynb runs from top to bottom, and its outputs are those of its code."""

import json
import os
import re

import pytest

from support.notebooks import executed, mark_of, outputs_of, read, write
from support.places import ROOT

PATH = ROOT / "examples" / "simulate.ipynb"


def words(outputs):
    """What a cell says, without numbers, which differ between machines; of figures, that they
    are there."""
    said = "".join(line for each in outputs for line in each.get("text", []))
    return re.sub(r"[\d.\s]+", " ", said), [each["output_type"] for each in outputs]


@pytest.mark.slow
def test_the_notebook_runs_and_says_what_is_printed_in_it(monkeypatch):
    """PALSGD_REWRITE_GOLDEN=1 writes its outputs anew, from a run of full length."""
    pytest.importorskip("matplotlib")
    if os.environ.get("PALSGD_REWRITE_GOLDEN"):
        write(PATH, executed(PATH))
    monkeypatch.setenv("STEPS", "64")
    now = executed(PATH)
    for new, old in zip(outputs_of(now), outputs_of(read(PATH)), strict=True):
        assert words(new) == words(old)


def test_the_outputs_of_the_notebook_were_made_by_its_code():
    notebook = read(PATH)
    assert notebook["metadata"]["executed"] == mark_of(notebook)


def test_the_notebook_is_small_and_shows_its_figures():
    assert PATH.stat().st_size < 300_000
    figures = [each for cell in outputs_of(read(PATH)) for each in cell if "data" in each]
    assert len(figures) >= 3
    assert json.loads(PATH.read_text())["nbformat"] == 4

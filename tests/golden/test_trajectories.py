"""Every exchange of small runs is the recorded one, bit for bit.

PALSGD_REWRITE_GOLDEN=1 writes the files anew: only for a change of behaviour that is meant.
"""

import json

import pytest
import trajectory
from trajectory import FOLDER, REWRITE, WORKERS, setups

SETUPS = setups()


@pytest.mark.parametrize("engine", ["exact", "processes"])
@pytest.mark.parametrize("name", SETUPS)
def test_every_exchange_of_a_run_is_the_recorded_one(world, name, engine):
    setup, path = SETUPS[name], FOLDER / f"{name}.json"
    if engine == "exact":
        run = trajectory.run_exact(setup)
    else:
        run = trajectory.together(world.run(trajectory.run_process, workers=WORKERS, setup=setup))
    if REWRITE and engine == "exact":
        trajectory.write(path, {"setup": setup}, run)
    golden = json.loads(path.read_text())
    assert golden["setup"] == setup
    assert trajectory.differences(run, golden) == []


def test_the_recorded_runs_are_the_rows_and_no_others():
    for path in FOLDER.glob("*.json"):
        if REWRITE and path.stem not in SETUPS:
            path.unlink()
    assert {path.stem for path in FOLDER.glob("*.json")} == SETUPS.keys()

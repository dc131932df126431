"""States of release 0.1.0, saved mid-round, load into fresh optimizers and go on bit for bit.

PALSGD_REWRITE_GOLDEN=1 writes anew what they go on to. It makes a state only where there is none.
"""

from functools import partial

import pytest
import states
import trajectory
from states import FOLDER, MOMENTS
from trajectory import REWRITE, WORKERS


@pytest.fixture(autouse=True, scope="module")
def made_states(world):
    """States that are still missing, when asked for."""
    for moment in MOMENTS if REWRITE else ():
        path = FOLDER / f"{moment}.pt"
        if not path.exists():
            setup, at = states.setup_of(moment)
            saved = world.run(states.saving_process, workers=WORKERS, setup=setup, at=at)
            states.write_state(path, saved)
            nothing = {"exchanges": [], "final": []}
            head = states.head(setup, path, [each["where"] for each in saved])
            trajectory.write(path.with_suffix(".json"), head, nothing)


@pytest.mark.parametrize("engine", ["exact", "processes"])
@pytest.mark.parametrize("moment", MOMENTS)
def test_a_saved_state_goes_on_to_the_recorded_exchanges(world, moment, engine):
    golden, path = states.golden(moment), FOLDER / f"{moment}.pt"
    setup = golden["setup"]
    if engine == "exact":
        run = trajectory.run_exact(setup, partial(states.load_state, str(path)))
    else:
        job, given = states.resuming_process, dict(setup=setup, path=str(path))
        run = trajectory.together(world.run(job, workers=WORKERS, **given))
    if REWRITE and engine == "exact":
        kept = {name: golden[name] for name in ("setup", "state", "where")}
        trajectory.write(path.with_suffix(".json"), kept, run)
        golden = states.golden(moment)
    assert golden["exchanges"]
    assert trajectory.differences(run, golden) == []


@pytest.mark.parametrize("moment", MOMENTS)
def test_a_state_file_is_the_one_that_was_first_written(moment):
    assert states.file_hash(FOLDER / f"{moment}.pt") == states.golden(moment)["state"]


@pytest.mark.parametrize("moment", MOMENTS)
def test_the_same_syncs_lie_behind_all_workers_of_a_state(moment):
    one, other = states.golden(moment)["where"]
    for name in ("syncs", "under_way", "unsent"):
        assert one[name] == other[name]
    assert one["under_way"] == ("under-way" in moment)
    assert (one["unsent"] > 0) == ("residues" in moment)


def test_the_state_files_are_those_of_the_moments():
    assert {path.stem for path in FOLDER.iterdir()} == MOMENTS.keys()

"""A worker that is killed or stalls while all save or load: the others end in one line of ours."""

import sys
from pathlib import Path

import pytest
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import palsgd
from palsgd import checkpoint
from support.checkpoints import advance, build
from support.losses import lost_before
from support.patience import patient
from support.problems import linear
from support.stepping import sgd
from support.world import World

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(sys.platform == "win32", reason="signals of its own"),
]

TIMEOUT = 4  # of an exchange; longer than those who wait take to note that they do


@pytest.fixture(scope="module")
def brittle_world():
    world = World(fresh=False)
    yield world
    world.close()


def checked_line(got, *parts):
    assert got.error == "SyncError", got.trace
    assert "\n" not in got.message
    assert ".cc:" not in got.message  # a place in the source of gloo
    for part in (*parts, "left early, stalled or lost its link", "start all workers again"):
        assert part in got.message.replace("Start", "start"), got.message


# -- workers -------------------------------------------------------------------------------------


def lost_job(folder, call, stalled):
    """The last worker is lost before the second of the messages of a save or a load."""
    model, opt = build(None)
    advance(model, opt, 3)
    checkpoint.save(folder, model, opt)
    advance(model, opt, 6)
    if dist.get_rank() == dist.get_world_size() - 1:
        lost_before(opt.transport, "exchange", 2, stalled)
    getattr(checkpoint, call)(folder, model, opt)


@pytest.mark.parametrize(
    ("call", "how", "workers"),
    [("save", "killed", 3), ("load", "killed", 2), ("save", "stalled", 3)],
)
def test_a_worker_that_is_lost_in_a_save_or_a_load_is_one_line_on_the_others(
    brittle_world, tmp_path, call, how, workers
):
    stalled = patient(TIMEOUT) + 4 if how == "stalled" else 0
    job = dict(folder=str(tmp_path), call=call, stalled=stalled)
    *others, lost = brittle_world.outcomes(lost_job, workers=workers, timeout=TIMEOUT, **job)
    assert lost.error == ("SyncError" if stalled else "Exit"), lost.trace
    # The one that is lost is known where there are two, and where the others have waited for it.
    whom = f"worker {workers - 1}" if stalled or workers == 2 else "the others"
    for worker, got in enumerate(others):
        where = f"in a {call} at clock 6, and gave up after "
        checked_line(got, f"worker {worker} could not exchange with {whom} {where}")
        assert "The global model is unchanged" in got.message
        waited = float(got.message.partition(where)[2].split()[0])
        assert waited < patient(TIMEOUT) + 5
        assert (waited > patient(TIMEOUT) - 1) == bool(stalled)
    assert sorted(path.name for path in Path(tmp_path).glob("step-*[0-9]")) == ["step-3"]


# -- the ranks of one worker ---------------------------------------------------------------------


def inside_job(folder, call):
    """A worker of two ranks, of which the second is killed."""
    mesh = palsgd.worker_groups(2)
    group, inside = mesh["workers"].get_group(), mesh["inside"]
    if call == "save":
        model = DistributedDataParallel(linear(), process_group=inside.get_group())
    else:
        model = fully_shard(linear(), mesh=inside)
    opt = palsgd.DiLoCo(model, sgd(model), sync_every=4, group=group)
    if dist.get_rank() == 1 and call == "save":
        lost_before(opt.transport, "gather_inside", 2, 0)
    elif dist.get_rank() == 1:
        lost_before(checkpoint, "_whole", 1, 0)
    if call == "save":
        checkpoint.save(folder, model, opt)
    checkpoint.save_model(folder, opt)


@pytest.mark.parametrize("call", ["save", "save_model"])
def test_a_rank_that_is_lost_within_its_worker_is_one_line_on_the_other(
    brittle_world, tmp_path, call
):
    job = dict(folder=str(tmp_path), call=call)
    got, _ = brittle_world.outcomes(inside_job, workers=2, timeout=TIMEOUT, **job)
    where = " in save_model()" if call == "save_model" else ""
    checked_line(got, f"rank 0 could not exchange with rank 1{where}, and gave up after ")


# -- beside saves --------------------------------------------------------------------------------


def building_job():
    if dist.get_rank() == 1:
        lost_before(dist, "all_gather_into_tensor", 2, 0)
    model = linear()
    palsgd.DiLoCo(model, sgd(model), sync_every=4)


def test_a_worker_that_is_lost_while_settings_are_compared_is_one_line_on_the_other(brittle_world):
    got, _ = brittle_world.outcomes(building_job, workers=2, timeout=TIMEOUT)
    checked_line(got, "worker 0 could not exchange with worker 1, and gave up after ")

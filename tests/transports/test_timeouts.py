"""A worker that is there but silent: the others end within the timeout of their process group,
whichever group they wait in, and say meanwhile whom they wait for."""

import gc
import logging
import sys
import time
from datetime import timedelta
from pathlib import Path

import pytest
import torch.distributed as dist

import palsgd
from palsgd.process_groups import timeout_of, twin
from palsgd.transports import waiting
from palsgd.transports.json_exchange import gathered
from support.losses import stall
from support.patience import patient
from support.problems import batches, linear
from support.stepping import sgd, take_step

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="signals of its own")


def timeouts_job():
    other = dist.new_group([0, 1], timeout=timedelta(seconds=71))
    mesh = palsgd.worker_groups(2)
    workers, inside = (mesh[axis].get_group() for axis in ("workers", "inside"))
    groups = [None, twin(None), twin(other), workers, inside, twin(inside)]
    return [timeout_of(group).total_seconds() for group in groups]


def test_groups_that_are_copied_and_those_of_two_levels_have_the_timeout_they_come_from(world):
    given = patient(123)
    for found in world.run(timeouts_job, workers=2, timeout=123):
        assert found == [given, given, 71, given, given, given]


# -- lost ----------------------------------------------------------------------------------------


def stalled_job(delay, seconds, folder):
    """The seconds that the other workers wait for one that stalls within a round, and what they
    are told."""
    model = linear()
    opt = palsgd.DiLoCo(model, sgd(model), sync_every=4, delay=delay)
    for step, batch in enumerate(batches() * 4):
        if step == 6 and dist.get_rank() == 2 and seconds:
            stall(seconds, Path(folder) / "0", Path(folder) / "1")
        began = time.monotonic()
        try:
            take_step(model, opt, batch)
        except palsgd.SyncError as error:
            waited = time.monotonic() - began
            (Path(folder) / str(dist.get_rank())).touch()
            return waited, str(error)
    opt.finish()
    return None


@pytest.mark.slow
@pytest.mark.parametrize("delay", [0, 2])
def test_a_stalled_worker_ends_the_others_within_the_timeout(world, delay, tmp_path):
    """With a delay they wait in a group of their own, in the background."""
    timeout = 4
    how = dict(workers=3, delay=delay, folder=str(tmp_path))
    world.run(stalled_job, seconds=0, **how)  # the processes start
    found = world.run(stalled_job, timeout=timeout, seconds=patient(timeout) + 6, **how)
    for seconds, message in found[:2]:
        assert seconds < patient(timeout) + 5
        assert "could not exchange with worker 2" in message
        assert "it left early, stalled or lost its link" in message


# -- waited for ----------------------------------------------------------------------------------


@pytest.fixture
def begun(world):
    """A world whose processes have imported what they need, for which nobody waits any more."""
    world.run(quick, workers=3)
    return world


def quick(store=None):
    """Lines after two seconds instead of ten; returns what is said."""
    waiting.NOTED_S, waiting.PATIENCE_S, waiting._STORE_S = 0.1, 2.0, 0.5
    said = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())
    logging.getLogger("palsgd").handlers = [handler]
    return said


def late_job(delay, seconds, lost):
    said = quick()
    model = linear()
    opt = palsgd.DiLoCo(model, sgd(model), sync_every=4, delay=delay)
    if lost:
        for watch in list(waiting._watches.values()):
            watch._store = lost_store()
    for step, batch in enumerate(batches() * 4):
        if step == 6 and dist.get_rank() == 2:
            time.sleep(seconds)
        take_step(model, opt, batch)
    opt.finish()
    return said


def lost_store():
    """One whose server is gone."""
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    client = dist.TCPStore("127.0.0.1", server.port, is_master=False, wait_for_workers=False)
    del server
    gc.collect()
    return client


@pytest.mark.slow
@pytest.mark.parametrize("delay", [0, 2])
def test_workers_say_once_which_worker_they_wait_for(begun, delay):
    *others, late = begun.run(late_job, workers=3, delay=delay, seconds=5, lost=False)
    for worker, said in enumerate(others):
        (line,) = said
        assert line.startswith(f"palsgd: worker {worker} has waited for the others for ")
        assert line.endswith("; not there yet: worker 2")
    assert late == []


@pytest.mark.slow
def test_workers_whose_store_is_lost_say_only_how_long_they_wait(begun):
    *others, _ = begun.run(late_job, workers=3, delay=0, seconds=5, lost=True)
    for said in others:
        assert said
        assert all(line.endswith("; who is not there cannot be told") for line in said)


def asked_job():
    """How often a store that is lost is asked, by two exchanges that wait for long."""
    quick()
    watch, store = waiting.watch_of(None), CountedLoss()
    watch._store = store
    for _ in range(2):
        if dist.get_rank() == 1:
            time.sleep(1)
        waiting.barrier()
    return store.asked


class CountedLoss:
    """A store whose server is gone."""

    asked = 0

    def set(self, key, value):
        self.asked += 1
        raise RuntimeError("Broken pipe")


@pytest.mark.slow
def test_a_store_that_is_lost_is_not_asked_again(begun):
    first, _ = begun.run(asked_job, workers=2)
    assert first == 1


def late_value_job():
    said = quick()
    if dist.get_rank() == 1:
        time.sleep(4)
    gathered("value")
    return said


@pytest.mark.slow
def test_ranks_that_wait_for_a_value_say_for_whose(begun):
    said, late = begun.run(late_value_job, workers=2)
    assert [line.rpartition("; ")[2] for line in said] == ["not there yet: rank 1"]
    assert late == []

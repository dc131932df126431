"""Loops that end by their data: finish(), and what is said of runs that are dropped."""

import contextlib
import gc
import os
import subprocess
import sys
import warnings

import numpy as np
import pytest
import torch.distributed as dist

import palsgd
from support.problems import batches, global_vector, linear, train, vector
from support.stepping import build, sgd, take_step

SYNCS = {
    "plain": {},
    "several messages": dict(bucket_mb=64 / 2**20),
    "fragments": dict(fragments=2),
    "delay": dict(delay=2),
    "both": dict(fragments=2, delay=2),
    "int8": dict(compress="int8"),
}


def finished(steps, **rules):
    """A loop of so many steps that ends with finish(), beside one over until() of that length."""
    model, opt = build(mix_prob=0.0, **rules)
    for batch in (batches() * 5)[:steps]:
        take_step(model, opt, batch)
    opt.finish()
    ended = vector(model), global_vector(model, opt), opt.synced, opt.rounds, opt.unsynced_steps
    opt.finish()
    again = vector(model), global_vector(model, opt), opt.synced, opt.rounds, opt.unsynced_steps
    twin, other = build(mix_prob=0.0, **rules)
    train(twin, other, batches(), steps)
    history = len(opt.ledger.history) == len(other.ledger.history)
    return ended, again, (vector(twin), global_vector(twin, other), True, other.rounds, 0), history


@pytest.mark.parametrize("steps", [12, 15])
@pytest.mark.parametrize("sync", SYNCS)
def test_finish_does_what_the_end_of_until_does_and_nothing_the_second_time(world, sync, steps):
    for ended, again, twin, history in world.run(finished, workers=2, steps=steps, **SYNCS[sync]):
        np.testing.assert_allclose(ended[1], twin[1], rtol=1e-9 if sync != "int8" else 1e-6)
        np.testing.assert_array_equal(ended[0], ended[1])
        assert ended[2:] == twin[2:]
        for mine, theirs in zip(ended, again, strict=True):
            np.testing.assert_array_equal(mine, theirs)
        assert history or sync in ("delay", "both")  # a sync that was under way is counted too


def uneven(lengths, **rules):
    model, opt = build(**rules)
    for batch in (batches() * 5)[: lengths[dist.get_rank()]]:
        take_step(model, opt, batch)
    opt.finish()
    return vector(model), opt.synced, opt.unsynced_steps


@pytest.mark.parametrize("sync", ["plain", "fragments", "delay"])
def test_workers_may_finish_at_other_steps_of_one_round(world, sync):
    """Also one that took none since the last sync."""
    rules = dict(mix_prob=0.0, sync_every=6, **SYNCS[sync])
    ends = world.run(uneven, workers=3, lengths=[6, 8, 7], **rules)
    for local, synced, left in ends:
        assert (synced, left) == (True, 0)
        np.testing.assert_array_equal(local, ends[0][0])


def elsewhere(**rules):
    model, opt = build(mix_prob=0.0, **rules)
    for batch in (batches() * 5)[: (20, 7)[dist.get_rank()]]:
        take_step(model, opt, batch)
    opt.finish()


@pytest.mark.parametrize("sync", SYNCS)
def test_a_worker_that_is_elsewhere_is_told_apart_on_all(world, sync):
    for got in world.outcomes(elsewhere, workers=2, timeout=10, **SYNCS[sync]):
        assert got.error == "ConsensusError", got.trace
        assert "worker 1 of 2 called finish() while worker 0 came to the sync" in got.message


def goes_on(steps):
    ends = []
    for halves in (True, False):
        model, opt = build(draws="independent")
        data = batches() * 5
        for place, batch in enumerate(data[:steps]):
            if halves and place == 0:
                opt.finish()  # nothing has happened yet
            take_step(model, opt, batch)
        opt.finish()
        train(model, opt, batches(), 60)
        ends.append(vector(model))
    return ends


def test_training_goes_on_after_finish_and_ends_where_all_do(world):
    (first, same), (other, _) = world.run(goes_on, workers=2, steps=9)
    np.testing.assert_array_equal(first, same)
    np.testing.assert_array_equal(first, other)


@pytest.mark.parametrize("warmup", [9, float("inf")])
def test_there_is_nothing_to_finish_in_the_warm_up(warmup):
    model, opt = build(warmup_steps=warmup, transport=palsgd.Alone())
    take_step(model, opt, batches(0)[0])
    before, ledger = vector(model), opt.ledger.as_dict()
    opt.finish()
    np.testing.assert_array_equal(vector(model), before)
    assert opt.ledger.messages == ledger["messages"]


def test_one_worker_finishes_alone():
    model, opt = build(mix_prob=0.0, transport=palsgd.Alone())
    for batch in batches(0)[:4]:
        take_step(model, opt, batch)
    assert (opt.synced, opt.unsynced_steps) == (False, 4)
    opt.finish()
    assert (opt.synced, opt.unsynced_steps, opt.clock, opt.rounds) == (True, 0, 4, 1)


# -- what is said at the end of a program --------------------------------------------------------

SCRIPT = """
import sys
import torch, torch.distributed as dist
import palsgd
dist.init_process_group("gloo")
model = torch.nn.Linear(2, 1)
torch.nn.init.ones_(model.weight); torch.nn.init.ones_(model.bias)
opt = palsgd.DiLoCo(model, torch.optim.SGD(model.parameters(), lr=0.1), sync_every=8)
for _ in range(3):
    model(torch.ones(1, 2) * (1 + dist.get_rank())).sum().backward()
    opt.step()
if sys.argv[1] == "finish":
    opt.finish()
if sys.argv[1] == "fails":
    raise RuntimeError("of the user's")
dist.destroy_process_group()
"""


def said_at_the_end(how, tmp_path):
    """The standard error of two processes that run the script."""
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    (tmp_path / "store").unlink(missing_ok=True)
    code = "import torch.distributed as d, runpy, functools, sys; n, s = int(sys.argv.pop()), "
    code += "sys.argv.pop(); d.init_process_group = functools.partial(d.init_process_group, "
    code += f"init_method='file://{tmp_path}/store', rank=n, world_size=2); runpy.run_path(s)"
    started = [
        subprocess.Popen(
            [sys.executable, "-c", code, how, str(script), str(rank)],
            stderr=subprocess.PIPE, text=True, env=os.environ | {"GLOO_SOCKET_IFNAME": "lo"},
        )
        for rank in range(2)
    ]  # fmt: skip
    return [process.communicate(timeout=120)[1] for process in started]


@pytest.mark.slow
@pytest.mark.parametrize(("how", "warns"), [("data", True), ("finish", False), ("fails", False)])
def test_a_program_that_ends_unsynced_says_so_unless_it_ends_with_an_error(how, warns, tmp_path):
    for worker, said in enumerate(said_at_the_end(how, tmp_path)):
        assert (f"the last 3 steps of worker {worker} were not synced" in said) == warns, said


def failing():
    """The error of a step says more than a warning about the steps before it."""
    model = linear()
    opt = palsgd.DiLoCo(model, sgd(model), sync_every=4)
    with contextlib.suppress(palsgd.SyncError):
        for batch in batches()[: (4, 2)[dist.get_rank()]]:
            take_step(model, opt, batch)
        opt.finish()
    assert opt.unsynced_steps
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        del opt
        gc.collect()
    return len(warned)


def test_a_run_that_ended_with_an_error_is_dropped_in_silence(world):
    assert world.run(failing, workers=2, timeout=10) == [0, 0]

"""Runs that go on with more or fewer workers: the weights, the data and the records are right."""

import shutil
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch.nn.utils import parameters_to_vector, vector_to_parameters

from palsgd.lab import workloads
from palsgd.lab.data.sharding import random_stream
from palsgd.lab.report import find_runs
from palsgd.lab.resuming import Resuming, left_to_do
from palsgd.lab.run_folder import RunFolder
from palsgd.lab.settings import Settings
from palsgd.lab.worker_changes import Change, changes_in, examples_seen
from palsgd.lab.workloads.digits import Digits
from support import lab_runs
from support.commands import apart, lines, palsgd, summary

LOCAL_SGD = Settings(
    workload="digits", method="localsgd", workers=2, steps=32, sync_every=4, warmup_steps=0,
    batch_size=8, inner="sgd", momentum=0.0, lr=0.05, evaluate_every=8, seed=3,
)  # fmt: skip
PALSGD = replace(
    LOCAL_SGD, method="palsgd", mix_prob=0.25, pull=0.3, inner="adamw", lr=2e-3, warmup_steps=4
)


def twin(settings, phases):
    """Local SGD by hand: plain gradient steps over the permutation of the first epoch, from its
    first example to its last, and the mean of all workers after H of them."""
    workload = workloads.load("digits", seed=settings.seed)
    inputs, labels = workload.train_images, workload.train_labels
    order = torch.from_numpy(random_stream(settings.seed, 0).permutation(len(labels)))
    torch.manual_seed(settings.seed)
    net = workload.model()
    anchor, first = parameters_to_vector(net.parameters()).detach().clone(), 0
    for workers, size, rounds in phases:
        for _ in range(rounds):
            ends = []
            for worker in range(workers):
                vector_to_parameters(anchor.clone(), net.parameters())
                for step in range(settings.sync_every):
                    start = first + (step * workers + worker) * size
                    which = order[start : start + size]
                    net.zero_grad()
                    workload.loss(net, (inputs[which], labels[which])).backward()
                    with torch.no_grad():
                        for p in net.parameters():
                            p -= settings.lr * p.grad
                ends.append(parameters_to_vector(net.parameters()).detach())
            first += settings.sync_every * workers * size
            anchor = torch.stack(ends).mean(dim=0)
    assert first <= len(order)
    return anchor


def trained(world, folder, settings, **how):
    found = world.run(
        lab_runs.train, workers=settings.workers, settings=settings, folder=folder, **how
    )
    weights = [torch.cat([x.flatten() for x in each.model.values()]) for each in found]
    assert all(torch.equal(weights[0], each) for each in weights)
    return found[0].said, weights[0]


@pytest.mark.parametrize(
    ("before", "after"),
    [((2, 8), (3, 8)), ((3, 8), (2, 8)), ((1, 8), (2, 8)), ((2, 12), (3, 8)), ((2, 8), (1, 8))],
    ids=str,
)
def test_the_global_model_is_that_of_the_workers_that_were_there(world, tmp_path, before, after):
    first, then = (
        replace(LOCAL_SGD, workers=workers, batch_size=size) for workers, size in (before, after)
    )
    trained(world, tmp_path / "run", first, stop_at=16)
    said, found = trained(world, tmp_path / "run", then, resume=True, elastic=True)
    wanted = twin(LOCAL_SGD, [(*before, 4), (*after, 4)])
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-6)
    assert any(f"{before[0]} workers saved step-16, {after[0]} go on" in line for line in said)
    folder = RunFolder(tmp_path / "run")
    counts = [(line["step"], line["workers"], len(line["distance"])) for line in folder.lines()]
    assert counts == [
        (step, k, k) for step in range(0, 33, 4) for k in [before[0] if step <= 16 else after[0]]
    ]
    (change,) = changes_in(folder.config())
    assert change == Change(
        step=16, workers=(before[0], after[0]), batch_size=(before[1], after[1]),
        taken=(16,) * before[0], begins=(16,) * after[0],
    )  # fmt: skip
    assert (folder.config()["workers"], folder.config()["batch_size"]) == after
    record = folder.summary()
    assert record["workers"] == after[0]
    assert changes_in(record) == (change,)


def test_workers_come_and_go_several_times(world, tmp_path):
    run = tmp_path / "run"
    for workers, stop in ((2, 8), (3, 16), (1, 24), (2, None)):
        settings = replace(LOCAL_SGD, workers=workers)
        _, found = trained(world, run, settings, stop_at=stop, resume=stop != 8, elastic=True)
    wanted = twin(LOCAL_SGD, [(2, 8, 2), (3, 8, 2), (1, 8, 2), (2, 8, 2)])
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-6)
    assert [change.workers for change in changes_in(RunFolder(run).config())] == [
        (2, 3), (3, 1), (1, 2),
    ]  # fmt: skip


def test_who_stays_keeps_its_inner_state_and_a_change_is_one_line(world, tmp_path):
    run = tmp_path / "run"
    trained(world, run, PALSGD, stop_at=16)
    (line,), _ = trained(world, run, replace(PALSGD, workers=3), resume=True, elastic=True)
    assert line.startswith(f"palsgd: {run}: 2 workers saved step-16, 3 go on")
    assert "worker 2 goes on from the global model, with worker 0's inner state" in line
    assert "2 workers until step 16, then 3: the batch of a worker stays 8, that of all goes " in (
        line
    )
    assert [each["step"] for each in lines(run)] == [0, 1, 2, 3, 4, *range(8, 33, 4)]


def test_a_run_whose_workers_did_not_change_is_elastic_without_a_word(world, tmp_path):
    for name, elastic in (("plain", False), ("elastic", True)):
        trained(world, tmp_path / name, PALSGD, stop_at=16)
        said, _ = trained(world, tmp_path / name, PALSGD, resume=True, elastic=elastic)
        assert said == []
    one, other = (
        [{**line, "time_s": 0} for line in lines(tmp_path / name)] for name in ("plain", "elastic")
    )
    assert one == other
    assert "changes" not in RunFolder(tmp_path / "elastic").config()


def test_a_change_that_came_to_no_checkpoint_is_forgotten(world, tmp_path):
    """The run was killed as soon as it had gone on with three workers."""
    run = tmp_path / "run"
    trained(world, run, LOCAL_SGD, stop_at=16)
    kept = tmp_path / "kept"
    shutil.copytree(run / "checkpoints", kept)
    trained(world, run, replace(LOCAL_SGD, workers=3), stop_at=24, resume=True, elastic=True)
    shutil.rmtree(run / "checkpoints")
    shutil.copytree(kept, run / "checkpoints")
    assert RunFolder(run).config()["workers"] == 3
    said, found = trained(world, run, LOCAL_SGD, resume=True, elastic=True)
    assert said == []
    torch.testing.assert_close(found, twin(LOCAL_SGD, [(2, 8, 8)]), rtol=1e-4, atol=1e-6)
    assert RunFolder(run).config()["workers"] == 2
    assert "changes" not in RunFolder(run).config()


class OwnBatches(Digits):
    """A user's workload that knows nothing of changes."""

    def batch(self, *, worker, workers, size, index):
        return super().batch(worker=worker, workers=workers, size=size, index=index)


def test_a_workload_that_cannot_deal_anew_goes_on_and_a_line_says_what_that_means(world, tmp_path):
    settings = replace(LOCAL_SGD, workload=f"{__file__}:OwnBatches")
    trained(world, tmp_path / "run", settings, stop_at=16)
    (said,), _ = trained(
        world, tmp_path / "run", replace(settings, workers=3), resume=True, elastic=True
    )
    assert "this workload does not take `changes`, so that some examples" in said
    assert [line["step"] for line in lines(tmp_path / "run")][-1] == 32


def test_another_number_is_refused_where_nobody_asked_for_it(world, tmp_path):
    trained(world, tmp_path / "run", LOCAL_SGD, stop_at=16)
    outcomes = world.outcomes(
        lab_runs.train, workers=3, settings=replace(LOCAL_SGD, workers=3),
        folder=tmp_path / "run", resume=True,
    )  # fmt: skip
    assert {each.error for each in outcomes} == {"ValueError"}
    assert "was saved by 2 workers, and 3 load it" in outcomes[0].message


# -- what settings become --------------------------------------------------------------------------


def resuming(**changes):
    return Resuming(**{"simulate": False, "elastic": True, "keep_batch": "worker"} | changes)


@pytest.fixture
def begun(tmp_path):
    """The folder of a run of 2 workers with a length in epochs, which was not finished."""
    settings = replace(LOCAL_SGD, steps=None, epochs=2.0)
    folder = RunFolder(tmp_path / "run")
    folder.create({**settings.in_steps(1437).as_dict(), "simulated": False})
    return folder, settings


def test_a_run_keeps_its_length_in_steps_and_a_workers_batch(begun):
    folder, settings = begun
    found = left_to_do(folder, replace(settings, workers=4), resuming())
    assert (found.workers, found.batch_size, found.steps) == (4, 8, folder.config()["steps"])
    assert found.steps == 2 * (1437 // 16)


def test_or_it_keeps_the_batch_of_all_workers(begun):
    folder, settings = begun
    how = resuming(keep_batch="global")
    assert left_to_do(folder, replace(settings, workers=4), how).batch_size == 4
    with pytest.raises(ValueError, match="2 times 8, cannot be dealt evenly to 3; use a number"):
        left_to_do(folder, replace(settings, workers=3), how)
    change = Change(step=16, workers=(2, 4), batch_size=(8, 4), taken=(16, 16), begins=(16,) * 4)
    now = {"workers": 4, "batch_size": 4, "changes": [change.as_dict()]}
    folder.create(folder.config() | now)
    for elastic in (True, False):  # with the command that began the run
        again = left_to_do(folder, replace(settings, workers=4), resuming(elastic=elastic))
        assert (again.workers, again.batch_size) == (4, 4)
    with pytest.raises(ValueError, match="was run with batch_size=4, now it is 5"):
        left_to_do(folder, replace(settings, workers=4, batch_size=5), how)


def test_other_settings_are_refused_whatever_the_number_of_workers(begun):
    folder, settings = begun
    with pytest.raises(ValueError, match=r"was run with lr=0\.05, now it is 0\.1"):
        left_to_do(folder, replace(settings, workers=3, lr=0.1), resuming())
    with pytest.raises(ValueError, match=r"was run with workers=2, now it is 3; .*--elastic"):
        left_to_do(folder, replace(settings, workers=3), resuming(elastic=False))


def test_what_is_done_stays_as_it_is(begun, caplog):
    folder, settings = begun
    folder.write_summary({})
    assert left_to_do(folder, replace(settings, workers=3), resuming()) is None
    assert "is done and stays as it is, with 2 workers" in caplog.text


def test_simulated_workers_stay_as_many_as_they_are(tmp_path):
    words = ("train", "digits", "steps=16", "--simulate", "--no-report", "--quiet", "--out",
             tmp_path / "out")  # fmt: skip
    assert palsgd(*words, "--workers", 2).code == 0
    (tmp_path / "out" / "palsgd" / "summary.json").unlink()
    said = palsgd(*words, "--workers", 3, "--resume")
    assert said.code == 2
    assert "was run with workers=2, now it is 3; use the old value, --force" in said.line


def test_examples_are_counted_by_those_who_were_there():
    change = Change(step=12, workers=(2, 3), batch_size=(8, 4), taken=(10, 10), begins=(10,) * 3)
    config = {"workers": 3, "batch_size": 4, "changes": [change.as_dict()]}
    found = examples_seen(config, np.array([0, 5, 10, 20]))
    assert found.tolist() == [0, 80, 160, 280]
    assert examples_seen({"workers": 2, "batch_size": 8}, np.array([5])).tolist() == [80]


# -- as a user meets it ----------------------------------------------------------------------------


RECIPE = workloads.recipe("digits").changed({"steps": 24, "sync_every": 4, "warmup_steps": 0,
                                             "batch_size": 8, "evaluate_every": 8})  # fmt: skip
WORDS = (
    "train", "digits", "steps=24", "sync_every=4", "warmup_steps=0", "batch_size=8",
    "evaluate_every=8", "--no-report", "--quiet", "--resume",
)  # fmt: skip


@pytest.fixture
def stopped(world, tmp_path):
    """A run of two workers that ended at step 16."""
    trained(world, tmp_path / "out" / "palsgd", replace(RECIPE, workers=2), stop_at=16)
    return tmp_path / "out"


@pytest.mark.slow
def test_a_run_goes_on_with_more_workers_by_the_command_line(stopped):
    said = apart(*WORDS, "--workers", 3, "--out", stopped)
    assert said.code == 0, said.err
    note = (
        "2 workers until step 16, then 3: the batch of a worker stays 8, that of all goes from 16 "
        "to 24"
    )
    assert said.err.count(note) == 1
    assert summary(stopped)["palsgd"]["workers"] == 3
    (run,) = find_runs([stopped])
    assert run.notes == (note,)


@pytest.mark.slow
def test_under_torchrun_a_run_goes_on_with_as_many_as_there_are(stopped):
    torchrun = ("--nproc-per-node", 1, "--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:0",
                "-m", "palsgd")  # fmt: skip
    said = apart(*torchrun, *WORDS, "--workers", 2, "--elastic", "--keep-batch", "global",
                 "--out", stopped, module="torch.distributed.run")  # fmt: skip
    assert said.code == 0, said.err
    folder = RunFolder(stopped / "palsgd")
    (change,) = changes_in(folder.config())
    assert (change.workers, change.batch_size) == ((2, 1), (8, 16))
    assert folder.summary()["steps"] == 24


def test_under_torchrun_another_number_must_be_asked_for(stopped, monkeypatch):
    for name, value in (("TORCHELASTIC_RUN_ID", "x"), ("RANK", "0"), ("WORLD_SIZE", "3")):
        monkeypatch.setenv(name, value)
    said = palsgd(*WORDS, "--workers", 2, "--out", stopped)
    assert said.code == 2
    assert "torchrun started 3 processes; use --workers 3, or --elastic to go on with" in said.line
    said = palsgd(*WORDS, "--workers", 3, "--out", stopped)
    assert said.code == 2
    assert "was run with workers=2, now it is 3; use the old value, --elastic to go on" in said.line

"""Batches of all workers that are made at once, beside those that each worker asks for."""

import gc
import weakref
from dataclasses import replace

import pytest
import torch

import palsgd
from palsgd.lab import joint_batches, workloads
from palsgd.lab.joint_batches import KEPT, PRESENT, JointBatches
from palsgd.lab.settings import Settings


@pytest.mark.parametrize("sharding", ["reshuffled", "fixed", "dirichlet:0.3"])
@pytest.mark.parametrize("name", ["digits", "stories"])
def test_batches_of_all_workers_are_those_of_each(name, sharding):
    if name == "stories" and sharding.startswith("dirichlet"):
        pytest.skip("stories have no labels")
    workload = workloads.load(name, sharding=sharding, seed=5)
    for index in (0, 1, 40):  # 40 is in a later epoch of digits
        images, labels = workload.joint_batch(workers=3, size=20, index=index)
        for worker in range(3):
            alone = workload.batch(worker=worker, workers=3, size=20, index=index)
            torch.testing.assert_close((images[worker], labels[worker]), alone, rtol=0, atol=0)


def test_workers_may_be_batches_apart_and_go_on_at_any_index():
    workload = workloads.load("digits", seed=5)
    settings = Settings(workload="digits", workers=2, batch_size=8, steps=10)
    joint = JointBatches(settings, workload)
    fast, slow = joint(0), joint(1)
    for _ in range(KEPT + 3):
        next(fast)
    slow.load_state_dict({"index": 1})
    wanted = workload.batch(worker=1, workers=2, size=8, index=1)
    torch.testing.assert_close(next(slow), wanted, rtol=0, atol=0)
    assert slow.state_dict() == {"index": 2}


@pytest.mark.parametrize("ahead", [False, True])
def test_runs_that_read_the_same_data_make_each_batch_once(ahead, monkeypatch):
    workload = workloads.load("stories", seed=5)
    made = []
    whole = type(workload).joint_batch

    def counted(self, *, index, **others):
        made.append(index)
        return whole(self, index=index, **others)

    monkeypatch.setattr(type(workload), "joint_batch", counted)
    settings = Settings(workload="stories", workers=2, batch_size=4, steps=40)
    runs = [JointBatches(settings, workload) for _ in range(6)]
    runs[0]._shelf._ahead = ahead
    for index in range(20):  # the last run is behind the others, as one that skips gradients is
        found = [each.joint(index) for each in runs[:-1]]
        assert all(each is found[0] for each in found)
        runs[-1].joint(index // 2)
    joint_batches._thread().submit(int).result()  # what was begun before it is made now
    assert sorted(made) == list(range(20 + ahead))


def test_batches_that_are_kept_take_no_more_room_than_is_given(monkeypatch):
    workload = workloads.load("stories", seed=5)
    settings = Settings(workload="stories", workers=2, batch_size=4, steps=40)
    size = sum(x.numel() * x.element_size() for x in JointBatches(settings, workload).joint(0))
    monkeypatch.setattr("palsgd.lab.joint_batches.ROOM", 12 * size)
    run = JointBatches(settings, workload)
    for index in range(40):
        run.joint(index)
    assert len(run._shelf._made) == 12 > KEPT


@pytest.mark.parametrize("ahead", [False, True])
def test_a_batch_that_cannot_be_made_is_told_and_made_the_next_time(ahead, monkeypatch):
    workload = workloads.load("stories", seed=5)
    settings = Settings(workload="stories", workers=2, batch_size=4, steps=40)
    run, whole, broken = JointBatches(settings, workload), type(workload).joint_batch, [3]

    def failing(self, *, index, **others):
        if index in broken:
            raise MemoryError("no room")
        return whole(self, index=index, **others)

    monkeypatch.setattr(type(workload), "joint_batch", failing)
    run._shelf._ahead = ahead
    assert run.joint(2) is not None
    with pytest.raises(MemoryError, match="no room"):
        run.joint(3)
    broken.clear()
    torch.testing.assert_close(run.joint(3), workload.joint_batch(workers=2, size=4, index=3))


class Alone(workloads.kind("digits")):
    """Every worker's batches are made by themselves, as if each drew random numbers."""

    name = "alone"

    def load(self):
        super().load()
        self.made = []

    def joint_batch(self, **place):
        return None

    def batch(self, *, worker, index, **others):
        self.made.append((worker, index))
        return super().batch(worker=worker, index=index, **others)


def make_ahead(joint, ahead):
    assert joint.joint(0) is None
    for each in joint._own:
        each._ahead = ahead


@pytest.mark.parametrize("ahead", [False, True])
def test_workers_that_train_one_after_another_make_each_batch_once(ahead, monkeypatch):
    monkeypatch.setattr("palsgd.lab.joint_batches.ROOM", 0)  # as if batches were large
    workload = Alone()
    joint = JointBatches(Settings(workload="digits", workers=3, batch_size=4, steps=90), workload)
    make_ahead(joint, ahead)
    workers = [joint(k) for k in range(3)]
    for _ in range(2):  # rounds of 40 steps
        for each in workers:
            for _ in range(40):
                next(each)
    joint_batches._thread().submit(int).result()  # what was begun before it is made now
    assert sorted(workload.made) == [(k, i) for k in range(3) for i in range(80 + ahead)]
    assert [len(each._made) for each in joint._own] == [PRESENT] * 3


@pytest.mark.parametrize("ahead", [False, True])
def test_runs_share_batches_that_are_made_for_each_worker(ahead, monkeypatch):
    monkeypatch.setattr("palsgd.lab.joint_batches.ROOM", 0)
    workload = Alone()
    settings = Settings(workload="digits", workers=12, batch_size=4, steps=90)
    runs = [JointBatches(settings, workload) for _ in range(2)]
    make_ahead(runs[0], ahead)
    assert runs[1].joint(0) is None
    readers = [[run(k) for k in range(12)] for run in runs]
    for index in range(10):
        for workers in readers:
            for k, each in enumerate(workers):
                wanted = (
                    type(workload)
                    .__bases__[0]
                    .batch(workload, worker=k, workers=12, size=4, index=index)
                )
                torch.testing.assert_close(next(each), wanted, rtol=0, atol=0)
    joint_batches._thread().submit(int).result()
    assert sorted(workload.made) == [(k, i) for k in range(12) for i in range(10 + ahead)]


def test_a_loss_that_changes_its_batch_changes_it_for_no_other_run():
    workload = Alone()
    settings = Settings(workload="digits", workers=2, batch_size=4, steps=90)
    one, other = (JointBatches(settings, workload)(0) for _ in range(2))
    wanted = workload.batch(worker=0, workers=2, size=4, index=0)
    next(one)[0].zero_()
    torch.testing.assert_close(next(other), wanted, rtol=0, atol=0)


def test_batches_go_with_the_last_run_that_reads_them():
    workload = workloads.load("stories", seed=5)
    settings = Settings(workload="stories", workers=2, batch_size=4, steps=40)
    runs = [JointBatches(settings, workload) for _ in range(2)]
    shelf = weakref.ref(runs[0]._shelf)
    assert runs[1]._shelf is shelf()
    runs.pop()
    assert runs[0].joint(0) is not None
    runs.pop()
    gc.collect()
    assert shelf() is None


def test_runs_with_other_batches_do_not_share_them():
    workload = workloads.load("stories", seed=5)
    settings = Settings(workload="stories", workers=2, batch_size=4, steps=40)
    few, many = (JointBatches(replace(settings, batch_size=n), workload) for n in (4, 5))
    assert few.joint(0)[0].shape[:2] == (2, 4)
    assert many.joint(0)[0].shape[:2] == (2, 5)


def trained(data):
    workload = workloads.load("digits", seed=5)
    result = palsgd.simulate(
        workers=3, steps=12, model=workload.model, loss=workload.loss, data=data, seed=1,
        method=lambda model: palsgd.PALSGD(
            model, torch.optim.SGD(model.parameters(), lr=0.1), sync_every=4, mix_prob=0.25
        ),
        vectorize=True,
    )  # fmt: skip
    return torch.nn.utils.parameters_to_vector(result.model.parameters())


def test_stacked_workers_train_alike_with_their_batches_as_one_and_one_by_one():
    workload = workloads.load("digits", seed=5)
    settings = Settings(workload="digits", workers=3, batch_size=8, steps=12)
    joint = JointBatches(settings, workload)

    def one_by_one(worker):
        own = iter(joint(worker))
        return (next(own) for _ in range(100))

    taken = []
    whole = JointBatches.joint

    def counted(self, index):
        taken.append(index)
        return whole(self, index)

    with pytest.MonkeyPatch.context() as patch:
        alone = trained(one_by_one)
        patch.setattr(JointBatches, "joint", counted)
        together = trained(JointBatches(settings, workload))
    assert torch.equal(alone, together)
    assert len(taken) < 3 * len(set(taken)), "each worker's batch was asked for by itself"

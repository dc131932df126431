"""Training that goes on with another number of workers, against a twin in NumPy."""

import shutil

import numpy as np
import pytest
import torch
import torch.distributed as dist

import palsgd
from palsgd.checkpoint.everyone import Everyone
from support.checkpoints import loaded_quietly, place
from support.core_access import anchor_of
from support.problems import linear, regression_gradient, regression_start, vector

H, LR, MOMENTUM = 4, 0.05, 0.9
OUTER = dict(lr=0.7, momentum=0.6)


class Twin:
    """DiLoCo with SGD and momentum inside, and Nesterov momentum outside."""

    def __init__(self):
        self.anchor = regression_start()
        self.outer = np.zeros_like(self.anchor)
        self.inner, self.drawn = [], 0

    def rounds(self, workers, count):
        """A worker that is new starts with the momentum of worker 0."""
        first = self.inner[0] if self.inner else np.zeros_like(self.anchor)
        self.inner += [first.copy() for _ in range(workers - len(self.inner))]
        del self.inner[workers:]
        for _ in range(count):
            moved = []
            for k in range(workers):
                x = self.anchor.copy()
                for i in range(H):
                    g = regression_gradient(k, x, self.drawn + i)
                    self.inner[k] = MOMENTUM * self.inner[k] + g
                    x -= LR * self.inner[k]
                moved.append(self.anchor - x)
            self.drawn += H
            delta = np.mean(moved, axis=0)
            self.outer = OUTER["momentum"] * self.outer + delta
            self.anchor = self.anchor - OUTER["lr"] * (delta + OUTER["momentum"] * self.outer)


def build(method="DiLoCo", momentum=MOMENTUM, **rules):
    model = linear()
    inner = torch.optim.SGD(model.parameters(), lr=LR, momentum=momentum)
    kind = getattr(palsgd, method, None) or getattr(palsgd.methods, method)
    settings = dict(sync_every=H, outer=palsgd.nesterov(**OUTER)) | rules
    return model, kind(model, inner, **settings)


def advance(model, opt, clock):
    worker = opt.transport.worker
    while opt.clock < clock:
        g = torch.tensor(regression_gradient(worker, vector(model), opt.gradient_steps))
        for p, part in zip(model.parameters(), g.split([12, 3]), strict=True):
            p.grad = part.view_as(p)
        opt.step()


def save_at(folder, clock, disks="one", **rules):
    model, opt = build(**rules)
    advance(model, opt, clock)
    palsgd.checkpoint.save(place(folder, dist.get_rank(), disks), model, opt, extra={"at": clock})
    return opt.ledger.as_dict()


def refuse(*_, **__):
    raise AssertionError("a file that lies on the disk is sent")


def go_on(folder, clock, disks="one", elastic=True, **rules):
    model, opt = build(**rules)
    with pytest.MonkeyPatch.context() as patch:
        if disks == "one":
            patch.setattr(Everyone, "send", refuse)
        loaded, said = loaded_quietly(
            place(folder, dist.get_rank(), disks), model, opt, elastic=elastic
        )
    found = dict(first=opt.clock, may_save=opt.may_save, start=vector(model))
    with opt.anchor_weights():
        found["global"] = vector(model)
    advance(model, opt, clock)
    return found | dict(
        weights=vector(model), anchor=anchor_of(opt).numpy().copy(), said=said, loaded=loaded,
        ledger=opt.ledger.as_dict(), text=str(opt.ledger),
    )  # fmt: skip


@pytest.mark.parametrize(("before", "after"), [(2, 3), (3, 2), (1, 2)])
def test_another_number_of_workers_goes_on_as_the_twin_in_numpy_does(
    world, tmp_path, before, after
):
    saved = world.run(save_at, workers=before, folder=str(tmp_path), clock=2 * H)
    got = world.run(go_on, workers=after, folder=str(tmp_path), clock=5 * H)
    twin = Twin()
    twin.rounds(before, 2)
    twin.rounds(after, 3)
    for worker, found in enumerate(got):
        np.testing.assert_allclose(found["anchor"], twin.anchor, rtol=1e-12, atol=1e-13)
        np.testing.assert_array_equal(found["weights"], found["anchor"])
        assert (found["first"], found["loaded"].workers, found["may_save"]) == (8, before, True)
        assert found["loaded"].source == (worker if worker < before else 0)
        assert found["loaded"].extra == {"at": 8}
        [line] = [each for each in found["said"] if "workers saved" in each]
        assert line.startswith(f"{before} workers saved step-8, {after} go on")
        assert ("with worker 0's inner state" in line) == (after > before)
        left, joined = list(range(after, before)), list(range(before, after))
        change = {"clock": 8, "left": left, "joined": joined, "workers": after}
        assert found["ledger"]["changes"] == [change]
        line = f"{after} since clock 8; {len(left)} left, {len(joined)} came"
        assert line in found["text"]
        assert found["ledger"]["syncs"] == 5  # of the run, not of this worker's part of it
        assert found["ledger"]["bytes_sent"] > saved[0]["bytes_sent"]


@pytest.mark.parametrize("clock", [2 * H, 2 * H + 3])
def test_the_same_number_of_workers_loads_elastically_what_it_loads_plainly(world, tmp_path, clock):
    rules = dict(method="PALSGD", mix_prob=0.3, compress="int8", sync_every=8)
    world.run(save_at, workers=2, folder=str(tmp_path), clock=clock, **rules)
    plain, elastic = (
        world.run(go_on, workers=2, folder=str(tmp_path), clock=40, elastic=elastic, **rules)
        for elastic in (False, True)
    )
    for one, other in zip(plain, elastic, strict=True):
        np.testing.assert_array_equal(one["weights"], other["weights"])
        np.testing.assert_array_equal(one["anchor"], other["anchor"])
        assert one["said"] == other["said"] == []
        assert other["ledger"]["changes"] == []


def test_without_elastic_another_number_of_workers_is_refused_with_the_way(world, tmp_path):
    world.run(save_at, workers=2, folder=str(tmp_path), clock=H)
    for workers in (1, 3):
        job = dict(folder=str(tmp_path), clock=2 * H, elastic=False)
        for got in world.outcomes(go_on, workers=workers, **job):
            assert got.error == "ValueError"
            assert f"saved by 2 workers, and {workers} load it" in got.message
            assert "elastic=True" in got.message


def save_twice(folder):
    model, opt = build()
    for clock in (H, H + 2):
        advance(model, opt, clock)
        palsgd.checkpoint.save(place(folder, 0, "one"), model, opt)


def test_a_save_within_a_round_is_passed_over_for_another_number_of_workers(world, tmp_path):
    world.run(save_twice, workers=2, folder=str(tmp_path))
    twin = Twin()
    twin.rounds(2, 1)
    twin.rounds(3, 1)
    for got in world.run(go_on, workers=3, folder=str(tmp_path), clock=2 * H):
        assert got["loaded"].older
        assert "step-6 was saved within a round" in got["loaded"].why
        np.testing.assert_allclose(got["anchor"], twin.anchor, rtol=1e-12, atol=1e-13)
    shutil.rmtree(tmp_path / "disk" / "step-4")
    for got in world.outcomes(go_on, workers=3, folder=str(tmp_path), clock=2 * H):
        assert got.error == "ValueError"
        assert "save where opt.synced is True" in got.message


@pytest.mark.parametrize("lost", [0, 1])
def test_a_worker_that_lost_its_disk_is_sent_the_state_and_joins(world, tmp_path, lost):
    world.run(save_at, workers=2, folder=str(tmp_path), clock=2 * H, disks="own")
    shutil.rmtree(tmp_path / f"disk-{lost}")
    twin = Twin()
    twin.rounds(2, 2)
    twin.inner[lost] = twin.inner[1 - lost].copy()
    twin.rounds(3, 2)  # and a third one comes
    job = dict(folder=str(tmp_path), clock=4 * H, disks="own")
    for worker, got in enumerate(world.run(go_on, workers=3, **job)):
        np.testing.assert_allclose(got["anchor"], twin.anchor, rtol=1e-12, atol=1e-13)
        joins = worker in (lost, 2)
        assert got["loaded"].source == (1 - lost if joins else worker)
        [line] = [each for each in got["said"] if "workers saved" in each]
        assert f"worker {lost}, 2 goes on from the global model" in line


@pytest.mark.parametrize(
    "rules",
    [
        dict(compress="int4", delay=2),
        dict(fragments=2),
        dict(method="SCAFFOLD", momentum=0.0),
        dict(method="EASGD"),
        dict(warmup_steps=100),
    ],
    ids=["int4 and delay", "fragments", "SCAFFOLD", "EASGD", "warm-up"],
)
@pytest.mark.parametrize(("before", "after"), [(2, 3), (3, 2)])
def test_whatever_a_run_keeps_goes_on_with_another_number_of_workers(
    world, tmp_path, before, after, rules
):
    rules = (dict(outer=None) if "method" in rules else {}) | rules
    clock = 2 * H + rules.get("delay", 0)
    world.run(save_at, workers=before, folder=str(tmp_path), clock=clock, **rules)
    got = world.run(go_on, workers=after, folder=str(tmp_path), clock=5 * H, **rules)
    for each in got[before:]:  # those that join
        np.testing.assert_array_equal(each["start"], each["global"])
    if rules.get("method") == "EASGD":  # whose local models stay apart
        assert not np.array_equal(got[0]["start"], got[0]["global"])
    ends = [each["anchor"] for each in got]
    assert all(np.isfinite(end).all() for end in ends)
    for end in ends[1:]:
        np.testing.assert_array_equal(end, ends[0])
    dropped = [line for each in got for line in each["said"] if "codecs had not sent" in line]
    assert bool(dropped) == ("compress" in rules)

"""Where the number of workers changes in the middle of an epoch, its examples are dealt out anew:
none is seen twice in it, and no more are left out than in any other epoch."""

import itertools
import random
from collections import Counter

import numpy as np
import pytest
import torch

from palsgd.lab.data.sharding import Shards
from palsgd.lab.worker_changes import Change, changes_in

EXAMPLES = 240
LABELS = torch.arange(EXAMPLES) % 10
SHARDINGS = ("reshuffled", "fixed", "dirichlet:0.3")
every_sharding = pytest.mark.parametrize("sharding", SHARDINGS)


def shards_of(sharding, seed=5):
    return Shards(sharding, EXAMPLES, seed=seed, labels=LABELS)


def taken_by(shards, workers, size, steps, changes=(), begins=None):
    """What each of the workers gets in so many steps each."""
    begins = begins or [0] * workers
    return [
        [
            shards.batch(
                worker=worker, workers=workers, size=size, index=begins[worker] + i, changes=changes
            ).tolist()
            for i in range(steps[worker])
        ]
        for worker in range(workers)
    ]


def change(before, after, taken, begins=None):
    """From (workers, size) to (workers, size)."""
    return Change(
        step=100, workers=(before[0], after[0]), batch_size=(before[1], after[1]),
        taken=tuple(taken), begins=tuple(begins or [taken[0]] * after[0]),
    )  # fmt: skip


def flat(batches):
    return [example for own in batches for batch in own for example in batch]


@every_sharding
@pytest.mark.parametrize(
    ("before", "after"),
    [((2, 8), (3, 8)), ((3, 8), (2, 8)), ((2, 8), (2, 4)), ((2, 12), (3, 8)), ((4, 5), (1, 5))],
)
def test_no_example_of_the_epoch_comes_twice_and_few_are_left_out(sharding, before, after):
    shards, (workers, size) = shards_of(sharding), before
    begun = 2  # full epochs, and the changes in the third
    batches = EXAMPLES // workers // size
    index = begun * batches + 4
    seen = taken_by(shards, workers, size, [4] * workers, begins=[begun * batches] * workers)
    changes = (change(before, after, [index] * workers),)
    left = [shards.batches_left(worker, *after, changes) for worker in range(after[0])]
    rest = taken_by(shards, *after, left, changes, [index] * after[0])
    counts = Counter(flat(seen) + flat(rest))
    assert max(counts.values()) == 1
    assert len(counts) > EXAMPLES - after[0] * after[1]
    # then whole epochs follow, each of them with every example at most once
    whole = EXAMPLES // after[0] // after[1]
    begins = [index + each for each in left]
    following = flat(taken_by(shards, *after, [whole] * after[0], changes, begins))
    assert max(Counter(following).values()) == 1
    assert len(following) == whole * after[0] * after[1]


@pytest.mark.parametrize("sharding", ["fixed", "dirichlet:0.3"])
def test_of_fixed_parts_a_worker_sees_its_new_one_alone(sharding):
    shards = shards_of(sharding)
    changes = (change((2, 8), (3, 8), [4, 4]),)
    for worker in range(3):
        own = set(shards.part(worker, 3).tolist())
        for i in range(25):
            batch = shards.batch(worker=worker, workers=3, size=8, index=4 + i, changes=changes)
            assert set(batch.tolist()) <= own


def test_reshuffled_examples_go_on_in_the_order_of_the_epoch():
    """By hand: the permutation of the epoch, from the first example that nobody has had."""
    shards = shards_of("reshuffled")
    order = np.array(flat(taken_by(shards, 1, 1, [EXAMPLES])))
    changes = (change((2, 8), (3, 8), [4, 4]),)
    rest = order[2 * 8 * 4 :]
    for i, worker in itertools.product(range(7), range(3)):
        found = shards.batch(worker=worker, workers=3, size=8, index=4 + i, changes=changes)
        place = (3 * i + worker) * 8
        assert found.tolist() == rest[place : place + 8].tolist()


@every_sharding
def test_workers_that_are_apart_leave_nothing_out_and_repeat_nothing(sharding):
    """With independent draws some have taken more batches than others, also of the next epoch."""
    shards, taken = shards_of(sharding), [13, 17]  # 15 are an epoch
    seen = Counter(flat(taken_by(shards, 2, 8, taken)))
    changes = (change((2, 8), (2, 8), taken, taken),)
    left = [shards.batches_left(worker, 2, 8, changes) for worker in range(2)]
    counts = seen + Counter(flat(taken_by(shards, 2, 8, left, changes, taken)))
    assert max(counts.values()) == 2  # two epochs are under way
    assert sum(counts.values()) > (2 if sharding == "reshuffled" else 1.5) * EXAMPLES - 2 * 8 - 1


@every_sharding
def test_several_changes_in_one_epoch_still_repeat_nothing(sharding):
    rng, shards = random.Random(0), shards_of(sharding)
    changes, seen, workers, size, begins = (), [], 2, 4, [0, 0]
    for after in ((3, 4), (1, 8), (4, 2), (2, 4)):
        steps = [rng.randrange(1, 5)] * workers
        seen += flat(taken_by(shards, workers, size, steps, changes, begins))
        taken = [begin + step for begin, step in zip(begins, steps, strict=True)]
        changes += (change((workers, size), after, taken),)
        (workers, size), begins = after, list(changes[-1].begins)
    left = [shards.batches_left(worker, workers, size, changes) for worker in range(workers)]
    seen += flat(taken_by(shards, workers, size, left, changes, begins))
    assert max(Counter(seen).values()) == 1
    assert len(seen) > EXAMPLES - 2 * 4 * workers


@every_sharding
def test_a_change_back_and_forth_without_a_step_changes_nothing_seen(sharding):
    shards = shards_of(sharding)
    there = change((2, 8), (3, 8), [4, 4])
    back = change((3, 8), (2, 8), [4, 4, 4])
    seen = flat(taken_by(shards, 2, 8, [4, 4]))
    left = [shards.batches_left(worker, 2, 8, (there, back)) for worker in range(2)]
    rest = flat(taken_by(shards, 2, 8, left, (there, back), [4, 4]))
    assert not set(seen) & set(rest)
    assert len(seen) + len(rest) > EXAMPLES - 2 * 8


@every_sharding
def test_batches_after_a_change_depend_on_nothing_that_was_asked_before(sharding):
    changes = (change((2, 8), (3, 8), [4, 4]),)
    used = shards_of(sharding)
    taken_by(used, 3, 8, [40] * 3, changes, [4] * 3)
    for index in (30, 4, 11):
        which = {"worker": 1, "workers": 3, "size": 8, "index": index, "changes": changes}
        assert used.batch(**which).tolist() == shards_of(sharding).batch(**which).tolist()


def test_a_change_is_read_back_as_it_was_recorded():
    one = change((2, 8), (3, 8), [4, 4])
    assert changes_in({"changes": [one.as_dict()]}) == (one,)
    assert changes_in({}) == ()

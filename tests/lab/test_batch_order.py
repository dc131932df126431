"""Which batch a gradient step reads, where mixing steps use batches up and where they do not."""

import pytest
import torch

import palsgd
from palsgd.lab import workloads
from palsgd.lab.batch_order import BatchOrder
from palsgd.lab.joint_batches import JointBatches
from palsgd.lab.settings import Settings

H, WARMUP, STEPS = 5, 3, 43


def settings(**changes):
    given = dict(
        workload="digits",
        workers=2,
        steps=STEPS,
        sync_every=H,
        warmup_steps=WARMUP,
        mix_prob=0.4,
        pull=0.5,
        batch_size=4,
        draws="shared",
        discard_batches=True,
        seed=7,
    )
    return Settings(**{**given, **changes})  # fmt: skip


def gradient_clocks(own):
    """Step by step: the clocks at which a gradient is taken."""
    found = list(range(WARMUP))
    for round in range((STEPS - WARMUP) // H):
        plan = palsgd.round_plan(seed=own.seed, worker=1, round=round, sync_every=H,
                                 mix_prob=own.mix_prob, draws=own.draws)  # fmt: skip
        found += [WARMUP + H * round + place for place in range(H) if not plan[place]]
    return found


def test_a_discarded_batch_is_that_of_a_mixing_step():
    order, clocks = BatchOrder(settings()), gradient_clocks(settings())
    assert [order(number) for number in range(len(clocks))] == clocks
    assert order(len(clocks) - 1) == clocks[-1]  # asked for again, in any order
    assert len(clocks) < STEPS - 5


@pytest.mark.parametrize("changes", [{"discard_batches": False}, {"method": "diloco"}])
def test_without_discarding_or_mixing_batches_come_one_after_another(changes):
    order = BatchOrder(settings(**changes))
    assert [order(number) for number in range(50)] == list(range(50))


def test_simulated_workers_read_the_batches_of_their_clocks():
    own, workload = settings(), workloads.load("digits", seed=7)
    worker = JointBatches(own, workload)(1)
    for clock in gradient_clocks(own)[:12]:
        wanted = workload.batch(worker=1, workers=2, size=4, index=clock)
        torch.testing.assert_close(next(worker), wanted, rtol=0, atol=0)

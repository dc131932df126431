"""The arithmetic of bench/prices.py, by hand."""

import math
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent.parent.parent / "bench"))
import prices


def row(method="ddp", seed=1, loss=1.0, **fields):
    case = prices.Case(**{"method": method, "steps": 400, **fields})
    return {**prices.asdict(case), "seed": seed, "loss": loss}


CURVE = [(100, 4.0), (200, 3.0), (400, 2.0)]


@pytest.mark.parametrize(
    ("loss", "steps"),
    [
        (4.0, 100),
        (3.0, 200),
        (2.5, 200 * math.sqrt(2)),  # half of the way, by the logarithm
        (1.0, 400),  # below all: as the longest, in DDP's favour
        (4.1, None),  # above all: more than can be said
    ],
)
def test_ddps_steps_to_a_loss_lie_between_its_lengths(loss, steps):
    assert prices.steps_to(CURVE, loss) == (steps if steps is None else pytest.approx(steps))


def test_a_price_is_the_mean_over_paired_seeds_with_its_t_interval():
    rows = [row(seed=s, steps=n, loss=v + s) for s in (1, 2) for n, v in CURVE]
    rows += [row("diloco", 1, 3.0 + 1, sync_every=8), row("diloco", 2, 2.5 + 2, sync_every=8)]
    (found,) = [each for each in prices.prices(rows) if each["method"] == "diloco"]
    extra = [400 / 200 - 1, 400 / (200 * math.sqrt(2)) - 1]
    mean, half = sum(extra) / 2, 12.706 * abs(extra[0] - extra[1]) / 2
    assert found["extra_steps"] == pytest.approx(
        {"mean": mean, "low": mean - half, "high": mean + half}
    )
    ratios = [4.0 / 3.0 - 1, 4.5 / 4.0 - 1]
    assert found["loss_over_ddp"]["mean"] == pytest.approx(sum(ratios) / 2)


def test_a_seed_that_failed_or_ended_above_ddps_shortest_run_leaves_a_lower_bound():
    rows = [row(seed=s, steps=n, loss=v) for s in (1, 2) for n, v in CURVE]
    for loss in (5.0, None):
        worse = [row("diloco", 1, 3.0, sync_every=8), row("diloco", 2, loss, sync_every=8)]
        (found,) = [e for e in prices.prices(rows + worse) if e["method"] == "diloco"]
        assert found["extra_steps"] is None
        assert found["at_least"] == 3.0


def test_a_longer_run_of_ddp_that_ends_higher_by_chance_counts_as_no_worse():
    rows = [row(steps=n, loss=v) for n, v in [(100, 3.0), (200, 3.5), (400, 2.0)]]
    assert prices.ddp_curves(rows) == {1: [(100, 3.0), (200, 3.0), (400, 2.0)]}


def test_rates_are_chosen_by_the_least_mean_loss_of_each_method():
    trials = [
        row("diloco", s, loss, lr=lr, outer_lr=0.4)
        for lr, losses in ((1e-3, (1.0, 3.0)), (2e-3, (1.5, 1.6)), (4e-3, (0.5, None)))
        for s, loss in enumerate(losses)
    ]
    assert prices.chosen(trials) == {("diloco", 1): {"lr": 2e-3, "outer_lr": 0.4}}


def test_gradients_through_rounded_weights_are_rounded_to_bf16_and_values_are_not():
    torch = prices.torch
    torch.manual_seed(0)
    plain = torch.nn.Linear(7, 3)
    rounded = prices.RoundedGradients(plain)
    x = torch.randn(5, 7)
    exact = torch.autograd.grad(plain(x).square().sum(), plain.weight)[0]
    found = torch.autograd.grad(rounded(x).square().sum(), plain.weight)[0]
    assert torch.equal(rounded(x), plain(x))
    assert torch.equal(found, exact.to(torch.bfloat16).float())
    assert not torch.equal(found, exact)

"""The table of prices: exact between measured points, and silent outside of them."""

import pytest

from palsgd.lab.plan.prices import FREE, PriceTable, committed
from support.price_records import entry, extra_by_formula, price_record

TABLE = PriceTable(price_record())


@pytest.mark.parametrize("H", [16, 24, 64, 100, 128])
@pytest.mark.parametrize("share", [0.0, 0.125, 0.3, 0.75])
@pytest.mark.parametrize("compress", [None, "int8"])
def test_between_measured_points_a_price_is_interpolated(H, share, compress):
    delay = round(share * H)
    found = TABLE.local("diloco", sync_every=H, steps=5000, delay=delay, compress=compress)
    if delay / H > 0.75:
        assert not found.measured
        return
    assert found.extra == pytest.approx(extra_by_formula(H, delay / H, compress))
    assert found.high - found.low == pytest.approx(0.02)


@pytest.mark.parametrize(
    ("asked", "why_not"),
    [
        ({"sync_every": 8}, "H = 8 is outside of what was run"),
        ({"sync_every": 256}, "H = 256 is outside of what was run"),
        ({"sync_every": 64, "delay": 60}, "a delay of 94% of a round is outside"),
        ({"sync_every": 64, "compress": "topk:0.03"}, "diloco with topk:0.03 was not run"),
        ({"sync_every": 64, "compress": "int4", "delay": 8}, "12% of a round is outside"),
        ({"sync_every": 64, "mix_prob": 0.25}, "p = 0.25 was not run"),
        ({"sync_every": 16, "steps": 479}, "runs of 479 steps are outside"),
        ({"sync_every": 16, "steps": 960, "compress": "int8"}, "codes and delays were run with"),
    ],
)
def test_outside_of_what_was_measured_a_price_is_not_measured(asked, why_not):
    found = TABLE.local("diloco", **{"steps": 5000, **asked})
    assert found.extra is None
    assert why_not in found.why_not


def test_methods_that_were_not_run_have_no_price():
    assert not TABLE.local("slowmo", sync_every=64, steps=5000).measured


def test_a_price_that_grew_with_the_length_of_the_run_is_not_carried_on():
    growing = PriceTable(price_record(longer=0.1))
    assert not growing.local("diloco", sync_every=64, steps=5000).measured
    within = growing.local("diloco", sync_every=64, steps=960)  # in the middle, by the logarithm
    assert within.extra == pytest.approx(extra_by_formula(64, 0.0, None) - 0.05)


def test_a_point_whose_price_has_only_a_lower_bound_gives_none():
    record = price_record()
    record["prices"].append(entry("easgd", 480, 0.1, sync_every=16))
    record["prices"].append(entry("easgd", 1920, None, sync_every=16))
    found = PriceTable(record).local("easgd", sync_every=16, steps=1920)
    assert found.extra is None
    assert "more than 300%" in found.why_not


def test_ddp_costs_nothing_beyond_itself_and_its_variants_what_was_measured():
    assert TABLE.ddp(steps=5000) == FREE
    assert TABLE.ddp(steps=5000, gradients="bf16").extra == pytest.approx(0.001)
    assert TABLE.ddp(steps=5000, gradients="bf16", accumulate=8).extra == pytest.approx(
        1.0
    )  # of 0.4 and 1.6
    assert not TABLE.ddp(steps=5000, gradients="bf16", accumulate=128).measured
    assert not TABLE.ddp(steps=500, gradients="bf16").measured


def test_a_tiny_record_has_no_prices_but_that_of_ddp():
    tiny = PriceTable(price_record(tiny=True))
    assert tiny.ddp(steps=5000) == FREE
    assert not tiny.ddp(steps=5000, gradients="bf16").measured
    assert "tiny" in tiny.local("diloco", sync_every=64, steps=5000).why_not


def test_the_committed_record_says_of_which_code_and_command_it_is():
    record = committed().record
    assert {"commit", "command", "machine", "conditions", "prices"} <= record.keys()
    assert record["command"].startswith("python bench/prices.py")
    for each in record["prices"]:
        assert len(each["seeds"]) == len(each["losses"]) > 1

"""Examples of a method, a codec and a workload of one's own."""

import re
import runpy
import sys

import pytest
import torch

import palsgd
from support.commands import palsgd as command
from support.commands import summary
from support.core_access import fields_of
from support.places import ROOT


def example(name):
    return runpy.run_path(str(ROOT / "examples" / name))


@pytest.fixture
def said(monkeypatch, capsys):
    """What an example prints, in lines, when it is started with these words."""

    def started(found, *words):
        monkeypatch.setattr(sys, "argv", ["example", *map(str, words)])
        found["main"]()
        return capsys.readouterr().out.splitlines()

    return started


# -- custom_method.py ------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def own_method():
    return example("custom_method.py")


def test_the_example_of_an_own_method_trains(own_method, said):
    losses, agreement = said(own_method, "--steps", 200)
    first, last = map(float, re.fullmatch(r"loss (\d\.\d+) -> (0\.\d+)", losses).groups())
    assert last < 0.5 * first
    assert re.fullmatch(r"agreement in the last round: 0\.\d+", agreement)


def test_the_agreement_is_1_for_workers_with_equal_data_and_less_otherwise(own_method):
    def agreement(data):
        result = palsgd.simulate(
            workers=3, steps=20, model=lambda: torch.nn.Linear(8, 1), loss=own_method["loss"],
            data=data, method=own_method["optimizer"], vectorize=False,
        )  # fmt: skip
        kept = [fields_of(opt)["method"]["global scalars"] for opt in result.optimizers]
        assert kept[0] == kept[1] == kept[2]
        return kept[0]["agreement"]

    def nearly_equal(worker):  # equal gradients would be refused
        return [(x + 1e-6 * worker, y) for x, y in own_method["shard"](0)]

    assert agreement(nearly_equal) == pytest.approx(1.0, abs=1e-5)
    assert 1 / 3 - 1e-6 < agreement(own_method["shard"]) < 0.999


# -- custom_codec.py -------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def own_codec():
    return example("custom_codec.py")


def test_the_example_of_an_own_codec_sends_a_tenth_and_learns_the_same(own_codec, said):
    pattern = r"(\w+) +loss (\d\.\d+), (\d+) kB sent"
    rows = [re.fullmatch(pattern, line).groups() for line in said(own_codec, "--steps", 160)]
    losses, sent = ({name: float(row[at]) for name, *row in rows} for at in (0, 1))
    assert list(losses) == ["float32", "int8", "ternary"]
    assert sent["ternary"] < 0.1 * sent["float32"]
    assert max(losses.values()) < 1.0  # of 2.3, which guessing has
    assert losses["ternary"] == pytest.approx(losses["float32"], abs=0.2)


def test_the_codec_of_the_example_keeps_signs_and_sizes(own_codec):
    blocks = torch.randn(3, 256, generator=torch.Generator().manual_seed(0))
    codec = own_codec["Ternary"]()
    codes = codec.encode(blocks)
    assert codes.shape == (3, codec.width) == (3, 68)
    decoded = codec.decode(codes)
    assert all(len(row.unique()) == 3 for row in decoded)
    large = blocks.abs() > 1
    assert torch.equal(decoded[large].sign(), blocks[large].sign())
    assert (decoded - blocks).square().mean() < 0.3 * blocks.square().mean()
    assert torch.equal(codec.decode(codec.encode(torch.zeros(1, 256))), torch.zeros(1, 256))


# -- custom_workload.py ----------------------------------------------------------------------------


@pytest.mark.slow
def test_palsgd_compare_takes_the_example_of_an_own_workload(tmp_path):
    done = command(
        "compare", ROOT / "examples" / "custom_workload.py", "--methods", "ddp,diloco,palsgd",
        "--simulate", "--steps", 160, "--no-report", "--out", tmp_path / "out",
    )  # fmt: skip
    assert done.code == 0, done.err
    found = summary(tmp_path / "out")
    for method in ("ddp", "diloco", "palsgd"):
        assert found[method]["final_metric"] > 0.6  # guessing has a quarter
    assert found["palsgd"]["bytes_sent"] < 0.1 * found["ddp"]["bytes_sent"]

"""Methods that are not of the library: the example, and the one that CONTRIBUTING.md shows."""

import re
import runpy

import pytest
import torch

import palsgd
from support.core_access import fields_of, method_states
from support.pages import code_blocks, executed, section
from support.places import ROOT
from support.problems import batches, linear, mse, train, vector


def worked_example():
    """What the code of CONTRIBUTING.md leaves behind."""
    return executed("CONTRIBUTING.md", *code_blocks(section("CONTRIBUTING.md", "Add a method")))


def test_the_method_of_the_contributing_page_runs_and_does_what_it_says():
    found = worked_example()
    model, opt, data = found["model"], found["opt"], batches(0, torch.float32)
    trend, used = torch.zeros(15), []
    opt.inner.register_step_pre_hook(
        lambda *_: used.append(torch.cat([p.grad.reshape(-1) for p in model.parameters()]))
    )
    raw = []
    for batch in palsgd.until(data, opt, steps=8):
        mse(model, batch).backward()
        raw.append(torch.cat([p.grad.reshape(-1) for p in model.parameters()]))
        opt.step()
        opt.zero_grad()
    for gradient, step in zip(raw, used, strict=True):
        trend = (trend + gradient) / 2
        torch.testing.assert_close(step, gradient + 0.2 * trend)
    torch.testing.assert_close(method_states(opt)["trend"], trend / 2)


def test_the_state_of_the_contributing_pages_method_is_saved():
    found = worked_example()
    train(found["model"], found["opt"], batches(0, torch.float32), 6)
    state, kept = found["opt"].state_dict(), method_states(found["opt"])["trend"].clone()
    again = worked_example()
    again["opt"].load_state_dict(state)
    assert kept.abs().max() > 0
    torch.testing.assert_close(method_states(again["opt"])["trend"], kept, rtol=0, atol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_method_of_the_contributing_page_does_the_same_for_stacked_workers(dtype):
    method = worked_example()["Persistence"](weight=0.2)
    exact, stacked = (
        palsgd.simulate(
            workers=2, steps=20, model=lambda: linear(dtype), loss=mse, vectorize=vectorize,
            data=lambda worker: batches(worker, dtype),
            method=lambda model: palsgd.LocalOptimizer(
                model, torch.optim.SGD(model.parameters(), lr=0.05), method=method, sync_every=4
            ),
        )
        for vectorize in (False, True)
    )  # fmt: skip
    torch.testing.assert_close(vector(stacked.model), vector(exact.model), rtol=1e-5, atol=1e-6)


@pytest.fixture(scope="module")
def example():
    return runpy.run_path(str(ROOT / "examples" / "custom_method.py"))


def test_the_example_of_an_own_method_trains(example, capsys):
    result = example["main"]()
    first, second = capsys.readouterr().out.splitlines()
    assert re.fullmatch(r"loss \d\.\d+ -> 0\.\d+", first)
    assert re.fullmatch(r"agreement in the last round: 0\.\d+", second)
    assert result.history[-1]["loss"] < 0.5 * result.history[0]["loss"]


def test_the_examples_agreement_is_1_for_workers_with_equal_data_and_less_otherwise(example):
    def agreement(data):
        result = palsgd.simulate(
            workers=3, steps=20, model=lambda: torch.nn.Linear(8, 1), loss=example["loss"],
            data=data, method=example["optimizer"], vectorize=False,
        )  # fmt: skip
        kept = [fields_of(opt)["method"]["global scalars"] for opt in result.optimizers]
        assert kept[0] == kept[1] == kept[2]
        return kept[0]["agreement"]

    def nearly_equal(worker):  # equal gradients would be refused
        return [(x + 1e-6 * worker, y) for x, y in example["shard"](0)]

    assert agreement(nearly_equal) == pytest.approx(1.0, abs=1e-5)
    assert 1 / 3 - 1e-6 < agreement(example["shard"]) < 0.999

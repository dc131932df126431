"""A method that is not of the library: the one that CONTRIBUTING.md shows."""

import pytest
import torch

import palsgd
from support.core_access import method_states
from support.pages import code_blocks, executed, section
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

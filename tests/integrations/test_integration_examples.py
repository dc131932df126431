"""What help() and the examples of the integrations say runs as it stands."""

import doctest
import re
from importlib import import_module

import pytest
import torch

from support.commands import apart
from support.launched import launched
from support.pages import code_blocks, executed, page
from support.places import ROOT

pytestmark = pytest.mark.slow
FRAMEWORKS = {"huggingface": "transformers", "accelerate": "accelerate"}


@pytest.mark.parametrize("name", FRAMEWORKS)
def test_the_example_of_an_integration_runs_as_printed(name):
    pytest.importorskip("accelerate")
    pytest.importorskip(FRAMEWORKS[name])
    found = doctest.testmod(import_module(f"palsgd.integrations.{name}"))
    assert found.attempted > 5
    assert found.failed == 0


@pytest.mark.parametrize(
    ("script", "said"),
    [
        ("with_trainer", r"loss ([012]\.\d+), 12 syncs, \d+ bytes sent per step"),
        ("with_accelerate", r"accuracy 0\.9\d+, 19 syncs, \d+ bytes sent per step"),
    ],
)
def test_an_example_trains_in_two_processes_and_ends_again_from_its_checkpoint(
    tmp_path, script, said
):
    pytest.importorskip("accelerate")
    pytest.importorskip("transformers")
    for _ in range(2):
        found = apart(
            "--standalone", "--nproc-per-node", 2, ROOT / "examples" / f"{script}.py", tmp_path,
            module="torch.distributed.run",
        )  # fmt: skip
        assert found.code == 0, found.err
        assert re.search(said, found.out), found.out


class Regression(torch.nn.Linear):
    def forward(self, x, labels):
        return {"loss": (super().forward(x) - labels).square().mean()}


def trained_by_the_page(folder):
    found = executed("docs/integrations.md", *code_blocks(page("docs/integrations.md")))
    rows = torch.randn(64, 4, generator=torch.Generator().manual_seed(1))
    data = [{"x": row[:3], "labels": row[3:]} for row in rows]
    ends = []
    with launched():
        quiet = dict(use_cpu=True, report_to="none", disable_tqdm=True, save_strategy="no")
        _, opt = found["train"](
            lambda: Regression(3, 1), data, data, folder, max_steps=32, **quiet
        )  # fmt: skip
        ends.append((opt.clock, opt.synced))
    with launched():
        torch.manual_seed(0)
        loader = torch.utils.data.DataLoader(rows, batch_size=2)
        _, opt = found["train_with_accelerate"](
            found["Accelerator"](cpu=True), torch.nn.Linear(4, 4), loader,
            lambda model, batch: (model(batch) - batch).square().mean(), 32,
        )  # fmt: skip
        ends.append((opt.optimizer.clock, opt.optimizer.synced))
    return ends


def test_the_functions_of_the_page_train(world, tmp_path):
    pytest.importorskip("accelerate")
    pytest.importorskip("transformers")
    got = world.run(trained_by_the_page, workers=2, folder=str(tmp_path))
    assert got == [[(32, True), (32, True)]] * 2

"""What help() and the examples of the integrations say runs as it stands."""

import doctest
import re
import shutil
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


def said_by(script, folder):
    """The last line of an example, in two processes."""
    found = apart(
        "--standalone", "--nproc-per-node", 2, ROOT / "examples" / f"{script}.py", folder,
        module="torch.distributed.run",
    )  # fmt: skip
    assert found.code == 0, found.err
    return found.out.splitlines()[-1]


def lose_the_last(folder, pattern):
    """As if the run had been killed before its last checkpoint."""
    found = sorted(folder.glob(pattern), key=lambda path: int(path.name.split("-")[1]))
    assert len(found) > 1
    shutil.rmtree(found[-1])


def test_the_example_with_trainer_goes_on_from_its_checkpoint_to_the_same_end(tmp_path):
    pytest.importorskip("accelerate")
    pytest.importorskip("transformers")
    first = said_by("with_trainer", tmp_path)
    assert re.fullmatch(r"loss [0-3]\.\d+, 12 syncs, \d+ bytes sent per step", first)
    lose_the_last(tmp_path, "checkpoint-*")
    assert said_by("with_trainer", tmp_path) == first


def test_the_example_with_accelerate_goes_on_from_its_checkpoint(tmp_path):
    pytest.importorskip("accelerate")
    wanted = r"accuracy 0\.9\d+, 19 syncs, [1-9]\d* bytes sent per step"
    assert re.fullmatch(wanted, said_by("with_accelerate", tmp_path))
    lose_the_last(tmp_path, "clock-*")
    assert re.fullmatch(wanted, said_by("with_accelerate", tmp_path))


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

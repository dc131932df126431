"""Libraries that may be missing: what works without them, and the line where one is needed."""

import sys
from contextlib import contextmanager

import pytest

from palsgd.lab.extras import BROUGHT
from palsgd.lab.order import Failure
from support.commands import palsgd
from support.runs import write_run

PLAN = ("plan", "--rate", "100mbit", "--workers", 4, "--step-ms", 50)


@contextmanager
def without(*names):
    """Inside, these libraries cannot be imported, nor what torch has made of them before."""
    made = {f"torch.utils.{name}" for name in names}
    loaded = {
        each: module
        for each, module in sys.modules.items()
        if each.partition(".")[0] in names or any(f"{each}.".startswith(f"{m}.") for m in made)
    }
    for each in loaded:
        del sys.modules[each]
    sys.modules |= dict.fromkeys(names)
    try:
        yield
    finally:
        for name in names:
            del sys.modules[name]
        sys.modules |= loaded


def test_a_plan_needs_neither_torchvision_nor_what_only_tests_and_trackers_use(tmp_path):
    with without("torchvision", "sklearn", "tensorboard", "transformers"):
        said = palsgd(*PLAN, "imagenet-resnet50", "--parameters", "25M", "--out", tmp_path)
    assert said.code == 0, said.err
    assert (tmp_path / "plan.json").exists()


def test_a_plan_that_builds_a_model_of_torchvision_says_which_extra_brings_it(tmp_path):
    with without("torchvision"):
        said = palsgd(*PLAN, "cifar10-vgg16", "--out", tmp_path)
    assert said.code == 1
    assert said.line.endswith("; it comes with: pip install 'palsgd[lab,vision]'")


def test_a_report_without_tensorboard_is_refused_before_anything_is_written(tmp_path):
    run = write_run(tmp_path / "run")
    before = sorted(tmp_path.rglob("*"))
    with without("tensorboard"):
        said = palsgd("report", run, "--tensorboard", tmp_path / "events")
    assert said.code == 1
    assert said.line.endswith("; it comes with: pip install 'palsgd[lab,tensorboard]'")
    assert sorted(tmp_path.rglob("*")) == before


def test_a_worker_that_misses_a_library_is_told_of_in_the_same_line():
    failure = Failure.of(ModuleNotFoundError("No module named 'PIL'", name="PIL"))
    assert failure.expected
    assert failure.message.endswith("pip install 'palsgd[lab,vision]'")


def test_a_library_that_only_a_users_own_workload_needs_is_not_said_to_be_ours():
    failure = Failure.of(ModuleNotFoundError("No module named 'mine'", name="mine"))
    assert failure.message == "No module named 'mine'; install it"


@pytest.mark.parametrize("extra", BROUGHT)
def test_no_library_is_brought_by_two_extras(extra):
    others = [name for each, names in BROUGHT.items() if each != extra for name in names]
    assert not set(BROUGHT[extra]) & set(others)

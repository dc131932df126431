"""What help() says: examples run, and every parameter of what is public is explained."""

import doctest
import inspect
import re
from operator import attrgetter

import pytest
import torch

import palsgd
from palsgd import methods

ERRORS = ("ConsensusError", "NonFiniteError", "SyncError")  # raised by palsgd, not made by users
PUBLIC = sorted(set(palsgd.__all__) - set(ERRORS))
EXPLAINED = [name for name in PUBLIC if not inspect.ismodule(getattr(palsgd, name))]


CHECKPOINT = [f"checkpoint.{name}" for name in ("find", "load", "save", "save_model")]
LAB = [pytest.param(f"lab.{name}", marks=pytest.mark.slow) for name in ("compare", "sweep", "tune")]


def public_named(name: str):
    return attrgetter(name)(palsgd)


def examples(name: str) -> list[doctest.DocTest]:
    finder = doctest.DocTestFinder(recurse=False)
    return [found for found in finder.find(public_named(name), name) if found.examples]


def with_examples() -> list:
    return [*EXPLAINED, *CHECKPOINT, "cluster.Work", "events", *LAB]


@pytest.mark.parametrize("name", with_examples())
def test_the_example_of_a_docstring_runs_as_printed(name):
    found = examples(name)
    assert found, f"palsgd.{name} has no example"
    for each in found:
        each.globs = {}
        said: list[str] = []
        runner = doctest.DocTestRunner(verbose=False)
        runner.run(each, out=said.append)
        assert runner.summarize(verbose=False).failed == 0, "".join(said)


def explained(doc: str) -> set[str]:
    """The words of a docstring."""
    return set(re.findall(r"\w+", doc))


@pytest.mark.parametrize("name", [*EXPLAINED, *CHECKPOINT, "cluster.Work", *LAB])
def test_every_parameter_of_a_public_name_is_in_its_docstring(name):
    public = public_named(name)
    doc = inspect.getdoc(public)
    assert doc, f"palsgd.{name} has no docstring"
    text = doc.split("Example:")[0] + doc.partition("Options of every optimizer:")[2]
    missing = set(inspect.signature(public).parameters) - explained(text)
    assert not missing, f"palsgd.{name} does not explain {sorted(missing)}"


@pytest.mark.parametrize("name", ["DDP", "DiLoCo", "LocalOptimizer", "LocalSGD", "PALSGD"])
def test_an_optimizers_signature_has_its_options_by_name(name):
    found = inspect.signature(getattr(palsgd, name)).parameters
    assert {"compress", "max_norm", "on_nonfinite", "transport"} <= set(found)
    assert not any(p.kind is p.VAR_KEYWORD for p in found.values())


def test_a_signature_has_no_argument_that_is_refused():
    assert not {"outer", "sync_every", "warmup_steps"} & set(
        inspect.signature(palsgd.DDP).parameters
    )
    assert "outer" not in inspect.signature(palsgd.LocalSGD).parameters
    assert "outer" not in inspect.signature(methods.SCAFFOLD).parameters


@pytest.mark.parametrize("title", dir(methods))
def test_a_function_of_the_family_has_its_settings_and_options_in_its_signature(title):
    found = inspect.signature(getattr(methods, title)).parameters
    row = next(row for row in palsgd.registry.rows() if row.title == title)
    assert {"model", "inner", *row.settings(), "compress", "max_norm"} <= set(found)
    assert not any(p.kind is p.VAR_KEYWORD for p in found.values())


def defaults(public):
    return {n: p.default for n, p in inspect.signature(public).parameters.items()}


def test_an_optimizer_needs_no_more_than_a_model_and_an_inner_optimizer():
    for kind in (palsgd.PALSGD, palsgd.DiLoCo, palsgd.LocalSGD):
        assert defaults(kind)["sync_every"] == 64
    assert defaults(palsgd.PALSGD)["mix_prob"] == 0.1
    model = torch.nn.Linear(2, 1)
    inner = torch.optim.SGD(model.parameters(), lr=0.1)
    for kind in (palsgd.PALSGD, palsgd.DiLoCo, palsgd.LocalSGD, palsgd.DDP):
        kind(model, inner, transport=palsgd.Alone())
    opt = palsgd.PALSGD(model, inner, transport=palsgd.Alone())
    assert (opt.config["pull"], opt.config["mix_rate"]) == (0.5, None)
    group = opt.outer.param_groups[0]
    assert (group["lr"], group["momentum"], group["nesterov"]) == (0.7, 0.5, True)


def test_nesterov_without_momentum_is_plain_sgd():
    ends = []
    for make in (palsgd.nesterov(lr=0.3, momentum=0), lambda ps: torch.optim.SGD(ps, lr=0.3)):
        param = torch.nn.Parameter(torch.ones(3))
        outer = make([param])
        for step in range(3):
            param.grad = torch.full((3,), 0.1 * step)
            outer.step()
        ends.append(param.detach())
    assert torch.equal(*ends)


@pytest.mark.parametrize("title", dir(methods))
def test_a_function_of_the_family_explains_its_settings_and_options(title):
    doc = getattr(methods, title).__doc__
    row = next(row for row in palsgd.registry.rows() if row.title == title)
    assert {*row.settings(), "compress", "transport"} <= explained(doc)


@pytest.mark.parametrize("name", ERRORS)
def test_an_error_says_what_went_wrong(name):
    assert vars(getattr(palsgd, name)).get("__doc__")

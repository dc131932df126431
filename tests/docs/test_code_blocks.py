"""The code of the pages: Python runs from top to bottom, and commands exist as they are written."""

import re
import tomllib
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import typer
from torch.distributed.run import get_args_parser

import palsgd
from palsgd.lab.cli import app
from support.pages import blocks, code_blocks, commands, executed, other_packages, pages
from support.places import ROOT

COMMANDS = typer.main.get_command(app)


def name_of(path: Path) -> str:
    return str(path.relative_to(ROOT))


# Code of the contributing page is run by test_contributing.py, section by section.
PYTHON = {
    name: code
    for name, path in ((name_of(path), path) for path in pages())
    if name != "CONTRIBUTING.md" and (code := code_blocks(path.read_text()))
}
WITH_FRAMEWORKS = [name for name, code in PYTHON.items() if other_packages("\n".join(code))]
every_page = pytest.mark.parametrize("path", pages(), ids=name_of)


# -- Python ----------------------------------------------------------------------------------------


def readers_own() -> dict:
    """The names that stand for what a reader has already."""
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 1)
    inner = torch.optim.SGD(model.parameters(), lr=0.1)
    return {
        "torch": torch,
        "palsgd": palsgd,
        "model": model,
        "inner": inner,
        "opt": palsgd.PALSGD(model, inner, transport=palsgd.Alone()),
        "loader": [torch.ones(2, 4), torch.zeros(2, 4)],
        "loss_fn": lambda model, batch: (model(batch) - 1).square().mean(),
        "evaluate": lambda model: model(torch.ones(1, 4)).item(),
        "listener": lambda event: None,
    }


@pytest.fixture
def as_torchrun_starts_it(tmp_path, monkeypatch):
    """This process as the only worker of torchrun, in an empty folder."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    given = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": store.port, "RANK": 0, "WORLD_SIZE": 1}
    given |= {"LOCAL_RANK": 0, "LOCAL_WORLD_SIZE": 1, "TORCHELASTIC_USE_AGENT_STORE": "True"}
    for name, value in given.items():
        monkeypatch.setenv(name, str(value))
    monkeypatch.chdir(tmp_path)
    yield
    if dist.is_initialized():
        dist.destroy_process_group()


@pytest.mark.parametrize("name", sorted(set(PYTHON) - set(WITH_FRAMEWORKS)))
def test_the_python_code_of_a_page_runs_from_top_to_bottom(name, as_torchrun_starts_it):
    code = PYTHON[name]
    if "init_process_group(" not in "\n".join(code):
        dist.init_process_group("gloo")
    executed(name, *code, **readers_own())


@pytest.mark.parametrize("name", WITH_FRAMEWORKS)
def test_code_that_needs_a_framework_is_run_by_the_tests_with_frameworks(name):
    tests = (ROOT / "tests" / "integrations").glob("test_*.py")
    assert any(f'"{name}"' in test.read_text() for test in tests)


@every_page
def test_a_block_that_is_not_run_has_a_reason_that_says_something(path):
    reasons = [each.not_run for each in blocks(path.read_text(), "python") if each.not_run]
    assert all(len(reason.split()) > 2 for reason in reasons), reasons


# -- commands --------------------------------------------------------------------------------------


def check_palsgd(words: list[str]) -> None:
    """Parse the words as the command line does. `...` stands for more of them."""
    command, rest = COMMANDS, list(words)
    while hasattr(command, "commands") and rest and not rest[0].startswith("-"):
        assert rest[0] in command.commands, f"there is no command {rest[0]}"
        command = command.commands[rest.pop(0)]
    if "..." in words or hasattr(command, "commands"):
        check_options(rest, {name for param in command.params for name in param.opts})
    elif "--help" not in rest:
        command.make_context("palsgd", rest)


def check_options(words: list[str], known: set[str]) -> None:
    named = {word.partition("=")[0] for word in words if word.startswith("--")}
    assert named <= {*known, "--help"}, f"there is no {', '.join(named - known)}"


def check_torchrun(words: list[str]) -> None:
    parser = get_args_parser()
    if "..." in words:
        launcher, _, program = " ".join(words).partition(" -m palsgd ")
        check_options(launcher.split(), set(parser._option_string_actions))
        check_palsgd(program.split())
        return
    try:
        found = parser.parse_args(words)
    except SystemExit:
        raise AssertionError(f"torchrun refuses {' '.join(words)}") from None
    rest = found.training_script_args
    check_python(["-m", found.training_script, *rest] if found.module else [found.training_script])


def check_python(words: list[str]) -> None:
    """A module of palsgd has its command line. A script of the repository exists."""
    if words[:2] == ["-m", "palsgd"]:
        check_palsgd(words[2:])
    elif words and "/" in words[0] and (ROOT / words[0].partition("/")[0]).is_dir():
        assert (ROOT / words[0]).is_file(), f"there is no {words[0]}"


def check_pip(words: list[str]) -> None:
    """The extras of palsgd that are installed are there."""
    package = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    wanted = re.findall(r"(?:palsgd|\.)\[([\w,-]+)\]", " ".join(words))
    asked = {extra for each in wanted for extra in each.split(",")}
    assert asked <= set(package["optional-dependencies"]), f"extras {asked}"


def check_make(words: list[str]) -> None:
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), flags=re.MULTILINE))
    assert {word for word in words if "=" not in word} <= targets


CHECKS = {
    "make": check_make,
    "palsgd": check_palsgd,
    "pip": check_pip,
    "python": check_python,
    "torchrun": check_torchrun,
}


@every_page
def test_commands_of_a_page_are_accepted_by_the_programs_that_they_name(path):
    for line, words in commands(path.read_text()):
        if words and words[0] in CHECKS:
            try:
                CHECKS[words[0]](words[1:])
            except Exception as error:
                pytest.fail(f"{name_of(path)}:{line}: {' '.join(words)}: {error}")


@every_page
def test_commands_inside_sentences_have_options_that_exist(path):
    text = re.sub(r"\s+", " ", re.sub(r"^```.*?^```", "", path.read_text(), flags=re.M | re.S))
    for command in re.findall(r"`palsgd ([a-z][^`]*)`", text):
        check_palsgd([*command.split(), "..."])

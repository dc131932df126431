"""The table of the examples, their folder and their tests name the same files; those of the first
part need palsgd alone."""

import ast
import re
import sys

import pytest

import palsgd
from support.commands import ran
from support.places import ROOT

FOLDER = ROOT / "examples"
PAGE = (FOLDER / "README.md").read_text()
ROWS = [line.strip("| ").split(" | ") for line in PAGE.splitlines() if "](" in line]
FILES = {re.search(r"\]\((.*?)\)", " ".join(row))[1]: row for row in ROWS}
CORE = [name for name in FILES if PAGE.index(f"]({name})") < PAGE.index("| needs |")]
SCRIPTS = [name for name in FILES if name.endswith(".py")]


def test_the_table_has_one_line_for_each_file_of_the_folder():
    there = {path.name for path in FOLDER.iterdir() if path.is_file()} - {"README.md"}
    assert set(FILES) == there
    assert len(ROWS) == len(FILES)


@pytest.mark.parametrize("name", FILES)
def test_an_example_is_in_a_test(name):
    """By its whole name, or without `.py`."""
    here = {path for path in (ROOT / "tests").rglob("test_*.py") if path.name != "test_table.py"}
    words = rf'"{re.escape(name)}"|"{re.escape(name.removesuffix(".py"))}"'
    assert any(re.search(words, path.read_text()) for path in here)


@pytest.mark.parametrize("name", FILES)
def test_the_command_in_the_table_is_the_one_in_the_file(name):
    command = re.search(r"`((?!pip)[^`]*examples/[^`]*)`", " | ".join(FILES[name]))[1]
    if name.endswith(".ipynb"):  # it is opened, and says no command
        return
    text = re.sub(r" \\\n +", " ", (FOLDER / name).read_text())
    for part in command.split(" ... "):
        assert part in text


@pytest.mark.parametrize("name", SCRIPTS)
def test_an_example_is_short_and_says_for_how_long_it_trains(name):
    text = (FOLDER / name).read_text()
    assert len(text.splitlines()) <= 125
    assert "--steps" in text or name == "custom_workload.py"  # where it is an option of palsgd


def imported(name):
    """The packages that a file imports."""
    nodes = ast.walk(ast.parse((FOLDER / name).read_text()))
    found = set()
    for node in nodes:
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            found.add(node.module)
    return {module.partition(".")[0] for module in found}


@pytest.mark.parametrize("name", CORE)
def test_an_example_of_the_first_part_imports_nothing_but_torch_numpy_and_palsgd(name):
    assert imported(name) - sys.stdlib_module_names <= {"torch", "numpy", "palsgd"}
    assert "palsgd.lab" not in (FOLDER / name).read_text()


CORE_ONLY = ROOT / "tests" / "support" / "core_only.py"


@pytest.mark.slow
def test_the_plain_loop_runs_where_pip_has_installed_palsgd_alone(tmp_path, monkeypatch):
    place = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
    for variable, value in (place | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}).items():
        monkeypatch.setenv(variable, value)
    # The script reports a package of the extras that can be imported after all.
    script = tmp_path / "script.py"
    script.write_text(
        "import importlib.util, runpy\n"
        "extras = ('sklearn', 'yaml', 'typer', 'rich', 'matplotlib', 'pandas', 'torchvision')\n"
        "assert not any(map(importlib.util.find_spec, extras))\n"
        f"runpy.run_path({str(FOLDER / 'train.py')!r}, run_name='__main__')\n"
    )
    done = ran(CORE_ONLY, script, tmp_path / "saves", "--steps", 128, fresh=True)
    assert done.code == 0, done.err
    assert re.fullmatch(r"accuracy 0\.\d+, 4 syncs, \d+ bytes sent per step\n", done.out)
    assert palsgd.checkpoint.find(tmp_path / "saves")

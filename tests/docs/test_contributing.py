"""The contributing page: its tree is the source's, its walk exists, and all its code runs."""

import ast
import json
import re

import pytest
import torch

from palsgd.lab import workloads
from support.commands import palsgd as command
from support.pages import code_blocks, executed, page, section
from support.places import SOURCE

PAGE = "CONTRIBUTING.md"
LIBRARY = SOURCE / "palsgd"
EXAMPLES = ("Add a method", "Add a codec", "Add a transport", "Add a workload")


# -- the tree ------------------------------------------------------------------------------------


def listed() -> dict[str, str]:
    """The paths of the tree, each with what it is said to know."""
    block = page(PAGE).split("<!-- tree -->")[1].split("<!-- end of the tree -->")[0]
    folders, found = [], {}
    for line in block.strip().strip("`").strip().splitlines()[1:]:
        indent, entry = re.fullmatch(r"( +)(.*)", line).groups()
        if entry.startswith("#"):
            continue
        name, _, meaning = entry.partition(" ")
        folders = folders[: len(indent) // 2 - 1]
        found["/".join([*folders, name.rstrip("/")])] = meaning.strip()
        if name.endswith("/"):
            folders.append(name.rstrip("/"))
    return found


def modules() -> set[str]:
    paths = (path for path in LIBRARY.rglob("*.py") if path.name != "__init__.py")
    return {str(path.relative_to(LIBRARY)) for path in paths}


def opened(entries) -> set[str]:
    """The folders of the tree whose files are listed one by one."""
    return {entry.rpartition("/")[0] for entry in entries if "/" in entry}


def test_every_module_is_in_the_tree_or_in_a_folder_that_stands_for_its_files():
    entries = listed()
    for module in modules() - set(entries):
        folders = [module[: at.start()] for at in re.finditer("/", module)]
        whole = [f for f in folders if f in entries and f not in opened(entries)]
        assert whole, f"{module} is not in the tree of {PAGE}"


def test_every_module_of_the_library_has_a_line_of_its_own():
    own = {m for m in modules() if not m.startswith(("lab/", "theory/"))}
    assert own - set(listed()) == set()


def test_nothing_in_the_tree_is_gone():
    assert [entry for entry in listed() if not (LIBRARY / entry).exists()] == []


def test_every_line_of_the_tree_says_something_but_for_folders_that_are_opened():
    entries = listed()
    silent = {entry for entry, meaning in entries.items() if not meaning}
    assert silent <= opened(entries)


# -- the walk ------------------------------------------------------------------------------------


def functions(module: str) -> set[str]:
    tree = ast.parse((LIBRARY / module).read_text())
    return {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}


def test_the_walk_of_a_sync_names_functions_of_its_files():
    text = section(PAGE, "Follow one sync")
    files = re.findall(r"^\d\. `(\w+\.py)`:", text, flags=re.MULTILINE)
    walk = ["worker.py", "sync.py", "outgoing.py", "sync_changes.py", "method.py"]
    assert files == walk
    steps = re.split(r"^\d\. ", text, flags=re.MULTILINE)[1:]
    for file, step in zip(files, steps, strict=True):
        own = step.split("\n\n")[0]
        named = set(re.findall(r"`(\w+)`", own))
        assert named
        assert named <= functions(file), f"{named - functions(file)} not in {file}"
    last = set(re.findall(r"`(\w+)`", text.split("\n\n")[-1]))
    assert {"_synced", "_conclude"} <= last
    assert last - {"delay"} <= functions("worker.py") | functions("sync.py")


# -- the examples --------------------------------------------------------------------------------


def example(title: str) -> dict:
    return executed(PAGE, *code_blocks(section(PAGE, title)))


def test_all_code_of_the_page_is_in_the_examples():
    everything = code_blocks(page(PAGE))
    in_examples = [code for title in EXAMPLES for code in code_blocks(section(PAGE, title))]
    assert sorted(everything) == sorted(in_examples)
    assert all(code_blocks(section(PAGE, title)) for title in EXAMPLES)


def test_the_codec_of_the_page_trains_with_36_bytes_for_256_values():
    found = example("Add a codec")
    history, codec = found["result"].history, found["Sign"]()
    assert history[-1]["loss"] < 0.2 * history[0]["loss"]
    assert codec.width == 36


def test_the_transport_of_the_page_leaves_both_workers_with_one_model():
    found = example("Add a transport")
    one, other = (torch.nn.utils.parameters_to_vector(m.parameters()) for m in found["models"])
    assert not any(thread.is_alive() for thread in found["threads"])
    torch.testing.assert_close(one, other, rtol=0, atol=0)
    for scale in (1.0, 2.0):  # both workers' data are learned
        assert found["models"][0](torch.full((1, 3), scale)).item() == pytest.approx(1.0, abs=0.3)


@pytest.fixture
def spirals(tmp_path, monkeypatch):
    """The workload of the page as a file of the workloads' folder."""
    (code,) = code_blocks(section(PAGE, "Add a workload"))
    (tmp_path / "spirals.py").write_text(code)
    monkeypatch.setattr(workloads, "__path__", [*workloads.__path__, str(tmp_path)])
    workloads.names.cache_clear()
    yield "spirals"
    workloads.names.cache_clear()


def test_the_workload_of_the_page_is_found_by_being_there(spirals):
    workload = workloads.load(spirals)
    assert workloads.recipe(spirals).workload == spirals
    assert workloads.grid("spirals/H") == {"sync_every": [4, 16, 64]}
    images, labels = workload.batch(worker=1, workers=4, size=8, index=3)
    assert images.shape == (8, 2)
    assert set(labels.tolist()) <= {0, 1}


def test_the_command_line_compares_methods_on_the_workload_of_the_page(spirals, tmp_path):
    said = command(
        "compare", spirals, "--simulate", "--steps", 400, "--workers", 2, "--methods",
        "ddp,palsgd", "--out", tmp_path / "out",
    )  # fmt: skip
    assert said.code == 0, said.err
    summary = json.loads((tmp_path / "out" / "summary.json").read_text())
    for method in ("ddp", "palsgd"):
        assert summary[method]["workload"] == spirals
        assert summary[method]["final_metric"] > 0.9

"""The guides: the first page's script trains, messages are the source's, pictures the script's."""

import ast
import importlib
import json
import re
from functools import cache

import pytest

from support.commands import ran
from support.pages import code_blocks, page, section
from support.places import ROOT, SOURCE

LIBRARY = SOURCE / "palsgd"

# -- docs/start.md ---------------------------------------------------------------------------------


@pytest.mark.slow
def test_the_script_of_the_first_page_trains_two_processes_and_says_what_the_page_says(
    tmp_path, monkeypatch
):
    (script,) = code_blocks(page("docs/start.md"))
    (tmp_path / "train.py").write_text(script)
    monkeypatch.chdir(tmp_path)  # nothing but that file is there
    said = ran(
        "-m", "torch.distributed.run", "--nproc-per-node", 2, "--rdzv-backend", "c10d",
        "--rdzv-endpoint", "localhost:0", "train.py",
    )  # fmt: skip
    assert said.code == 0, said.err
    (shown,) = re.findall(r"```text\n(accuracy.*?)```", page("docs/start.md"), flags=re.DOTALL)
    assert counted(said.out) == counted(shown)
    assert float(re.search(r"accuracy (\S+)", said.out)[1]) > 0.95
    assert (tmp_path / "trained" / "model.safetensors").is_file()


def counted(ledger: str) -> list[str]:
    """The lines of a ledger that are the same on every machine."""
    return re.findall(r"^(?:steps|exchanges|beta|history) .*$", ledger, flags=re.MULTILINE)


def test_the_figures_in_the_text_of_the_first_page_are_those_of_its_ledger():
    text = section("docs/start.md", "Two processes")
    gradients, mixing, syncs = re.search(
        r"steps +(\d+) gradient.*; (\d+) mixing.*\nexchanges +(\d+) in", text
    ).groups()
    assert (
        f"The clock counted {int(gradients) + int(mixing)} **steps**. In {mixing} of them" in text
    )
    assert f"The workers exchanged {syncs} times" in text


# -- docs/troubleshooting.md -----------------------------------------------------------------------

TROUBLE = "docs/troubleshooting.md"
# Whatever these raise, somebody meets while a loop is written or runs.
OF_LOOPS = (
    "inner.py",
    "local_optimizer.py",
    "loop.py",
    "methods/palsgd.py",
    "replica.py",
    "transports/process_group.py",
    "two_levels.py",
    "warmup.py",
    "wrapped.py",
)


def written(node: ast.expr) -> str | None:
    """A text of the source, with `...` where it has a value; None if it is no text."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return re.sub(r"%(\.\d)?[sdf]", "...", node.value)
    if isinstance(node, ast.JoinedStr):
        return "".join(v.value if isinstance(v, ast.Constant) else "..." for v in node.values)
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        sides = written(node.left), written(node.right)
        return None if sides == (None, None) else "".join(side or "..." for side in sides)
    return None


@cache
def expressions() -> list[tuple[str, ast.expr]]:
    """Those of the library's files, each with its file."""
    found = []
    for path in sorted(LIBRARY.rglob("*.py")):
        name = str(path.relative_to(LIBRARY))
        if not name.startswith(("lab/", "theory/", "simulator/", "cluster/")):
            nodes = ast.walk(ast.parse(path.read_text()))
            found += [(name, node) for node in nodes if isinstance(node, ast.expr)]
    return found


def raised() -> list[tuple[str, str, str]]:
    """Of each error and warning of the library: the file, the name of the call, and the text."""
    found = []
    for name, node in expressions():
        if isinstance(node, ast.Call) and node.args:
            called = getattr(node.func, "id", getattr(node.func, "attr", ""))
            text = written(node.args[0])
            if text and (called.endswith("Error") or called in ("warn", "warning")):
                found.append((name, called, text))
    return found


@cache
def quoted() -> list[str]:
    """The messages of the page: its text blocks, and items of lists that are code and a break."""
    text = page(TROUBLE)
    blocks = [" ".join(b.split()) for b in re.findall(r"```text\n(.*?)```", text, flags=re.DOTALL)]
    return blocks + re.findall(r"^- `(.+)`\\$", text, flags=re.MULTILINE)


def is_quoted(text: str) -> bool:
    return any(message in text for message in quoted())


def test_the_page_has_messages_at_all():
    assert len(quoted()) > 90
    assert len(raised()) > 150


def test_messages_of_the_page_are_in_the_source():
    texts = {text for _, node in expressions() if (text := written(node))}
    assert [m for m in quoted() if not any(m in text for text in texts)] == []


def test_messages_of_the_page_are_long_enough_to_tell_them_apart():
    assert [m for m in quoted() if len(m.replace("...", "")) < 20] == []


def test_the_page_has_every_error_of_syncs_and_every_warning_of_the_library():
    kinds = {"SyncError", "ConsensusError", "NonFiniteError", "warn", "warning"}
    found = [(called, text) for _, called, text in raised() if called in kinds]
    assert {called for called, _ in found} == kinds
    assert [text for _, text in found if not is_quoted(text)] == []


def test_the_page_has_every_error_that_a_loop_can_meet():
    found = [(file, text) for file, _, text in raised() if file in OF_LOOPS]
    assert {file for file, _ in found} == set(OF_LOOPS)
    assert [text for _, text in found if not is_quoted(text)] == []


# -- docs/when.md, docs/cluster.md -----------------------------------------------------------------


def test_pages_say_that_prices_are_not_measured_as_long_as_that_is_so():
    unknown = json.loads((LIBRARY / "lab" / "plan" / "prices.json").read_text())["tiny"]
    assert ("have **not been measured yet**" in page("docs/when.md")) == unknown
    assert ("has **no measured prices yet**" in page("docs/cluster.md")) == unknown


# -- docs/rules.md ---------------------------------------------------------------------------------


def test_every_rule_has_a_heading_of_its_own():
    titles = re.findall(r"^###? (.*)$", page("docs/rules.md"), flags=re.MULTILINE)
    assert len(titles) == len(set(titles)) > 25


# -- docs/pictures ---------------------------------------------------------------------------------


def test_pictures_are_what_their_script_draws(monkeypatch):
    folder = ROOT / "docs" / "pictures"
    monkeypatch.syspath_prepend(str(folder))
    drawn = {f"{p.__name__}.svg": p().svg() for p in importlib.import_module("make").PICTURES}
    assert {path.name: path.read_text() for path in folder.glob("*.svg")} == drawn

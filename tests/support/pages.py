"""The pages of the documentation, as tests read and run them.

A ```python block of a page is run, after the blocks above it and in their namespace. A block that
cannot be run has `<!-- not run: REASON -->` above it. Commands are the lines after `$ ` of a
```console block, and all lines of a ```bash block.
"""

import re
import shlex
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import dropwhile, groupby
from pathlib import Path
from textwrap import dedent
from typing import Any

from support.places import ROOT

FENCE = re.compile(
    r"^(?:[ ]*<!-- not run: (?P<reason>[^\n]+?) -->\n)?"
    r"^(?P<indent>[ ]*)```(?P<language>[\w-]*)[^\n]*\n(?P<text>.*?)^(?P=indent)```$",
    flags=re.DOTALL | re.MULTILINE,
)
CORE = {*sys.stdlib_module_names, "numpy", "palsgd", "torch"}


@dataclass(frozen=True)
class Block:
    """Code of a page."""

    language: str
    text: str
    line: int  # of the page, at which the text begins
    not_run: str | None  # the reason


def page(name: str) -> str:
    return (ROOT / name).read_text()


def section(name: str, title: str) -> str:
    """What stands under a heading of the second level."""
    found = page(name).split(f"\n## {title}\n")
    assert len(found) == 2, f"{name} has no section {title!r}, or several"
    return found[1].split("\n## ")[0]


def blocks(text: str, *languages: str) -> list[Block]:
    """The blocks of a page or section in one of these languages."""
    return [
        Block(
            language=found["language"],
            text=dedent(found["text"]),
            line=text.count("\n", 0, found.start("text")) + 1,
            not_run=found["reason"],
        )
        for found in FENCE.finditer(text)
        if found["language"] in languages
    ]


def code_blocks(text: str) -> list[str]:
    """The Python code of a page or section that is run."""
    return [each.text for each in blocks(text, "python") if each.not_run is None]


def executed(name: str, *blocks: str, **given: Any) -> dict[str, Any]:
    """What the blocks leave behind, one after another in one namespace, which has `given`."""
    found: dict[str, Any] = {"__name__": "worked_example", **given}
    for number, code in enumerate(blocks):
        exec(compile(code, f"{name}, block {number}", "exec", dont_inherit=True), found)
    return found


def other_packages(code: str) -> set[str]:
    """The packages that code imports, but for those that palsgd itself needs."""
    plain = re.findall(r"^\s*import (.+)", code, flags=re.MULTILINE)
    names = [name.strip() for line in plain for name in line.split(",")]
    names += re.findall(r"^\s*from (\S+) import", code, flags=re.MULTILINE)
    return {re.match(r"\w*", name)[0] for name in names} - CORE


def commands(text: str) -> Iterator[tuple[int, list[str]]]:
    """The commands of a page: the line of each, and its words."""
    for block in blocks(text, "bash", "console"):
        line = block.line
        for words in re.split(r"(?<!\\)\n", block.text):  # a backslash joins the next line
            if block.language == "bash" or words.startswith("$ "):
                for command in _simple_commands(words.removeprefix("$ ").replace("\\\n", " ")):
                    yield line, command
            line += 1 + words.count("\n")


def _simple_commands(line: str) -> Iterator[list[str]]:
    """The commands that a line of the shell joins, each without variables that are set for it."""
    words = shlex.shlex(line, posix=True, punctuation_chars=";|&")
    words.whitespace_split = True
    for joint, command in groupby(words, lambda word: set(word) <= set(";|&")):
        if not joint:
            yield list(dropwhile(lambda word: re.match(r"sudo$|\w+=", word), command))


def pages() -> list[Path]:
    """All pages that are part of the documentation."""
    return [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]

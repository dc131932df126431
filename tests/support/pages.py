"""The pages of the documentation, as tests read and run them."""

import re
from pathlib import Path
from typing import Any

from support.places import ROOT


def page(name: str) -> str:
    return (ROOT / name).read_text()


def section(name: str, title: str) -> str:
    """What stands under a heading of the second level."""
    found = page(name).split(f"\n## {title}\n")
    assert len(found) == 2, f"{name} has no section {title!r}, or several"
    return found[1].split("\n## ")[0]


def code_blocks(text: str) -> list[str]:
    """The Python code of a page or section."""
    return re.findall(r"```python\n(.*?)```", text, flags=re.DOTALL)


def executed(name: str, *blocks: str, **given: Any) -> dict[str, Any]:
    """What the blocks leave behind, one after another in one namespace, which has `given`."""
    found: dict[str, Any] = {"__name__": "worked_example", **given}
    for number, code in enumerate(blocks):
        exec(compile(code, f"{name}, block {number}", "exec", dont_inherit=True), found)
    return found


def pages() -> list[Path]:
    """All pages that are part of the documentation."""
    return [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]

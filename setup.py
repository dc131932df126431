"""README.md as an index page shows it. Everything else about the package is in pyproject.toml.

In the repository the README's links are relative, so that they work in every clone. An index page
has no files beside it, so the links there lead to the release's files in the repository.
"""

import re
import tomllib
from pathlib import Path

from setuptools import setup

HERE = Path(__file__).parent


def tag() -> str:
    """The tag of this version."""
    source = (HERE / "src" / "palsgd" / "__init__.py").read_text(encoding="utf-8")
    found = re.search(r'^__version__ = "(.+)"$', source, flags=re.MULTILINE)
    assert found is not None
    return f"v{found[1]}"


def index_page(text: str, repository: str, tag: str) -> str:
    """The text with absolute links to files and pictures."""

    def absolute(link: re.Match[str]) -> str:
        picture, words, target = link.groups()
        kind = "raw" if picture else "blob"
        return f"{picture}[{words}]({repository}/{kind}/{tag}/{target})"

    return re.sub(r"(!?)\[([^]]*)\]\((?![a-z]+:|#)([^)]+)\)", absolute, text)


project = tomllib.loads((HERE / "pyproject.toml").read_text(encoding="utf-8"))["project"]
readme = (HERE / "README.md").read_text(encoding="utf-8")
setup(
    long_description=index_page(readme, project["urls"]["Repository"], tag()),
    long_description_content_type="text/markdown",
)

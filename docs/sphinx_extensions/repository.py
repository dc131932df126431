"""Links from a page to files of the repository that are no pages, and from the API to its source.

A page links to `../examples/train.py`, which works where the Markdown is read in the repository.
On the site the link leads to the file's address in the repository.
"""

import importlib
import inspect
import re
from operator import attrgetter
from pathlib import Path
from typing import Any

from sphinx.application import Sphinx
from sphinx.util import logging

logger = logging.getLogger(__name__)
LINK = re.compile(r"(?<=\]\()(?P<path>\.\./[^)#\s]*)(?P<anchor>#[^)\s]*)?(?=[)\s])")
BRANCH = "main"


def address(app: Sphinx, path: Path) -> str:
    """Where the repository shows a file or a folder."""
    kind = "tree" if path.is_dir() else "blob"
    place = path.relative_to(app.srcdir.parent).as_posix()
    return f"{app.config.repository_url}/{kind}/{BRANCH}/{place}"


def link_to_repository(app: Sphinx, page: Path, text: str) -> str:
    """The text of a page, in which links that leave the folder of pages are addresses."""

    def replaced(link: re.Match[str]) -> str:
        target = (page.parent / link["path"]).resolve()
        if target.is_relative_to(app.srcdir):
            return link[0]
        if not target.exists():
            logger.warning("%s links to %s, which is not there", page.name, link["path"])
        return address(app, target) + (link["anchor"] or "")

    return LINK.sub(replaced, text)


def read_page(app: Sphinx, docname: str, source: list[str]) -> None:
    page = Path(app.env.doc2path(docname))
    source[0] = link_to_repository(app, page, source[0])


def source_of(app: Sphinx, module: str, name: str) -> str | None:
    """The address of a public name's source, with its line."""
    try:
        found = inspect.unwrap(attrgetter(name)(importlib.import_module(module)))
        found = found.fget if isinstance(found, property) else found
        path, line = Path(inspect.getfile(found)), inspect.getsourcelines(found)[1]
    except (AttributeError, ImportError, OSError, TypeError):  # a value, such as a field
        return None
    if not path.is_relative_to(app.srcdir.parent):
        return None
    return f"{address(app, path)}#L{line}"


def setup(app: Sphinx) -> dict[str, Any]:
    app.add_config_value("repository_url", "", "env", str)
    app.connect("source-read", read_page)

    def resolve(domain: str, about: dict[str, str]) -> str | None:
        known = domain == "py" and about["module"]
        return source_of(app, about["module"], about["fullname"]) if known else None

    app.config.linkcode_resolve = resolve
    return {"parallel_read_safe": True, "parallel_write_safe": True}

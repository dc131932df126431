"""The documentation site, which `make docs` builds with Sphinx."""

import sys
import tomllib
from pathlib import Path
from typing import Any

from sphinx.application import Sphinx
from sphinx.util import inspect

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "src"), str(ROOT / "docs" / "sphinx_extensions")]

import palsgd  # noqa: E402

package = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]

project = package["name"]
author = package["authors"][0]["name"]
copyright = author  # the footer names no year, so that it never needs a change
version = release = palsgd.__version__

extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx.ext.linkcode",
    "sphinx.ext.githubpages",
    "command_line",
    "repository",
]
exclude_patterns = ["sphinx_extensions"]
nitpicky = True
# Types of Python, torch and the frameworks have their pages elsewhere. Words in single backticks
# are code; where one is a public name, it is a link.
nitpick_ignore_regex = [("py:(?!obj).*", r"(?!palsgd\.).*"), ("py:obj", "(?s:.*)")]
default_role = "py:obj"
smartquotes_action = "D"  # dashes alone: quotes are those of code

repository_url = package["urls"]["Repository"]

# -- Markdown --------------------------------------------------------------------------------------

myst_heading_anchors = 4  # as deep as pages link to

# -- the pages of the API --------------------------------------------------------------------------

# Autodoc imports what it documents: signatures and docstrings of optimizers are put together when
# they are imported, so that a reader of source text would miss most of them. The frameworks are
# not needed for that, and are never imported: the site is the same with and without them.
autodoc_mock_imports = ["accelerate", "lightning", "pytorch_lightning", "transformers"]
autodoc_default_options = {"members": True, "member-order": "bysource"}
autodoc_typehints = "none"  # docstrings say what an argument is
autodoc_preserve_defaults = True
autodoc_class_signature = "mixed"
napoleon_custom_sections = [("Options of every optimizer", "params_style")]
napoleon_use_rtype = False
python_maximum_signature_line_length = 90

# -- the look --------------------------------------------------------------------------------------

html_theme = "furo"
pygments_dark_style = "github-dark"
html_title = f"{project} {version}"
html_baseurl = package["urls"]["Documentation"]
html_static_path = ["static"]
html_css_files = ["site.css"]
html_copy_source = False
html_theme_options = {
    "source_repository": repository_url,
    "source_branch": "main",
    "source_directory": "docs/",
}


def own_signature(
    app: Sphinx, what: str, name: str, documented: Any, options: Any, shown: str, returned: str
) -> tuple[str, str] | None:
    """A class that inherits from a framework is shown as it is called, and not as the framework
    that was left out is."""
    if what != "class" or shown != "(*args, **kwargs)":
        return None
    found = inspect.signature(documented.__init__, bound_method=True)
    return inspect.stringify_signature(found, show_annotation=False), returned


def setup(app: Sphinx) -> None:
    app.connect("autodoc-process-signature", own_signature)

"""The documentation site: it builds without a warning, and nothing public is missing from it."""

import ast
import inspect
import re
import tomllib
import zlib
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urldefrag

import pytest
import typer

import palsgd
from palsgd import checkpoint, events, lab, methods
from palsgd.lab.cli import app
from support.commands import ran
from support.places import ROOT, SOURCE

for package in ("sphinx", "myst_parser", "furo"):
    pytest.importorskip(package, reason="the site needs: pip install 'palsgd[docs]'")
pytestmark = pytest.mark.slow
PACKAGE = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
REPOSITORY = PACKAGE["urls"]["Repository"]


@pytest.fixture(scope="module")
def site(tmp_path_factory) -> Path:
    """The folder of the built site. The options are those of `make docs`."""
    out = tmp_path_factory.mktemp("site")
    options = re.search(r"-m sphinx (.*) docs ", (ROOT / "Makefile").read_text())[1].split()
    built = ran("-m", "sphinx", *options, ROOT / "docs", out, timeout=240, fresh=True)
    assert built.code == 0, built.err
    return out


def inventory(site: Path) -> set[str]:
    """What can be linked to, as ROLE NAME."""
    packed = (site / "objects.inv").read_bytes().split(b"\n", 4)[4]
    lines = zlib.decompress(packed).decode().splitlines()
    found = (re.fullmatch(r"(.+?) (\w+:[\w-]+) -?\d+ \S+ .*", line) for line in lines)
    return {f"{each[2].partition(':')[0]} {each[1]}" for each in found if each}


# -- names -----------------------------------------------------------------------------------------


def imports(tree: ast.AST) -> set[str]:
    """The packages that a module imports."""
    nodes = [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
    return {(node.module or "").partition(".")[0] for node in nodes}


def integrations() -> set[str]:
    """What the modules that import a framework define for others."""
    needed = PACKAGE["optional-dependencies"]["integrations"]
    frameworks = {re.split(r"\W", each)[0] for each in needed}
    found = set()
    for path in (SOURCE / "palsgd" / "integrations").glob("*.py"):
        tree = ast.parse(path.read_text())
        if imports(tree) & frameworks:
            own = [n.name for n in tree.body if isinstance(n, ast.ClassDef | ast.FunctionDef)]
            found |= {f"integrations.{path.stem}.{name}" for name in own if name[0] != "_"}
    return found


def is_documented(member: object) -> bool:
    return (callable(member) or isinstance(member, property)) and bool(member.__doc__)


def public_names() -> set[str]:
    kinds = [name for name, value in vars(events).items() if isinstance(value, type)]
    own = [name for name in kinds if getattr(events, name).__module__ == events.__name__]
    of_optimizers = inspect.getmembers(palsgd.LocalOptimizer, is_documented)
    members = [name for name, _ in of_optimizers if name in vars(palsgd.LocalOptimizer)]
    return {
        *palsgd.__all__,
        *(f"methods.{name}" for name in dir(methods)),
        *(f"checkpoint.{name}" for name in checkpoint.__all__),
        *(f"events.{name}" for name in own if name[0] != "_"),
        *(f"lab.{name}" for name in lab.__all__),
        *integrations(),
        *(f"LocalOptimizer.{name}" for name in members if name[0] != "_"),
    }


def test_no_public_name_is_missing_from_the_site(site):
    there = inventory(site)
    assert integrations()
    assert {name for name in public_names() if f"py palsgd.{name}" not in there} == set()


def test_classes_for_frameworks_are_shown_as_they_are_called(site):
    text = re.sub(r"<[^>]+>|\s", "", (site / "api" / "integrations.html").read_text())
    assert "LocalTrainingCallback(opt,*,resume_from=None)" in text


def options(command, name="palsgd"):
    """Every option of every command, as NAME.--OPTION."""
    for part, child in getattr(command, "commands", {}).items():
        yield from options(child, f"{name}-{part}")
    if not hasattr(command, "commands"):
        yield from (f"{name}.{option}" for each in command.params for option in each.opts)


def test_no_option_of_a_command_is_missing_from_the_site(site):
    there = {each.lower() for each in inventory(site)}
    wanted = {each for each in options(typer.main.get_command(app)) if ".--" in each}
    assert len(wanted) > 100
    assert {each for each in wanted if f"std {each}".lower() not in there} == set()


# -- links -----------------------------------------------------------------------------------------


class Page(HTMLParser):
    """The links of a page, and the places on it that links may lead to."""

    def __init__(self, path: Path):
        super().__init__()
        self.links: set[str] = set()
        self.places: set[str] = {""}
        self.feed(path.read_text())

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        found = dict(attrs)
        self.places.add(found.get("id") or "")
        self.links.add(unquote(found.get("href") or found.get("src") or ""))


@pytest.fixture(scope="module")
def pages(site) -> dict[Path, Page]:
    return {path: Page(path) for path in site.rglob("*.html")}


def test_every_link_inside_the_site_leads_to_a_place_that_is_there(pages):
    for path, page in pages.items():
        for link in page.links:
            target, place = urldefrag(link)
            if "://" in link or link.startswith(("data:", "mailto:")):
                continue
            there = (path.parent / target.partition("?")[0]).resolve() if target else path
            assert there.exists(), f"{path.name}: {link}"
            assert there not in pages or place in pages[there].places, f"{path.name}: {link}"


def test_every_link_to_the_repository_names_a_file_that_is_there(pages):
    links = {link for page in pages.values() for link in page.links}
    files = [
        re.split("[#?]", link)[0] for link in links if re.match(rf"{REPOSITORY}/(blob|tree)/", link)
    ]
    assert any("/examples/" in file for file in files)
    for file in files:
        _, _, place = file.removeprefix(f"{REPOSITORY}/").split("/", 2)
        assert (ROOT / place).exists(), file

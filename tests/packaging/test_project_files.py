"""The files around the source say the same: version, addresses, Python versions, extras."""

import ast
import re
import subprocess
import sys
from importlib.metadata import packages_distributions

import pytest
import yaml

import palsgd
from palsgd.lab.extras import BROUGHT
from support.pages import code_blocks, page, section
from support.places import ROOT, SOURCE
from support.project import project, requirements

VERSION, URLS = palsgd.__version__, project()["urls"]
CORE = requirements()
STANDARD = {*sys.stdlib_module_names, "palsgd"}
WORKFLOW = ROOT / ".github" / "workflows" / "test.yml"
TEXTS = [
    path
    for pattern in ("*.md", "*.cff", "docs/**/*.md", ".github/**/*.*")
    for path in sorted(ROOT.glob(pattern))
]


def loaded(name: str):
    return yaml.safe_load((ROOT / name).read_text())


# -- the version -----------------------------------------------------------------------------------


def headings() -> list[tuple[str, str | None]]:
    """The sections of the changelog: the version, and its date."""
    text = page("CHANGELOG.md")
    return re.findall(r"^## \[(.+?)\](?: - (\d{4}-\d\d-\d\d))?$", text, flags=re.MULTILINE)


def test_the_newest_release_of_the_changelog_is_this_version_and_all_have_dates():
    (first, no_date), (newest, _), *_ = headings()
    assert (first, no_date, newest) == ("Unreleased", "", VERSION)
    dates = [date for _, date in headings()[1:]]
    assert all(dates)
    assert dates == sorted(dates, reverse=True)


def test_every_section_of_the_changelog_links_to_its_changes():
    names = [name for name, _ in headings()]
    links = dict(re.findall(r"^\[(.+?)\]: (\S+)$", page("CHANGELOG.md"), flags=re.MULTILINE))
    assert list(links) == names
    tags = ["HEAD", *(f"v{name}" for name in names[1:])]
    for name, tag, before in zip(names, tags, tags[1:], strict=False):
        assert links[name] == f"{URLS['Repository']}/compare/{before}...{tag}"
    assert links[names[-1]] == f"{URLS['Repository']}/releases/tag/{tags[-1]}"


def test_the_citation_names_the_software_of_this_version():
    cited, dates = loaded("CITATION.cff"), dict(headings())
    assert cited["version"] == VERSION
    assert cited["date-released"] == dates[VERSION]
    assert cited["url"] == URLS["Homepage"]
    assert cited["repository-code"] == URLS["Repository"]
    assert cited["license"] == project()["license"]


# -- addresses -------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", TEXTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_addresses_of_the_project_are_those_of_pyproject(path):
    found = re.findall(r"https://[\w.-]*github\.(?:com|io)/[^\s)\"'>]+", path.read_text())
    ours = [each for each in found if "palsgd" in each]
    assert [each for each in ours if not each.startswith(tuple(URLS.values()))] == []


# -- the README ------------------------------------------------------------------------------------


def test_the_readme_begins_with_installing_and_names_the_test_command():
    text = page("README.md")
    assert len(text.splitlines()) <= 130
    assert "$ pip install palsgd\n" in text.split("## ")[1]
    assert "$ make test " in section("README.md", "From a clone")


def test_lines_that_come_into_a_loop_are_lines_of_the_readmes_script():
    (script,) = code_blocks(page("README.md"))
    (diff,) = re.findall(r"```diff\n(.*?)```", page("README.md"), flags=re.DOTALL)
    come = [line.removeprefix("+ ") for line in diff.splitlines() if line.startswith("+ ")]
    assert len(come) == 3
    assert set(come) <= set(script.splitlines())


# -- Python, torch and other libraries -------------------------------------------------------------


def pythons() -> list[str]:
    found = (re.fullmatch(r"Programming .* :: (3\.\d+)", each) for each in project()["classifiers"])
    return [each[1] for each in found if each]


def test_python_versions_are_the_same_everywhere():
    assert project()["requires-python"] == f">={pythons()[0]}"
    jobs = loaded(".github/workflows/test.yml")["jobs"]
    assert jobs["test"]["strategy"]["matrix"]["python"] == pythons()


def test_the_workflow_runs_targets_of_the_makefile_with_actions_of_a_stated_version():
    makefile = page("Makefile")
    for job in loaded(".github/workflows/test.yml")["jobs"].values():
        assert re.fullmatch(r"ubuntu-\d+\.\d+", job["runs-on"])
        assert job["timeout-minutes"] <= 120
        used = [step["uses"] for step in job["steps"] if "uses" in step]
        assert [each for each in used if not re.fullmatch(r"actions/[\w-]+@v\d+", each)] == []
        (command,) = (step["run"] for step in job["steps"] if "run" in step)
        targets = job["strategy"]["matrix"].get("target", [command.removeprefix("make ")])
        for target in targets:
            assert re.search(rf"^{target}:", makefile, flags=re.MULTILINE), target
    assert "run: make test\n" in WORKFLOW.read_text()


def test_make_and_the_page_on_platforms_have_the_oldest_torch_that_pyproject_states():
    (stated,) = (each for each in project()["dependencies"] if each.startswith("torch"))
    asked = ["make", "-n", "-C", str(ROOT), ".venv-oldest/installed", "-B"]
    done = subprocess.run(asked, capture_output=True, text=True, check=True)
    oldest = stated.removeprefix("torch>=")
    assert f"'torch=={oldest}.*'" in done.stdout
    assert f"torch {oldest} or newer" in page("docs/platforms.md")


def imported(folder: str) -> set[str]:
    """The packages of others that files of this folder of the source import, also inside
    functions."""
    found = set()
    for path in (SOURCE / "palsgd" / folder).rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            found |= {name for name in names if name.startswith("torch.utils.tensorboard")}
            found |= {name.partition(".")[0] for name in names}
    return {re.sub(r"^torch\.utils\.", "", name) for name in found} - STANDARD


def packages(modules) -> set[str]:
    """What is installed to have these modules."""
    known = packages_distributions()
    return {known[name][0].lower() for name in modules}


def test_the_extras_of_the_lab_are_what_the_lab_imports():
    own = {name for names in BROUGHT.values() for name in names}
    assert imported("lab") | {"typer"} == own | {"torch", "numpy"}
    for extra, modules in BROUGHT.items():
        assert packages(modules) == requirements(extra) - CORE


def test_what_tests_alone_use_is_asked_for_by_developers_alone():
    users = requirements("lab", "vision", "tensorboard")
    assert not users & {"transformers", "pytest", "hypothesis", "twine", "build"}
    assert {"transformers", "twine", "build"} <= requirements("dev")


# -- templates -------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["bug", "idea"])
def test_a_template_of_an_issue_says_what_it_is_for(name):
    text = page(f".github/ISSUE_TEMPLATE/{name}.md")
    _, front, body = text.split("---\n", 2)
    assert set(yaml.safe_load(front)) == {"name", "about", "labels"}
    assert body.count("**") >= 6


def test_security_and_conduct_have_a_private_way_to_report():
    private = f"{URLS['Repository']}/security/advisories/new"
    for name in ("SECURITY.md", "CODE_OF_CONDUCT.md", ".github/ISSUE_TEMPLATE/config.yml"):
        assert private in page(name), name

"""What users download, built from a copy of the repository: the wheel, the sdist, and the page that
an index shows of them."""

import email
import email.message
import os
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from dataclasses import dataclass
from pathlib import Path

import pytest

import palsgd
from support.pages import code_blocks, page
from support.patience import patient
from support.places import ROOT
from support.project import project

pytestmark = pytest.mark.slow
# What the build adds to the files of the repository.
MADE = re.compile(r"PKG-INFO|setup\.cfg|src/palsgd\.egg-info/.*")


@dataclass(frozen=True)
class Package:
    sdist: Path
    wheel: Path
    unpacked: Path  # the sdist's files

    @property
    def metadata(self) -> email.message.Message:
        with zipfile.ZipFile(self.wheel) as wheel:
            (name,) = (name for name in wheel.namelist() if name.endswith(".dist-info/METADATA"))
            return email.message_from_string(wheel.read(name).decode())


def ran(*command: object, folder: Path, **variables: str) -> str:
    """What a command of a user's prints, outside of the repository."""
    kept = {name: value for name, value in os.environ.items() if name != "COLUMNS"}
    done = subprocess.run(
        [str(word) for word in command], cwd=folder, env=kept | variables, timeout=patient(280),
        capture_output=True, text=True, stdin=subprocess.DEVNULL,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def repository() -> list[str]:
    """The files that belong to the repository, those too that are to be added."""
    asked = ["git", "-C", str(ROOT), "ls-files", "-z", "-co", "--exclude-standard"]
    done = subprocess.run(asked, capture_output=True, text=True)
    if done.returncode or not (ROOT / ".git").exists():
        pytest.skip("the repository's list of files is in its checkout alone")
    return sorted(name for name in done.stdout.split("\0") if (ROOT / name).is_file())


@pytest.fixture(scope="module")
def package(tmp_path_factory) -> Package:
    """The wheel is built from the sdist, as `python -m build` does it."""
    here = tmp_path_factory.mktemp("package")
    for name in repository():
        (here / "copy" / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, here / "copy" / name)
    ran(sys.executable, "-m", "build", "--no-isolation", "--outdir", here / "dist", ".",
        folder=here / "copy")  # fmt: skip
    (sdist,), (wheel,) = (here / "dist").glob("*.tar.gz"), (here / "dist").glob("*.whl")
    with tarfile.open(sdist) as files:
        files.extractall(here / "unpacked", filter="data")
    (unpacked,) = (here / "unpacked").iterdir()
    return Package(sdist, wheel, unpacked)


def test_the_sdist_has_the_files_of_the_repository(package):
    found = (path for path in package.unpacked.rglob("*") if path.is_file())
    names = {str(path.relative_to(package.unpacked)) for path in found}
    assert {name for name in names if not MADE.fullmatch(name)} == set(repository())


def test_the_wheel_has_the_files_of_the_package_and_no_others(package):
    with zipfile.ZipFile(package.wheel) as wheel:
        names = {name for name in wheel.namelist() if ".dist-info/" not in name}
    own = {name.removeprefix("src/") for name in repository() if name.startswith("src/")}
    assert names == own


def test_the_index_takes_both_files_without_a_warning(package):
    said = ran(sys.executable, "-m", "twine", "check", "--strict", package.sdist, package.wheel,
               folder=package.unpacked, COLUMNS="400")  # fmt: skip
    assert said.count("PASSED") == 2


def test_the_metadata_say_who_what_where_and_for_whom(package):
    found, stated = package.metadata, project()
    assert found["Version"] == palsgd.__version__
    assert found["License-Expression"] == "Apache-2.0"
    assert found.get_all("Project-URL") == [f"{k}, {v}" for k, v in stated["urls"].items()]
    assert found.get_all("Classifier") == stated["classifiers"]
    assert set(found.get_all("Provides-Extra")) == set(stated["optional-dependencies"])
    assert found["Author"]


def test_links_of_the_index_page_are_absolute_and_lead_to_files_of_the_release(package):
    text = package.metadata.get_payload()
    assert isinstance(text, str)
    targets = re.findall(r"(!?)\[[^]]*\]\(([^)#]+)", text)
    assert len(targets) == len(re.findall(r"\]\([^)#]+", page("README.md")))
    files = re.compile(rf"{project()['urls']['Repository']}/(\w+)/v{palsgd.__version__}/(.+)")
    for picture, target in targets:
        assert target.startswith("https://"), target
        if found := files.fullmatch(target):
            assert found[1] == ("raw" if picture else "blob")
            assert (package.unpacked / found[2]).exists(), target


def test_tests_of_the_sdist_run_from_its_own_files(package):
    chosen = ("tests/library/test_units.py", "tests/library/test_layers.py")
    said = ran(sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *chosen,
               folder=package.unpacked, PYTHONPATH=str(package.unpacked / "src"))  # fmt: skip
    assert re.search(r"\d+ passed", said)


def test_the_first_page_of_the_readme_leads_from_the_wheel_to_two_processes(package, tmp_path):
    """Outside of the repository: nothing but the wheel, and the commands as they are written."""
    install, run = re.findall(r"^\$ (.+)$", page("README.md"), flags=re.MULTILINE)[:2]
    assert install == "pip install palsgd"
    target = tmp_path / "installed"
    ran(sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--no-index", "--no-compile",
        "--target", target, package.wheel, folder=tmp_path)  # fmt: skip
    assert not list(target.rglob("__pycache__"))
    (tmp_path / "train.py").write_text(code_blocks(page("README.md"))[0])
    program, *words = run.split()
    assert program == "torchrun"
    said = ran(sys.executable, "-m", "torch.distributed.run", *words, folder=tmp_path,
               PYTHONPATH=str(target), PYTHONDONTWRITEBYTECODE="", OMP_NUM_THREADS="1")  # fmt: skip
    assert float(re.search(r"^loss (\S+)$", said, flags=re.MULTILINE)[1]) < 0.1
    assert (tmp_path / "model.pt").exists()
    assert list(target.rglob("optimizer.*.pyc"))  # it is the wheel that was imported

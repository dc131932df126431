"""What a run says about where it comes from."""

import shutil
import subprocess
import sys

import pytest
import yaml

from palsgd.lab.provenance import checkout, provenance
from support.commands import palsgd

needs_git = pytest.mark.skipif(shutil.which("git") is None, reason="no git here")


def git(folder, *words) -> str:
    who = ("-c", "user.name=a", "-c", "user.email=a@example.org")
    command = ["git", "-C", str(folder), *who, *words]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


@pytest.fixture
def repository(tmp_path):
    git(tmp_path, "init", "-q")
    (tmp_path / "code.py").write_text("1\n")
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "-q", "-m", "first")
    checkout.cache_clear()
    yield tmp_path
    checkout.cache_clear()


@needs_git
def test_a_checkout_has_its_commit_and_is_dirty_once_a_tracked_file_changes(repository):
    commit = git(repository, "rev-parse", "HEAD")
    (repository / "untracked").write_text("1\n")
    assert checkout(repository) == (commit, False)
    (repository / "code.py").write_text("2\n")
    checkout.cache_clear()
    assert checkout(repository) == (commit, True)


@needs_git
def test_files_without_their_history_are_of_the_commit_that_the_environment_names(
    repository, monkeypatch
):
    monkeypatch.setenv("PALSGD_COMMIT", "0123abc")
    assert checkout(repository) == ("0123abc", None)


@needs_git
def test_a_package_that_lies_untracked_in_anothers_checkout_has_no_commit(repository):
    (repository / "venv").mkdir()
    (repository / "venv" / "installed.py").write_text("1\n")
    assert checkout(repository / "venv") == (None, None)


def test_without_git_commit_and_dirty_are_none(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    checkout.cache_clear()
    assert checkout() == (None, None)
    checkout.cache_clear()


def test_the_command_is_one_line_that_a_shell_would_read_back(monkeypatch):
    monkeypatch.setattr(sys, "argv", ["/bin/palsgd", "train", "digits", "--out", "a b"])
    assert provenance()["command"] == "palsgd train digits --out 'a b'"
    assert provenance(["/src/palsgd/__main__.py", "demo"])["command"] == "palsgd demo"


@pytest.mark.parametrize("how", ["--simulate", "--quiet"])
def test_the_config_of_a_run_holds_commit_dirty_and_command(tmp_path, how):
    words = ("train", "digits", "--workers", 2, "--steps", 4, how, "--no-report", "--out", tmp_path)
    assert palsgd(*words).code == 0
    config = yaml.safe_load((tmp_path / "palsgd" / "config.yaml").read_text())
    assert config["command"] == " ".join(["palsgd", *map(str, words)])
    assert (config["commit"], config["dirty"]) == checkout()

"""Runs that fail, and folders that hold several kinds: nothing else is lost or mixed up."""

import errno
import os

import pytest

from support.commands import apart, palsgd, records

SHORT = ("inner=sgd", "steps=24", "workers=2", "sync_every=8", "warmup_steps=4")


@pytest.mark.parametrize("way", ["simulated", pytest.param("processes", marks=pytest.mark.slow)])
def test_a_point_that_diverges_ends_alone_and_is_not_tried_again(tmp_path, way):
    out = tmp_path / "sweep"
    flags = ("--simulate",) if way == "simulated" else ()
    call = palsgd if flags else apart
    command = ("sweep", "digits", "lr=1e30,0.05,0.02", "mix_rate=0", *SHORT, "--no-report",
               "--out", out, *flags)  # fmt: skip
    said = call(*command)
    assert said.code == 1
    assert "1 of the runs failed (lr=1e30" in said.err
    assert set(records(out)) == {"lr=0.05", "lr=0.02"}
    assert "nan" in (out / "lr=1e30" / "failed.txt").read_text()
    written = {path: path.stat().st_mtime for path in out.glob("*/metrics.jsonl")}
    assert call(*command, "--resume").code == 1
    assert {path: path.stat().st_mtime for path in out.glob("*/metrics.jsonl")} == written


@pytest.mark.slow
def test_ddp_that_diverges_fails_in_processes_too(tmp_path):
    said = apart("train", "digits", *SHORT, "lr=1e30", "--method", "ddp", "--out", tmp_path / "r")
    assert said.code == 1
    assert "the validation loss is nan" in said.err


def test_force_starts_the_whole_folder_over(tmp_path):
    out = tmp_path / "runs"
    common = ("digits", *SHORT, "--simulate", "--no-report", "--out", out)
    assert palsgd("compare", *common, "--methods", "ddp,palsgd").code == 0
    said = palsgd("compare", *common, "--methods", "diloco", "--force")
    assert said.code == 0
    assert set(records(out)) == {"diloco"}
    assert "palsgd" not in said.out.replace(str(out), "")


def test_simulated_and_real_runs_do_not_share_a_folder(tmp_path):
    out = tmp_path / "runs"
    common = ("train", "digits", *SHORT, "--no-report", "--out", out)
    assert palsgd(*common, "--simulate").code == 0
    said = palsgd(*common, "--resume")
    assert said.code == 2
    assert "was run with simulated=True, now it is False" in said.err


@pytest.mark.parametrize(
    ("flags", "reason"),
    [
        (("--simulate", "--out", "x"), "--simulate needs one process"),
        ((), "under torchrun give --out DIR"),
    ],
)
def test_what_torchrun_cannot_do_is_refused(monkeypatch, tmp_path, flags, reason):
    monkeypatch.chdir(tmp_path)
    for key, value in {"TORCHELASTIC_RUN_ID": "x", "RANK": "0", "WORLD_SIZE": "2"}.items():
        monkeypatch.setitem(os.environ, key, value)
    said = palsgd("train", "digits", "--workers", 2, *flags)
    assert said.code == 2
    assert reason in said.err


# -- disks -----------------------------------------------------------------------------------------

# The disk of worker 1 refuses what is written from its second checkpoint on.
REFUSES = """
import os, sys
if "palsgd.lab.worker_main" in sys.orig_argv and os.environ["RANK"] == "1":
    from palsgd import tensor_files

    def refused(path, mode, saves=[]):
        saves.append(path)
        if len(saves) > 1:
            number = int(os.environ["REFUSED_BY"])
            raise OSError(number, os.strerror(number))
        return open(path, mode)

    tensor_files.open = refused
"""


@pytest.mark.slow
@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EROFS], ids=["full", "read-only"])
def test_a_disk_that_refuses_one_worker_is_one_line_with_the_file_and_the_worker(
    tmp_path, monkeypatch, number
):
    (tmp_path / "sitecustomize.py").write_text(REFUSES)
    path = os.pathsep.join(filter(None, [str(tmp_path), os.environ.get("PYTHONPATH")]))
    monkeypatch.setenv("PYTHONPATH", path)
    monkeypatch.setenv("REFUSED_BY", str(number))
    out = tmp_path / "out"
    command = ("train", "digits", *SHORT, "checkpoint_every=1", "--no-report", "--out", out)
    said = apart(*command, "--quiet")
    assert said.code == 1
    saved, refused = out / "palsgd" / "checkpoints", "worker-1/rank-0.safetensors"
    assert said.line.startswith("palsgd: OSError: worker 1 could not save, so nothing was added ")
    assert f" {saved}/step-" in said.line
    assert said.line.endswith(f"{refused}: {os.strerror(number)}")
    assert len(list(saved.iterdir())) == 1  # the first one
    monkeypatch.setenv("PYTHONPATH", os.environ["PYTHONPATH"].replace(str(tmp_path), ""))
    assert apart(*command, "--quiet", "--resume").code == 0

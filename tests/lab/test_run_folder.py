"""The one reader and writer of a run's files: what it refuses, and what a kill may leave."""

import json

import pytest
import torch

from palsgd.lab import run_folder
from palsgd.lab.report import find_runs
from palsgd.lab.run_folder import RunFolder
from palsgd.lab.settings import Settings
from support import runs

GOOD = json.dumps(runs.line(100))
CONFIG = runs.config(Settings(workload="digits", steps=100))


def folder_with(path, metrics: str, *, finished: bool) -> RunFolder:
    runs.write_files(path, CONFIG, [])
    (path / "metrics.jsonl").write_text(metrics)
    if finished:
        (path / "summary.json").write_text("{}")
    return RunFolder(path)


@pytest.mark.parametrize("finished", [True, False])
@pytest.mark.parametrize("read", [RunFolder.lines, lambda folder: find_runs([folder.path])])
def test_a_bad_line_is_refused_with_its_number_whoever_reads_it(tmp_path, read, finished):
    folder = folder_with(tmp_path, f"{GOOD}\n{{oops\n{GOOD}\n", finished=finished)
    with pytest.raises(ValueError, match=r"metrics\.jsonl, line 2: not JSON: '{oops'"):
        read(folder)


def test_the_line_that_a_kill_cut_off_is_left_out_with_a_warning(tmp_path):
    folder = folder_with(tmp_path, GOOD + '\n{"step": 200, "gra', finished=False)
    with pytest.warns(UserWarning, match=r"the last line of .*metrics\.jsonl is cut off"):
        assert [line["step"] for line in folder.lines()] == [100]


@pytest.mark.parametrize("read", [RunFolder.lines, lambda folder: find_runs([folder.path])])
def test_a_finished_run_was_not_killed_so_its_last_line_must_be_whole(tmp_path, read):
    folder = folder_with(tmp_path, GOOD + '\n{"step": 200, "gra', finished=True)
    with pytest.raises(ValueError, match=r"metrics\.jsonl, line 2: not JSON"):
        read(folder)


def test_going_on_from_a_checkpoint_drops_the_lines_behind_it_and_the_one_cut_off(tmp_path, caplog):
    later = json.dumps(runs.line(200))
    folder = folder_with(tmp_path, f'{GOOD}\n{later}\n{{"ste', finished=False)
    folder.keep_lines(until_step=100, written=1)
    assert (tmp_path / "metrics.jsonl").read_text() == GOOD + "\n"
    assert not caplog.messages


def test_what_is_set_aside_never_takes_the_place_of_what_was_before(tmp_path, caplog):
    for count in (1, 2, 3):
        folder = folder_with(tmp_path, f"{count}\n{GOOD}\n", finished=False)
        folder.keep_lines(until_step=100, written=1)
        assert f"the file as it was is metrics.jsonl.old-{count}" in caplog.messages[-1]
        assert (tmp_path / f"metrics.jsonl.old-{count}").read_text() == f"{count}\n{GOOD}\n"
        assert [line["step"] for line in folder.lines()] == [100]
    folder.clear()
    assert list(tmp_path.iterdir()) == []


def test_the_best_model_is_read_back_and_needs_no_pickle(tmp_path):
    folder = RunFolder(tmp_path)
    assert folder.best() is None
    model = {"weight": torch.randn(2, 3), "count": torch.tensor(7)}
    folder.write_best({"step": 48, "metric": float("nan"), "model": model})
    best = folder.best()
    assert (best["step"], best["metric"]) == (48, None)
    assert all(torch.equal(best["model"][name], x) for name, x in model.items())
    safetensors = pytest.importorskip("safetensors.torch")  # as other programs read it
    assert safetensors.load_file(tmp_path / "best.safetensors").keys() == model.keys()


def test_a_best_model_that_is_damaged_is_one_line(tmp_path):
    (tmp_path / "best.safetensors").write_bytes(b"half")
    with pytest.raises(ValueError, match=r"best\.safetensors is not laid out as safetensors"):
        RunFolder(tmp_path).best()


def test_what_was_written_is_read_back_and_figures_that_are_no_numbers_are_null(tmp_path):
    folder = RunFolder(tmp_path / "run")
    folder.create(CONFIG)
    folder.append([runs.line(100, metric=0.5, loss=float("nan"))])
    folder.write_summary({"final_loss": float("inf")})
    assert folder.config() == CONFIG
    assert folder.lines() == [runs.line(100, metric=0.5) | {"loss": None}]
    assert folder.summary() == {"final_loss": None}
    assert folder.finished
    assert folder.timeline() == []


def test_a_whole_disk_is_not_searched_for_runs(tmp_path, monkeypatch):
    monkeypatch.setattr(run_folder, "_MOST_FOLDERS", 3)
    for name in "abc":
        (tmp_path / name).mkdir()
    with pytest.raises(ValueError, match=r"more than 3 folders in .*; give one that is nearer"):
        run_folder.find_runs([tmp_path])

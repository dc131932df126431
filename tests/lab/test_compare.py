"""Comparisons from the command line and from Python: seeds, controls, programs run once."""

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import yaml
from scipy import stats

import palsgd.lab
from palsgd.lab import run_set
from palsgd.lab.run_folder import find_runs
from palsgd.lab.tuning.tuned_file import write_tuned
from support.commands import environment, lines, records, summary
from support.commands import palsgd as command

SMALL = ("steps=24", "sync_every=4", "warmup_steps=4", "workers=2")
QUICKLY = ("--simulate", "--no-report", "--tuned", "none")
SETTINGS = {"steps": 24, "sync_every": 4, "warmup_steps": 4, "tuned": "none"}


@pytest.fixture(scope="module")
def seeded(tmp_path_factory):
    out = tmp_path_factory.mktemp("seeded") / "out"
    said = command("compare", "digits", *SMALL, *QUICKLY, "--methods", "ddp,palsgd", "--seed", 5,
                   "--seeds", 3, "--out", out)  # fmt: skip
    assert said.code == 0, said.err
    return out, said


@pytest.fixture
def counted(monkeypatch):
    """The names of the runs that are really run."""
    found, simulate = [], run_set.simulate_runs

    def count(runs, **how):
        found.extend(run.folder.path.name for run in runs)
        return simulate(runs, **how)

    monkeypatch.setattr(run_set, "simulate_runs", count)
    return found


# -- seeds -----------------------------------------------------------------------------------------


def test_seeds_are_counted_from_the_first_and_the_same_for_all_methods(seeded):
    out, _ = seeded
    folders = {run.folder.path.name: run.config["seed"] for run in find_runs([out])}
    assert folders == {
        f"{method},seed={seed}": seed for method in ("ddp", "palsgd") for seed in (5, 6, 7)
    }


def test_the_record_of_a_method_is_the_mean_over_its_seeds_with_intervals(seeded):
    out, _ = seeded
    own = [summary(out / f"palsgd,seed={seed}") for seed in (5, 6, 7)]
    record = records(out)["palsgd"]
    assert record["seeds"] == [5, 6, 7]
    for key in ("final_loss", "final_metric", "steps", "gradient_steps", "bytes_sent", "syncs"):
        assert record[key] == pytest.approx(np.mean([each[key] for each in own]))
    losses = [each["final_loss"] for each in own]
    found = record["final_loss_interval"]
    ends = stats.t.interval(0.95, 2, np.mean(losses), stats.sem(losses))
    assert (found["low"], found["high"], found["n"]) == (*map(pytest.approx, ends), 3)
    ddp = [summary(out / f"ddp,seed={seed}")["final_loss"] for seed in (5, 6, 7)]
    apart = np.subtract(losses, ddp) / np.mean(ddp)
    assert record["difference_interval"]["value"] == pytest.approx(np.mean(apart))
    assert "95% paired t interval over 3 seeds" in record["difference_interval"]["kind"]


def test_the_terminal_says_what_summary_json_says_first(seeded):
    out, said = seeded
    verdicts = summary(out)["verdicts"]
    assert " ".join(said.out.split()).startswith(" ".join(" ".join(verdicts).split()))
    assert "3 paired seeds" in verdicts[0]


def test_a_sweep_takes_seeds_in_one_way(tmp_path):
    said = command("sweep", "digits", "seed=1,2", *SMALL, "--simulate", "--seeds", 2,
                   "--out", tmp_path)  # fmt: skip
    assert (said.code, "both name seeds; give one" in said.line) == (2, True)


def test_no_seeds_are_refused(tmp_path):
    said = command("compare", "digits", "--seeds", 0, "--simulate", "--out", tmp_path / "x")
    assert said.code == 2
    assert "--seeds" in said.line


# -- programs that are run once --------------------------------------------------------------------


def test_four_names_of_one_program_are_run_once_and_have_no_speed_up(counted, tmp_path):
    said = command("compare", "digits", *SMALL, "warmup_steps=24", *QUICKLY, "--out", tmp_path)
    assert said.code == 0, said.err
    assert counted == ["ddp"]
    found = records(tmp_path)
    assert list(found) == ["ddp", "diloco", "localsgd", "palsgd"]
    for name in ("diloco", "localsgd", "palsgd"):
        assert found[name]["same_as"] == "ddp"
        assert found[name]["method"] == name
        assert lines(tmp_path / name) == lines(tmp_path / "ddp")
        assert yaml.safe_load((tmp_path / name / "config.yaml").read_text())["same_as"] == "ddp"
        assert f"{name} is the same program as ddp" in said.out
    assert " x " not in said.out
    assert "same_as" not in found["ddp"]


def test_ddp_is_run_once_for_a_seed_whatever_it_ignores(counted, tmp_path):
    said = command("sweep", "digits", "method=ddp,palsgd", "sync_every=2,4", "steps=12",
                   "warmup_steps=2", "workers=2", "--seeds", 2, "--simulate", "--no-report",
                   "--out", tmp_path)  # fmt: skip
    assert said.code == 0, said.err
    assert sum(name.startswith("method=ddp") for name in counted) == 2
    assert len(counted) == 2 + 4
    record = records(tmp_path)["method=ddp,sync_every=4"]
    assert record["same_as"] == "method=ddp,sync_every=2"
    assert record["final_loss_interval"]["n"] == 2


def test_linked_runs_are_neither_run_nor_refused_when_a_folder_is_resumed(counted, tmp_path):
    words = ("compare", "digits", *SMALL, "warmup_steps=24", *QUICKLY, "--methods", "ddp,palsgd",
             "--out", tmp_path)  # fmt: skip
    assert command(*words).code == 0
    said = command(*words, "--resume")
    assert said.code == 0, said.err
    assert counted == ["ddp"]


# -- tuned settings and controls -------------------------------------------------------------------


def write_file(path):
    write_tuned(path, {
        "workload": "digits",
        "conditions": {"workers": 2},
        "methods": {"ddp": {"settings": {"lr": 0.004}}, "palsgd": {"settings": {"lr": 0.003}}},
    })  # fmt: skip
    return path


def test_tuned_settings_are_each_methods_own_and_allow_verdicts(tmp_path):
    file = write_file(tmp_path / "mine.yaml")
    said = command("compare", "digits", *SMALL, "--methods", "ddp,palsgd", "--tuned", file,
                   "--seeds", 2, "--simulate", "--no-report", "--out", tmp_path / "x")  # fmt: skip
    assert said.code == 0, said.err
    configs = {run.method: run.config for run in find_runs([tmp_path / "x"])}
    assert {name: config["lr"] for name, config in configs.items()} == {
        "ddp": 0.004,
        "palsgd": 0.003,
    }
    assert configs["ddp"]["tuned"].startswith("mine.yaml ")
    verdicts = summary(tmp_path / "x")["verdicts"]
    assert any(word in verdicts[0] for word in ("better", "worse", "equivalent", "undecided"))
    assert "tuned by mine.yaml" in verdicts[-1]


@pytest.mark.parametrize(
    ("change", "why"),
    [("lr=0.001", "counts as untuned: lr as given"), ("workers=1", "was tuned with workers=2")],
)
def test_what_was_not_tuned_so_is_untuned_and_said(change, why, tmp_path):
    file = write_file(tmp_path / "mine.yaml")
    said = command("compare", "digits", *SMALL, change, "--methods", "ddp,palsgd", "--tuned", file,
                   "--simulate", "--no-report", "--out", tmp_path / "x")  # fmt: skip
    assert said.code == 0, said.err
    assert why in said.err
    assert all(run.config["tuned"] is None for run in find_runs([tmp_path / "x"]))


def test_controls_are_run_beside_the_methods_and_tell_the_parts_apart(tmp_path):
    said = command("compare", "digits", *SMALL, *QUICKLY, "--methods", "ddp,palsgd", "--seeds", 2,
                   "--controls", "--out", tmp_path)  # fmt: skip
    assert said.code == 0, said.err
    assert list(records(tmp_path)) == [
        "ddp", "palsgd", "palsgd-no-pull", "diloco-same-settings", "diloco-raised-lr",
        "diloco-equal-gradients", "ddp-accumulated",
    ]  # fmt: skip
    parts = [each for each in summary(tmp_path)["verdicts"] if each.startswith("Of palsgd's")]
    assert all(word in parts[0] for word in ("raised learning rate", "skipping", "the pull"))


# -- from Python -----------------------------------------------------------------------------------


def test_importing_the_lab_loads_neither_torch_nor_pandas():
    code = "import sys, palsgd.lab; print(sorted({'torch', 'pandas', 'numpy'} & set(sys.modules)))"
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True,
                          env=environment(), check=True)  # fmt: skip
    assert said.stdout.strip() == "[]"


def test_compare_from_python_has_a_row_for_each_run_and_evaluation(seeded, monkeypatch):
    found = palsgd.lab.compare("digits", ["ddp", "palsgd"], workers=2, seeds=3, seed=5, **SETTINGS)
    out, _ = seeded
    frame = found.frame
    for run, rows in frame.groupby("run"):
        evaluated = [line for line in lines(out / run) if "metric" in line]
        assert rows.loss.tolist() == pytest.approx([line["loss"] for line in evaluated])
        assert rows.step.tolist() == [line["step"] for line in evaluated]
    assert set(frame.label) == {"ddp", "palsgd"}
    assert found.verdicts == summary(out)["verdicts"]
    monkeypatch.setattr("palsgd.lab.report.write_report", lambda *of_what: of_what)
    assert found.report("page.html") == ([found.folder], Path("page.html"))


def test_files_without_out_are_gone_with_the_result(tmp_path):
    found = palsgd.lab.compare("digits", "ddp", workers=2, **SETTINGS)
    folder = found.folder
    assert (folder / "ddp" / "metrics.jsonl").exists()
    del found
    assert not folder.exists()
    kept = palsgd.lab.compare("digits", "ddp", workers=2, out=tmp_path / "kept", **SETTINGS).folder
    assert (kept / "summary.json").exists()


def test_sweep_from_python_tries_all_values_that_are_lists():
    found = palsgd.lab.sweep("digits", method=["ddp", "palsgd"], lr=[0.001, 0.002], steps=8,
                             sync_every=4, warmup_steps=0, workers=2)  # fmt: skip
    ends = found.frame.groupby(["method", "lr"]).step.max()
    assert ends.to_dict() == {(m, lr): 8 for m in ("ddp", "palsgd") for lr in (0.001, 0.002)}


def test_a_misspelt_setting_is_refused_before_anything_runs():
    with pytest.raises(ValueError, match="there is no setting 'stepz'; did you mean"):
        palsgd.lab.compare("digits", "ddp", stepz=3)

"""Run folders of somebody else: nothing they name is run, and what is wrong in them is one line."""

import json

import pytest
import yaml

from palsgd.lab import workloads
from palsgd.lab.report import terminal_table
from palsgd.lab.run_folder import find_runs
from palsgd.lab.timing import record
from palsgd.lab.tuning.tuned_file import SHIPPED, read_tuned, tuned_settings
from support import runs
from support.commands import palsgd

EVIL = """
import pathlib
import palsgd
import palsgd.lab.workload

pathlib.Path(__file__).with_name("ran").mkdir(exist_ok=True)


class Evil(palsgd.Method):
    pass


class Work(palsgd.lab.workload.Workload):
    pass
"""


@pytest.fixture
def evil(tmp_path):
    """A file that leaves a trace when it is imported."""
    path = tmp_path / "theirs" / "evil.py"
    path.parent.mkdir()
    path.write_text(EVIL)
    return path


def changed(path, **values):
    found = yaml.safe_load(path.read_text())
    path.write_text(yaml.safe_dump(found | values, sort_keys=False))


@pytest.mark.parametrize("link", [None, "100mbit,20ms,step=50ms"])
@pytest.mark.parametrize("names", [{"method": "Evil"}, {"workload": "Work"}])
def test_a_report_imports_nothing_that_a_run_folder_names(evil, names, link):
    folder = runs.write_comparison(evil.parent / "runs", methods=("ddp", "palsgd"), steps=200)
    own = {field: f"{evil}:{name}" for field, name in names.items()}
    for run in ("ddp", "palsgd") if "workload" in names else ("palsgd",):
        changed(folder / run / "config.yaml", **own, simulated=True, parameters=1000)
    try:
        terminal_table([folder], link)
    except ValueError as error:
        assert "cannot be projected" in str(error)  # noqa: PT017 (either is right)
    assert not (evil.parent / "ran").exists()
    with pytest.raises(ValueError, match=r"lacks load|Evil is no workload"):
        workloads.kind(*own.values())  # which imports it, and leaves the trace
    assert (evil.parent / "ran").exists()


def test_tuned_settings_cannot_name_code(evil):
    tuned = evil.parent / "tuned.yaml"
    for name in ("method", "workload"):
        found = yaml.safe_load((SHIPPED / "digits.yaml").read_text())
        found["methods"]["palsgd"]["settings"][name] = f"{evil}:Evil"
        tuned.write_text(yaml.safe_dump(found))
        read_tuned.__globals__["_read"].cache_clear()
        with pytest.raises(ValueError, match=f"sets {name} for 'palsgd'; leave it out"):
            tuned_settings(tuned, "palsgd", workloads.recipe("digits"))
    assert not (evil.parent / "ran").exists()


CONFIGS = [
    ({"batch_size": "x"}, "batch_size='x' must be a whole number"),
    ({"workers": [4]}, r"workers=\[4\] must be a whole number"),
    ({"target": "digits"}, "target='digits' must be a number"),
    ({"lr": None}, "lr=None must be a number"),
    ({"parameters": "many"}, "parameters='many' must be a whole number"),
    ({"floor": "low"}, "floor='low' must be a finite number"),
    ({"simulated": "yes"}, "simulated='yes' is neither True nor False"),
    ({"same_as": "../../elsewhere"}, "is not the name of a run beside this one"),
    ({"twin_of": "../../elsewhere"}, "is not the name of a run beside this one"),
    ({"program": ["../x"]}, "is not the name of a run beside this one"),
    ({"program": 3}, "program=3 must be a list of runs"),
]


@pytest.mark.parametrize(("values", "said"), CONFIGS)
def test_a_config_whose_fields_are_of_another_kind_is_refused(tmp_path, values, said):
    folder = runs.write_run(tmp_path / "x" / "ddp", method="ddp", steps=200)
    changed(folder / "config.yaml", **values)
    with pytest.raises(ValueError, match=rf"config\.yaml: .*{said}.*; restore it or leave"):
        find_runs([folder.parent])


def test_a_figure_that_is_none_is_refused(tmp_path):
    folder = runs.write_run(tmp_path / "x" / "ddp", method="ddp", steps=200)
    found = json.loads((folder / "summary.json").read_text())
    (folder / "summary.json").write_text(json.dumps(found | {"final_loss": "low"}))
    with pytest.raises(ValueError, match=r"summary\.json: final_loss='low' must be .* delete it"):
        find_runs([folder.parent])


SESSIONS = [
    ("has no 'machine'", {"link": None, "backend": "gloo"}),
    ("repetitions=0", {"link": None, "backend": "x", "machine": "m", "repetitions": 0}),
    ("object is not", 3),
]


@pytest.mark.parametrize(("said", "session"), SESSIONS)
def test_timings_that_are_none_are_refused(tmp_path, said, session):
    parts = ["computing", "mixing", "waiting", "exchanging"]
    whole = {"schema": 1, "parts": parts, "sessions": [session]}
    (tmp_path / "timing.json").write_text(json.dumps(whole))
    with pytest.raises(ValueError, match=rf"timing\.json cannot be read .*{said}.*; delete it"):
        record.read(tmp_path)


@pytest.mark.parametrize("name", ["config.yaml", "metrics.jsonl", "summary.json"])
def test_a_report_of_garbage_is_one_line_and_exit_code_2(tmp_path, name):
    folder = runs.write_run(tmp_path / "x" / "ddp", method="ddp", steps=200)
    (folder / name).write_bytes(b"\xff\xfe[[[[{")
    said = palsgd("report", tmp_path / "x")
    assert said.code == 2
    assert name in said.line

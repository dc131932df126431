"""Tables follow from records, and records from a commit."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent
RESULTS = ROOT / "bench" / "results"
ORIGIN = {"commit", "dirty", "command", "tiny", "machine"}
# Records made before records said where they come from. Whoever makes one anew removes it here.
OLDER = {
    "cluster-2cores",
    "exogym-epyc2",
    "exogym-epyc2-cnn-again",
    "link-epyc2",
    "quality-h200",
    "simulate-h200",
    "step-epyc2",
    "step-xeon16",
    "workloads-h200",
    "workloads-h200-compiled",
}

# Records that the text names and that are still to be made. Whoever makes one removes it here.
AWAITED: set[str] = set()
# Cases of the lab's record that are still to be measured.
AWAITED_CASES = {"sweep"}


def named_records():
    """Those that the text about the benchmarks speaks of."""
    text = (ROOT / "bench" / "README.md").read_text()
    return sorted(set(re.findall(r"results/([\w-]+)\.json", text)))


def records():
    return sorted(path.stem for path in RESULTS.glob("*.json"))


def check_tables(*files):
    command = [sys.executable, str(ROOT / "bench" / "tables.py"), "--check", *map(str, files)]
    return subprocess.run(command, capture_output=True, text=True, timeout=120)


def test_tables_are_those_of_their_records():
    done = check_tables()
    assert (done.returncode, done.stdout) == (0, ""), done.stdout + done.stderr


def test_a_figure_changed_by_hand_is_found(tmp_path):
    text = (ROOT / "docs" / "cluster.md").read_text()
    changed = tmp_path / "changed.md"
    changed.write_text(text.replace("| 0.390 s |", "| 0.389 s |"))
    assert changed.read_text() != text
    done = check_tables(changed)
    assert done.returncode == 1
    assert "changed.md: table validate-cluster differs from its record" in done.stdout


def test_a_table_nobody_makes_is_refused(tmp_path):
    page = tmp_path / "page.md"
    page.write_text("<!-- table: nobody -->\n<!-- end -->\n")
    done = check_tables(page)
    assert done.returncode == 1
    assert "table: nobody is unknown; use one of step-summary" in done.stderr


def test_the_table_of_syncs_has_a_row_for_each_contender_of_each_case(monkeypatch, tmp_path):
    monkeypatch.syspath_prepend(str(ROOT / "bench"))
    import tables

    ms = {"median": 20.0, "least": 19.0, "most": 21.5}
    over = {"localsgd": {"torch": ms}, "diloco": {"torch": ms, "localsgd": ms}}
    case = {"parameters": 8054656, "processes": 4, "ms": {"localsgd": ms, "torch": ms}}
    record = {"rows": [case | {"over": over}]}
    (tmp_path / "sync-2cores.json").write_text(json.dumps(record))
    monkeypatch.setattr(tables, "RESULTS", tmp_path)
    rows = tables.TABLES["sync"]().splitlines()[2:]
    assert rows[0].startswith("| 8,054,656, 4 | localsgd | 20.0 (19.0, 21.5) |  | 20.00 (")
    assert len(rows) == 2


def test_the_readmes_table_is_made_from_the_record_of_peers(monkeypatch, tmp_path):
    """By hand: the loss falls from 2 to 1.01 between steps 2 and 4, so it is 1.0201 at step 3.98; a
    step takes 0.5 s and 0.25 s, in every block."""
    monkeypatch.syspath_prepend(str(ROOT / "bench"))
    monkeypatch.syspath_prepend(str(ROOT / "bench" / "peers"))
    import tables

    quality = [
        {"training": training, "steps": 4, "seed": seed, "curve": [[2, 2.0], [4, 1.01]]}
        for training in ("ddp", "palsgd")
        for seed in (1, 2)
    ]
    pace = {"ddp": {"step_s": [0.5, 0.5]}, "palsgd": {"step_s": [0.25, 0.25]}}
    record = {"quality": quality, "pace": {"10mbit": pace}}
    (tmp_path / "peers-2cores.json").write_text(json.dumps(record))
    monkeypatch.setattr(tables, "RESULTS", tmp_path)
    rows = tables.TABLES["peers-summary"]().splitlines()
    assert rows[0] == "| seconds to 1.01 x DDP's loss, 2 seeds, 95% intervals | 10mbit |"
    assert rows[2:] == ["| torch DDP | 1.99 [1.99, 1.99] |", "| PALSGD | 0.995 [0.995, 0.995] |"]


@pytest.mark.parametrize("name", named_records())
def test_a_record_that_the_text_names_is_there(name):
    if name in AWAITED:
        assert name not in records(), f"{name}.json has been made: not in AWAITED"
    else:
        assert name in records(), f"bench/README.md names results/{name}.json, which is missing"


def test_the_record_of_the_labs_commands_has_every_case_and_none_broke(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "bench"))
    import lab

    record = json.loads((RESULTS / "lab-h200.json").read_text())
    assert record["machine"]["gpu"] is not None
    assert set(lab.CASES) - set(record["cases"]) == AWAITED_CASES
    for name, row in record["cases"].items():
        assert "failed" not in row, f"{name}: {row}"
        assert row["command_s"] > 20, f"{name} is too short to measure anything"


@pytest.mark.parametrize("name", records())
def test_a_record_is_no_tiny_one_and_says_where_it_comes_from(name):
    record = json.loads((RESULTS / f"{name}.json").read_text())
    assert not record.get("tiny"), f"{name}.json was made with --tiny, which measures nothing"
    if name in OLDER:
        assert not record.keys() >= ORIGIN, f"{name}.json says where it comes from: not in OLDER"
    else:
        assert record.keys() >= ORIGIN
        assert re.fullmatch(r"[0-9a-f]{7,40}", record["commit"])

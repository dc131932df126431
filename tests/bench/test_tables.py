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


def settings_of(method, loss, over=None, **given):
    blank = dict.fromkeys(
        ("lr", "outer_lr", "outer_momentum", "sync_every", "mix_prob", "mix_rate", "pull", "decay")
    )
    over = None if over is None else {"value": over, "low": over, "high": over}
    return {"method": method, "given": blank | given, "loss": {"value": loss}, "over_plain": over}


@pytest.fixture
def made_of(monkeypatch, tmp_path):
    """The table that a function makes of one part with these settings."""
    monkeypatch.syspath_prepend(str(ROOT / "bench"))
    import experiment_tables
    import mixing_tables

    def table(function, settings, *more):
        (tmp_path / "made").mkdir(exist_ok=True)
        record = {"parts": {"part": {"settings": settings}}}
        (tmp_path / "made" / "summary.json").write_text(json.dumps(record))
        monkeypatch.setattr(experiment_tables, "EXPERIMENTS", tmp_path)
        text = getattr(mixing_tables, function)("made", "part", *more)
        return [re.split(r" ?\| ?", row)[1:-1] for row in text.splitlines() if "---" not in row]

    return table


def one_grid():
    """DiLoCo trains at two of three points. Where it does not, the pull does most."""
    for lr, diloco, none, weak, strong in (
        (0.1, 1.0, 1.0, 1.1, 1.21), (0.2, 1.5, 1.5, 1.8, 2.7), (0.3, 2.5, 2.5, 1.5, 1.2)
    ):  # fmt: skip
        yield settings_of("diloco", diloco, lr=lr, sync_every=8)
        for pull, loss in ((0.0, none), (0.25, weak), (0.5, strong)):
            yield settings_of("palsgd", loss, loss / diloco - 1, lr=lr, sync_every=8, pull=pull)


def test_a_map_counts_the_points_that_train_and_compares_where_diloco_does(made_of):
    rows = {row[1]: row for row in made_of("grid_map", list(one_grid()))}
    assert rows["diloco"][2:] == ["1.0000", "1 of 3", "2 of 3", "", "", ""]
    assert rows["palsgd, pull 0.5"][2:5] == ["1.2000", "0 of 3", "2 of 3"]
    assert rows["palsgd, pull 0.5"][5].startswith("+50.5% ["), "of two points, not of three"
    assert rows["palsgd, pull 0.5"][6:] == ["+50.5%", "+80.0%"], "the median and the worst"


def test_a_run_that_ended_without_a_loss_does_not_train(made_of):
    settings = [settings_of("diloco", loss, lr=lr, sync_every=8)
                for lr, loss in ((0.1, 1.0), (0.2, None))]  # fmt: skip
    (row,) = made_of("grid_map", settings)[1:]
    assert row[2:5] == ["1.0000", "1 of 2", "1 of 2"]


def test_pulls_are_compared_at_the_same_point_where_diloco_trains(made_of):
    rows = made_of("stronger_pulls", list(one_grid()))
    assert rows[0] == ["H", "pull 0.25 over 0", "pull 0.5 over 0.25"]
    assert [row[0] for row in rows[1:]] == ["8", "all"]
    assert rows[1][1].startswith("+15.0% ["), "the mean of 10% and 20%"
    assert rows[1][2].startswith("+30.0% ["), "the mean of 10% and 50%"
    assert rows[1][1:] == rows[2][1:]


def test_points_that_diverged_are_counted_and_have_no_share(made_of):
    settings = [*one_grid(), settings_of("diloco", 1.2, lr=0.4, sync_every=8)]
    for pull in (0.0, 0.25, 0.5):
        own = settings_of("palsgd", None if pull == 0.5 else 1.2, 0.0, lr=0.4, sync_every=8,
                          pull=pull)  # fmt: skip
        own["over_plain"]["value"] = None if pull == 0.5 else 0.0
        settings.append(own)
    row = next(row for row in made_of("grid_map", settings) if row[1] == "palsgd, pull 0.5")
    assert row[5].endswith("without 1 diverged")
    assert row[7] == "diverged"
    assert made_of("stronger_pulls", settings)[1][2].endswith("without 1 diverged")


def test_a_pull_that_alone_ended_is_not_compared_with_one_that_diverged(made_of):
    settings = [settings_of("palsgd", loss, 0.0, lr=lr, sync_every=8, pull=pull)
                for lr, pull, loss in ((0.1, 0.0, 1.0), (0.1, 0.5, 1.1), (0.2, 0.0, None),
                                       (0.2, 0.5, 1.0))]  # fmt: skip
    settings += [settings_of("diloco", 1.0, lr=lr, sync_every=8) for lr in (0.1, 0.2)]
    (row, _) = made_of("stronger_pulls", settings)[1:]
    assert row[1] == "+10.0%, without 1 diverged"


def test_a_grid_of_which_nothing_ended_has_no_point_near_its_best(made_of):
    settings = [settings_of("diloco", None, lr=lr, sync_every=8) for lr in (0.1, 0.2)]
    (row,) = made_of("grid_map", settings)[1:]
    assert row[3:5] == ["0 of 2", "0 of 2"]


def test_an_outer_step_is_compared_with_the_best_at_the_same_h_and_learning_rate(made_of):
    losses = {(8, 0.1): (1.0, 1.1), (8, 0.2): (3.0, 2.0), (8, 0.3): (None, 6.0),
              (16, 0.1): (5.0, 6.0), (16, 0.2): (None, None), (32, 0.2): (None, None)}  # fmt: skip
    settings = [
        settings_of("diloco", loss, lr=lr, sync_every=h, outer_lr=outer, outer_momentum=0.5)
        for (h, lr), both in losses.items() for outer, loss in zip((0.4, 0.8), both, strict=True)
    ]  # fmt: skip
    settings.append(settings_of("localsgd", 0.1, lr=0.1, sync_every=8))
    assert made_of("outer_steps", settings) == [
        ["H", "method", "0.4, 0.5", "0.8, 0.5"],
        ["8", "diloco", "+50.0%, diverged", "+0.0%, +10.0%"],
        ["16", "diloco", "+0.0%, +0.0%", "+20.0%, +20.0%"],
        ["32", "diloco", "diverged", "diverged"],
    ]


def test_the_best_of_a_search_is_beside_each_control_that_is_another_program(made_of):
    own = settings_of("palsgd", 1.0, 0.07, lr=0.03, sync_every=8, outer_lr=0.4, outer_momentum=0.9,
                      pull=0.5)  # fmt: skip
    controls = {"equal-gradients": 0.02, "raised-lr": 0.06, "no-pull": -0.01}
    own["over_controls"] = {key: dict.fromkeys(("value", "low", "high"), value)
                            for key, value in controls.items()}  # fmt: skip
    others = [settings_of("diloco", 1.0, sync_every=8), settings_of("palsgd-no-pull", 1.0, 0.0)]
    _, row = made_of("best_beside_controls", [*others, own])
    assert row[:2] == ["8", "0.03, 0.4, 0.9, 0.5"]
    assert [cell.split(" ")[0] for cell in row[2:]] == ["+7.0%", "+2.0%", "+6.0%", "-1.0%"]
    own["given"]["pull"] = 0.0
    assert made_of("best_beside_controls", [own])[1][-1] == ""


def test_a_map_has_rows_by_learning_rate_where_that_varies(made_of):
    settings = [
        settings_of("palsgd", 1.0, over, lr=lr, sync_every=8, mix_prob=0.1, pull=pull)
        for lr, pull, over in ((0.01, 0.0, 0.01), (0.01, 0.5, 0.02), (0.03, 0.0, 0.03),
                               (0.03, 0.5, 0.04))
    ]  # fmt: skip
    rows = made_of("pull_map", settings, 0)
    assert rows[0] == ["H", "lr", "p", "pull 0", "pull 0.5"]
    assert [[*row[:3], row[3][:3], row[4][:3]] for row in rows[1:]] == [
        ["8", "0.01", "0.1", "+1%", "+2%"], ["8", "0.03", "0.1", "+3%", "+4%"]
    ]  # fmt: skip
    one = made_of("pull_map", settings[:2], 0)
    assert one[0] == ["H", "p", "pull 0", "pull 0.5"]


def test_a_published_figure_varies_one_of_eta_and_p(made_of):
    settings = [
        settings_of("palsgd", 1.0, over, lr=0.01, sync_every=8, mix_prob=p, mix_rate=eta)
        for p, eta, over in ((0.1, 1, 0.01), (0.1, 2, 0.02), (0.1, 4, 0.03), (0.5, 2, 0.2))
    ]
    by_eta = made_of("published_map", settings, "mix_rate")
    assert by_eta[0] == ["eta", "lr 0.01, H = 8"]
    assert [row[0] for row in by_eta[1:]] == ["1", "2", "4"]
    assert by_eta[2][1].startswith("+2.0%"), "at p = 0.1, which most have"
    by_p = made_of("published_map", settings, "mix_prob")
    assert [[*row[:1], row[1][:6]] for row in by_p] == [
        ["p", "lr 0.0"], ["0.1", "+2.0% "], ["0.5", "+20.0%"]
    ]  # fmt: skip


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

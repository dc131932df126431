"""bench/time_to_target.py: rows follow from the lines of the runs, a miss is said to be one, and
what a record has is not run again."""

import json
import sys

import pytest

from support.commands import ran
from support.places import BENCH

SCRIPT = BENCH / "time_to_target.py"


@pytest.fixture(scope="module")
def time_rows():
    before = list(sys.path)
    sys.path.insert(0, str(BENCH))
    import time_rows

    yield time_rows
    sys.path[:] = before


def a_run(method, losses, *, seed=1, step_s=0.1, workers=2, H=None, p=None):
    """One that is evaluated every 20 steps, of which the model says that they take half as long."""
    lines = [
        {"step": step, "gradient_steps": step / 2, "time_s": step * step_s, "loss": loss,
         "projected_s": step * step_s / 2}
        for step, loss in zip(range(0, 20 * len(losses), 20), losses, strict=True)
    ]  # fmt: skip
    return {"case": f"k{workers}-{method}", "workers": workers, "method": method, "sync_every": H,
            "mix_prob": p, "seed": seed, "loss": losses[-1], "step_s": step_s,
            "lines": lines}  # fmt: skip


def values(row):
    return {name: found["value"] for name, found in row.items() if isinstance(found, dict)}


# -- rows ------------------------------------------------------------------------------------------


def test_a_row_reads_everything_where_the_line_between_two_evaluations_meets_the_target(time_rows):
    """By hand: the target is 1.02 x 1 = 1.02. DDP falls from 2 to 1 between steps 20 and 40, and is
    there at step 39.6; DiLoCo falls from 3 to 0.98 between steps 0 and 20, at step 1.98 / 2.02 x
    20, in steps that are half as long."""
    runs = [a_run("diloco", [3.0, 0.98, 0.97], H=20, p=0.0, step_s=0.05),
            a_run("ddp", [3.0, 2.0, 1.0])]  # fmt: skip
    ddp, diloco = time_rows.rows(runs, 0.02)
    assert (ddp["method"], diloco["method"]) == ("ddp", "diloco")
    assert ddp["target"] == diloco["target"] == pytest.approx(1.02)
    assert values(ddp) == pytest.approx(
        {"loss": 1.0, "steps": 39.6, "gradient_steps": 19.8, "seconds": 3.96, "of_ddp": 1.0,
         "step_ms": 100.0, "projected_seconds": 1.98, "over_projected": 2.0}
    )  # fmt: skip
    step = 20 * 1.98 / 2.02
    assert values(diloco) == pytest.approx(
        {"loss": 0.97, "steps": step, "gradient_steps": step / 2, "seconds": step / 20,
         "of_ddp": step / 20 / 3.96, "step_ms": 50.0, "projected_seconds": step / 40,
         "over_projected": 2.0}
    )  # fmt: skip


def test_the_target_is_of_the_mean_of_ddp_over_seeds_at_the_same_k(time_rows):
    runs = [a_run("ddp", [3.0, 1.0], seed=1), a_run("ddp", [3.0, 1.02], seed=2),
            a_run("ddp", [3.0, 2.0], seed=1, workers=4)]  # fmt: skip
    assert [row["target"] for row in time_rows.rows(runs, 0.02)] == pytest.approx(
        [1.02 * 1.01, 1.02 * 2]
    )


def test_a_run_that_misses_the_target_has_no_time_and_the_row_says_how_many_do(time_rows):
    runs = [a_run("ddp", [2.0, 1.0], seed=seed) for seed in (1, 2)]
    runs += [a_run("palsgd", [2.0, final], seed=seed, H=20, p=0.1)
             for seed, final in ((1, 1.0), (2, 1.5))]  # fmt: skip
    row = time_rows.rows(runs, 0.02)[1]
    assert (row["missed"], row["seeds"]) == (1, 2)
    assert row["loss"]["n"] == 2
    assert row["seconds"]["n"] == row["of_ddp"]["n"] == 1
    assert time_rows.cells(row)[5] == "20; missed by 1 of 2 seeds"


def test_where_all_seeds_miss_the_target_there_is_no_figure_of_it(time_rows):
    runs = [a_run("ddp", [2.0, 1.0]), a_run("palsgd", [2.0, 1.5], H=20, p=0.1)]
    row = time_rows.rows(runs, 0.02)[1]
    found = dict(zip(time_rows.COLUMNS, time_rows.cells(row), strict=True))
    assert found["steps to the target"] == "missed by 1 of 1 seeds"
    shown = [name for name, cell in found.items() if cell]
    assert shown == ["K", "method", "H", "p", "final loss", "steps to the target",
                     "ms a step after the warm-up"]  # fmt: skip


def test_a_run_that_diverged_misses_the_target(time_rows):
    failed = a_run("palsgd", [2.0, 1.0], H=20, p=0.1) | {"loss": None, "step_s": None, "lines": []}
    row = time_rows.rows([a_run("ddp", [2.0, 1.0]), failed], 0.02)[1]
    assert row["missed"] == 1
    assert values(row) == {}


def test_without_ddp_beside_it_a_row_has_no_target(time_rows):
    (row,) = time_rows.rows([a_run("diloco", [2.0, 1.0], H=20, p=0.0)], 0.02)
    assert time_rows.cells(row)[4:7] == ("1.0000", "no DDP beside it", "")


def test_shares_of_ddps_seconds_are_taken_within_a_seed(time_rows):
    """The second seed was three times as slow for all: the seconds differ, the share does not."""
    falling = [2.0, 1.0]
    runs = []
    for seed, slow in ((1, 0.1), (2, 0.3)):
        runs.append(a_run("ddp", falling, seed=seed, step_s=slow))
        runs.append(a_run("diloco", falling, seed=seed, step_s=slow / 4, H=20, p=0.0))
    row = time_rows.rows(runs, 0.02)[1]
    found = dict(zip(time_rows.COLUMNS, time_rows.cells(row), strict=True))
    assert found["of DDP's seconds"] == "0.25"
    assert found["seconds"].startswith("1.0 [")


# -- the table -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "file"),
    [("time-to-target", "time-2cores"), ("time-to-target-1gbit", "time-1gbit-2cores")],
)
def test_the_table_is_of_the_records_rows_and_says_if_there_is_no_record(
    time_rows, monkeypatch, tmp_path, name, file
):
    import tables

    monkeypatch.setattr(tables, "RESULTS", tmp_path)
    assert tables.TABLES[name]() == tables.NO_RECORD
    machine = {"device": "AMD EPYC", "cores": 2, "torch": "2.15.0"}
    rows = time_rows.rows([a_run("ddp", [3.0, 2.0, 1.0])], 0.02)
    (tmp_path / f"{file}.json").write_text(json.dumps({"machine": machine, "rows": rows}))
    place, _, head, _, row = tables.TABLES[name]().splitlines()
    assert place == "2-core AMD EPYC, torch 2.15"
    assert head.startswith("| K | method | H | p | final loss | steps to the target |")
    assert row == "| 2 | DDP |  |  | 1.0000 | 40 | 20 | 4.0 | 1.00 | 100.0 | 2.0 | 2.00 x |"


# -- the script ------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    out = tmp_path_factory.mktemp("time") / "record.json"
    said = ran(SCRIPT, "--tiny", "--out", out, timeout=280)
    assert said.code == 0, said.err[-2000:]
    return out, said


@pytest.mark.slow
def test_runs_have_their_own_lines_and_rows_follow_from_them(tiny, time_rows):
    record = json.loads(tiny[0].read_text())
    ddp, diloco, palsgd = record["runs"]
    assert [line["step"] for line in ddp["lines"]] == [0, 2, 4, 6, 8, 10, 12, 14]
    # After the warm-up of two steps the global model changes every four.
    assert [line["step"] for line in diloco["lines"]] == [0, 2, 6, 10, 14]
    assert (diloco["lines"][-1]["gradient_steps"], palsgd["lines"][-1]["gradient_steps"]) == (14, 7)
    for run in record["runs"]:
        assert run["loss"] == run["lines"][-1]["loss"]
        times = [line["time_s"] for line in run["lines"]]
        assert times == sorted(times)
    assert record["rows"] == time_rows.rows(record["runs"], 0.02)
    # DDP ends at 1 / 1.02 of the target, and falls in a straight line enough to say where.
    (before, after), row = ddp["lines"][-2:], record["rows"][0]
    share = (before["loss"] - row["target"]) / (before["loss"] - after["loss"])
    assert 0 < share < 1
    assert row["steps"]["value"] == pytest.approx(12 + 2 * share)
    assert [row["missed"] for row in record["rows"]] == [0, 1, 1]
    assert "missed by 1 of 1 seeds" in tiny[1].out


@pytest.mark.slow
def test_runs_that_the_record_has_are_not_run_again(tiny):
    out, first = tiny
    assert first.err.count(", seed 11\n") == 3
    record = json.loads(out.read_text())
    lacking = record | {"runs": record["runs"][:2]}
    out.write_text(json.dumps(lacking))
    again = ran(SCRIPT, "--tiny", "--out", out, timeout=280)
    assert (again.code, again.err) == (0, "k2-h4-p0.5, seed 11\n")
    found = json.loads(out.read_text())
    assert found["runs"][:2] == record["runs"][:2]
    assert [run["case"] for run in found["runs"]] == [run["case"] for run in record["runs"]]
    assert ran(SCRIPT, "--tiny", "--out", out).err == ""
    assert json.loads(out.read_text()) == found


@pytest.mark.slow
def test_a_record_of_other_settings_is_refused_in_one_line(tiny, tmp_path):
    record = json.loads(tiny[0].read_text())
    other = tmp_path / "other.json"
    other.write_text(json.dumps(record | {"stated": record["stated"] | {"steps": 15}}))
    said = ran(SCRIPT, "--tiny", "--out", other)
    assert (said.code, said.line) == (1, f"{other} has runs with steps=15; use another --out")
    other.write_text("{}")
    said = ran(SCRIPT, "--tiny", "--out", other)
    assert said.line == f"{other} is no record of this benchmark; use another --out"

"""Runs in processes that were stopped and go on: whatever happened to the folder meanwhile, the run
ends as if nothing had been, or one line says what is wrong, and nothing is deleted."""

import json
import random
import shutil
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from palsgd.lab.run_folder import RunFolder
from palsgd.lab.settings import Settings
from support import lab_runs
from support.commands import lines, palsgd, summary

BASE = Settings(
    workload="digits", workers=2, steps=64, sync_every=8, mix_prob=0.25, pull=0.3, warmup_steps=8,
    evaluate_every=8, batch_size=16, inner="adamw", lr=2e-3, schedule="cosine", seed=3,
)  # fmt: skip
STOPPED = 40  # with the checkpoints of 32 and 40


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("runs")


@pytest.fixture(scope="module")
def whole(world, folder):
    """A run that was never stopped."""
    world.run(lab_runs.train, workers=2, settings=BASE, folder=folder / "whole" / "palsgd")
    return folder / "whole" / "palsgd"


@pytest.fixture(scope="module")
def stopped(world, folder):
    """One that was stopped, to be copied and damaged."""
    path = folder / "stopped" / "palsgd"
    world.run(lab_runs.train, workers=2, settings=BASE, folder=path, stop_at=STOPPED)
    assert RunFolder(path).saved_steps == [32, 40]
    return path


@pytest.fixture
def run(stopped, tmp_path):
    return Path(shutil.copytree(stopped, tmp_path / "out" / "palsgd"))


def untimed(record):
    return {name: value for name, value in record.items() if not name.endswith("_s")}


def assert_same(run, whole, *, lost=()):
    """Every figure but seconds, and every tensor. Lines of `lost` steps need not be there."""
    mine, theirs = (list(map(untimed, lines(each))) for each in (run, whole))
    assert mine == [line for line in theirs if line["step"] not in lost]
    if not lost:
        assert untimed(summary(run)) == untimed(summary(whole))
    assert spans(run) == spans(whole)
    best, wanted = RunFolder(run).best(), RunFolder(whole).best()
    assert (best["step"], best["metric"]) == (wanted["step"], wanted["metric"])
    for name, x in wanted["model"].items():
        assert torch.equal(best["model"][name], x)


def spans(run):
    """How many of each kind; nobody may have had to wait."""
    found = Counter((span["worker"], span["kind"]) for span in lines(run, "timeline"))
    return {key: count for key, count in found.items() if key[1] != "wait"}


def names(run):
    return {str(path.relative_to(run)) for path in run.rglob("*")}


def go_on(world, run, *, workers=2, settings=BASE, **how):
    """What rank 0 says."""
    return world.run(
        lab_runs.train, workers=workers, settings=settings, folder=run, resume=True, **how
    )[0].said


def refused(world, run, **how):
    outcomes = world.outcomes(
        lab_runs.train, workers=2, settings=BASE, folder=run, resume=True, **how
    )
    assert {outcome.error for outcome in outcomes} == {"ValueError"}
    (said,) = {outcome.message for outcome in outcomes}
    return said


def test_a_stopped_run_goes_on_and_nobody_can_tell(world, run, whole):
    assert go_on(world, run) == []
    assert_same(run, whole)
    assert not (run / "checkpoints").exists()  # finished: none is needed


def test_a_checkpoint_is_never_ahead_of_the_lines(world, tmp_path):
    """Also one between evaluations, whose lines are joined for it."""
    settings = replace(BASE, evaluate_every=24, checkpoint_every=1)
    world.run(lab_runs.train, workers=2, settings=settings, folder=tmp_path / "whole")
    world.run(lab_runs.train, workers=2, settings=settings, folder=tmp_path / "run", stop_at=40)
    assert [line["step"] for line in lines(tmp_path / "run")][-1] == 40
    assert go_on(world, tmp_path / "run", settings=settings) == []
    assert_same(tmp_path / "run", tmp_path / "whole")


# -- damaged checkpoints ---------------------------------------------------------------------------


def newest(run):
    return run / "checkpoints" / "step-40"


def file_of(run, worker):
    (path,) = newest(run).glob(f"worker-{worker}/*")
    return path


def cut(path):
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def zero_block(path):
    content = bytearray(path.read_bytes())
    content[-4000:] = bytes(4000)
    path.write_bytes(content)


def flip_a_bit(path):
    content, rng = bytearray(path.read_bytes()), random.Random(0)
    content[rng.randrange(len(content))] ^= 1 << rng.randrange(8)
    path.write_bytes(content)


HARMLESS = {
    "nothing": lambda run: None,
    "leftovers of saves": lambda run: (run / "checkpoints" / "step-48.ab.part").mkdir(),
    "half a best model": lambda run: (run / "best.safetensors.1.part").write_bytes(b"half"),
    "half a config": lambda run: (run / "config.yaml.1.part").write_text("workl"),
    "a cut last line": lambda run: append(run, '{"step": 48, "grad'),
    "lines beyond the checkpoint": lambda run: append(run, json.dumps(lines(run)[-1] | {"step": 48})
                                                      + "\n"),
    "no report of the newest": lambda run: (run / "summary.json").unlink(missing_ok=True),
}  # fmt: skip
DAMAGE = {
    "cut": lambda run: cut(file_of(run, 1)),
    "empty": lambda run: file_of(run, 0).write_bytes(b""),
    "a zeroed block": lambda run: zero_block(file_of(run, 1)),
    "a flipped bit": lambda run: flip_a_bit(file_of(run, 0)),
    "a missing worker": lambda run: shutil.rmtree(newest(run) / "worker-1"),
    "a missing file": lambda run: file_of(run, 1).unlink(),
    "no manifest": lambda run: (newest(run) / "manifest.json").unlink(),
    "half a manifest": lambda run: cut(newest(run) / "manifest.json"),
    "an empty manifest": lambda run: (newest(run) / "manifest.json").write_text(""),
    "another manifest": lambda run: (newest(run) / "manifest.json").write_text("[1]"),
    "a foreign folder": lambda run: (run / "checkpoints" / "step-99999").mkdir(),
}


def append(run, text):
    with open(run / "metrics.jsonl", "a") as file:
        file.write(text)


@pytest.mark.parametrize("case", HARMLESS)
def test_what_a_kill_may_leave_is_not_worth_a_word(world, run, whole, case):
    HARMLESS[case](run)
    assert go_on(world, run) == []
    assert_same(run, whole)


@pytest.mark.parametrize("case", DAMAGE)
def test_a_damaged_checkpoint_is_passed_over_and_named(world, run, whole, case):
    DAMAGE[case](run)
    (said,) = go_on(world, run)
    name = "step-99999" if case == "a foreign folder" else "step-40"
    assert name in said
    assert ("step-40" if case == "a foreign folder" else "step-32") + " is loaded" in said
    assert_same(run, whole)


def test_nothing_is_deleted_where_no_checkpoint_can_be_read(world, run):
    for path in (run / "checkpoints").glob("step-*/worker-0/*"):
        cut(path)
    before = names(run)
    said = refused(world, run)
    assert "no save in" in said
    assert "step-40" in said
    assert "step-32" in said
    assert names(run) == before


def test_a_run_without_a_checkpoint_begins_at_step_0_and_says_so(world, run, whole):
    shutil.rmtree(run / "checkpoints")
    kept = (run / "metrics.jsonl").read_text()
    (said,) = go_on(world, run)
    assert said.startswith(f"palsgd: {run} starts over from step 0, as it has no checkpoint; what")
    assert_same(run, whole)
    assert (run / "metrics.jsonl.old-1").read_text() == kept
    for name in ("config.yaml", "best.safetensors"):
        assert f"{name}.old-1" in said
        assert (run / f"{name}.old-1").exists()


def test_a_run_that_had_recorded_no_step_begins_again_and_leaves_nothing_behind(world, run, whole):
    shutil.rmtree(run / "checkpoints")
    first = (run / "metrics.jsonl").read_text().splitlines()[0]
    (run / "metrics.jsonl").write_text(f"{first}\n")
    (said,) = go_on(world, run)
    assert said == f"palsgd: {run} starts over from step 0, as it has no checkpoint"
    assert_same(run, whole)
    assert not list(run.glob("*.old-*"))


def test_a_folder_that_holds_a_run_is_not_begun_in(world, run):
    before = names(run)
    outcomes = world.outcomes(lab_runs.train, workers=2, settings=BASE, folder=run, timeout=2)
    assert outcomes[0].error == "ValueError"
    assert "holds a run; add --resume to go on with it, --force to start over" in (
        outcomes[0].message
    )
    assert names(run) == before


def test_a_missing_best_model_is_replaced_by_the_next_one(world, run, whole):
    (run / "best.safetensors").unlink()
    go_on(world, run)
    best = RunFolder(run).best()
    assert best["step"] > STOPPED
    after = [line for line in lines(whole) if line["step"] > STOPPED and "metric" in line]
    assert best["metric"] == max(line["metric"] for line in after)


def test_a_missing_config_is_written_again(world, run, whole):
    wanted = RunFolder(run).config()
    (run / "config.yaml").unlink()
    assert go_on(world, run) == []
    assert_same(run, whole)
    found = RunFolder(run).config()
    assert {k: v for k, v in found.items() if k != "command"} == {
        k: v for k, v in wanted.items() if k != "command"
    }


# -- damaged lines ---------------------------------------------------------------------------------


def in_the_middle(text):
    def damage(run):
        written = (run / "metrics.jsonl").read_text().splitlines()
        written[len(written) // 2] = text
        (run / "metrics.jsonl").write_text("\n".join(written) + "\n")

    return damage


def without_the_last_line(run):
    written = (run / "metrics.jsonl").read_text().splitlines()
    (run / "metrics.jsonl").write_text("\n".join(written[:-1]) + "\n")


LINES = {
    "no JSON": in_the_middle("{oops"),
    "no step": in_the_middle('{"loss": 1.0}'),
    "a list": in_the_middle("[1]"),
    "an empty line": in_the_middle(""),
    "a huge number": in_the_middle('{"step": ' + "9" * 400 + "}"),
    "deeply nested": in_the_middle("[" * 5000),
    "the last one is gone": without_the_last_line,
}


@pytest.mark.parametrize("case", LINES)
def test_a_line_that_is_lost_is_said_to_be_and_all_others_are_kept(world, run, whole, case):
    before = [line["step"] for line in lines(run)]
    LINES[case](run)
    damaged = (run / "metrics.jsonl").read_text()
    (said,) = go_on(world, run)
    path = run / "metrics.jsonl"
    assert said == (
        f"palsgd: {path} is damaged: of the {len(before)} lines up to step 40 1 are lost, and the "
        "run goes on without them; the file as it was is metrics.jsonl.old-1"
    )
    assert (run / "metrics.jsonl.old-1").read_text() == damaged
    gone = before[-1 if case == "the last one is gone" else len(before) // 2]
    assert_same(run, whole, lost={gone})


def test_lines_that_are_all_gone_are_said_to_be(world, run, whole):
    (run / "metrics.jsonl").unlink()
    (said,) = go_on(world, run)
    assert "lines up to step 40" in said
    assert "are lost, and the run goes on without them, as the file is gone" in said
    assert_same(run, whole, lost={line["step"] for line in lines(whole) if line["step"] <= 40})


# -- damaged settings ------------------------------------------------------------------------------

CONFIGS = {
    "garbage": b"workload: [digits\n}",
    "a tag": b"!!python/object/apply:os.system ['echo harm']\n",
    "empty": b"",
    "a list": b"- workload\n- method\n",
    "Latin-1": "workload: digits\nmethod: palsgd\nwho: M\u00fcller\n".encode("latin-1"),
    "400 digits": b"workload: digits\nmethod: palsgd\nworkers: " + b"9" * 400 + b"\n",
    "deeply nested": b"workload: " + b"[" * 5000,
    "aliases": b"a: &a [x, x]\nworkload: [*a, *a]\n",
    "changes of nothing": b"workload: digits\nmethod: palsgd\nchanges: 3\n",
    "wrong changes": b"workload: digits\nmethod: palsgd\nchanges: [{step: x}]\n",
    "a newer schema": b"workload: digits\nmethod: palsgd\nschema: 99\n",
}
WORDS = (
    "digits", "batch_size=16", "evaluate_every=8", "warmup_steps=8", "inner=adamw", "lr=0.002",
    "schedule=cosine", "--steps", 64, "--sync-every", 8, "--mix-prob", 0.25, "--pull", 0.3,
    "--seed", 3, "--no-report", "--quiet",
)  # fmt: skip


@pytest.mark.parametrize("case", CONFIGS)
def test_settings_that_cannot_be_read_are_one_line_whoever_reads_them(run, case):
    (run / "config.yaml").write_bytes(CONFIGS[case])
    before = names(run)
    for words in (
        ("train", *WORDS, "--workers", 2, "--resume", "--out", run.parent),
        ("compare", *WORDS, "--methods", "palsgd", "--workers", 2, "--resume", "--out", run.parent),
        ("report", run.parent),
    ):
        said = palsgd(*words)
        assert said.code == 2
        assert str(run / "config.yaml") in said.line
    assert names(run) == before


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (("--workers", 2, "--sync-every", 4), "was run with sync_every=8, now it is 4"),
        (("--workers", 2, "lr=0.1"), "was run with lr=0.002, now it is 0.1"),
        (("--simulate", "--workers", 2), "was run with simulated=False, now it is True"),
        ((), "was run with workers=2, now it is 4; use the old value, --elastic to go on with"),
    ],
    ids=lambda value: " ".join(map(str, value)) if isinstance(value, tuple) else "",
)
def test_other_settings_are_refused_and_nothing_is_touched(run, change, said):
    before = names(run)
    answer = palsgd("train", *WORDS, *change, "--resume", "--out", run.parent)
    assert answer.code == 2
    assert said in answer.line
    assert names(run) == before


def test_a_folder_with_results_is_used_again_by_force_alone(run):
    before = names(run)
    said = palsgd("train", *WORDS, "--workers", 2, "--out", run.parent)
    assert said.code == 2
    assert "exists and is not empty; add --resume to go on with it, --force to start" in said.line
    assert names(run) == before

"""Runs in real processes and simulated: the same numbers, the same files, and none of them lost."""

import json
import math
import os
import shlex
import signal
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pandas
import pytest
import torch
import torch.distributed as dist
import yaml

from palsgd.lab import launcher, run_set, workloads
from palsgd.lab.cli import output
from palsgd.lab.methods import default_names
from palsgd.lab.order import Job
from palsgd.lab.report import find_runs, write_report
from palsgd.lab.run_folder import RunFolder
from palsgd.lab.run_set import Options, run_all
from palsgd.lab.settings import Settings
from palsgd.lab.summary import summarize
from palsgd.lab.trainer import WARMUP_LINES, Trainer
from support.commands import (
    alive,
    apart,
    assert_same_run,
    children,
    lines,
    palsgd,
    records,
    saved_step,
    started,
    strict_json,
    summary,
    wait_for,
)
from support.patience import patient
from support.places import SHARED

METHODS = default_names()

pytestmark = pytest.mark.slow  # most tests share runs in real processes

# Of the checkpoints, every 3 rounds, some fall on evaluations and some do not: a resumed run must
# not notice. The syncs after them are not due for an evaluation, the one at the end excepted.
STEPS, WARMUP, H, EVERY = 400, 25, 16, 45
SYNCS = [*range(WARMUP + H, STEPS, H), STEPS]
FLAGS = (
    "--workers", 2, "--steps", STEPS, "--sync-every", H, "--mix-prob", 0.2, "--mix-rate", 4,
    "--seed", 7,
)  # fmt: skip
CHANGES = (f"evaluate_every={EVERY}", "checkpoint_every=3", f"warmup_steps={WARMUP}")
DIGITS = ("digits", *CHANGES, *FLAGS)
STORIES = (
    "stories", "batch_size=4", "warmup_steps=2", "evaluate_every=10", "--workers", 2, "--steps", 10,
    "--sync-every", 4, "--seed", 7,
)  # fmt: skip
# One of each: parts of a batch, bf16, a schedule, clipping.
SWEEP = (
    "micro_batches=1,4", "precision=fp32,bf16", "workers=2", "schedule=cosine",
    "lr_warmup_steps=6", "max_norm=0.5", "steps=40", "sync_every=8", "warmup_steps=8",
)  # fmt: skip
SUMMARY_KEYS = {
    "method", "workload", "workers", "seed", "simulated", "final_loss", "final_metric", "best_loss",
    "best_metric", "best_step", "steps", "gradient_steps", "syncs", "bytes_sent", "wall_s",
    "target", "steps_to_target", "gradient_steps_to_target", "time_to_target_s", "bytes_to_target",
    "metric_at_equal_steps", "metric_at_equal_gradients", "metric_at_equal_examples",
    "metric_at_equal_time", "waiting_s", "sync_s",
}  # fmt: skip
# Of a setting in its collection
COLLECTION_KEYS = SUMMARY_KEYS | {
    "seeds", "final_loss_interval", "final_metric_interval", "best_loss_interval",
    "best_metric_interval",
}  # fmt: skip
LINE_KEYS = {
    "step", "gradient_steps", "time_s", "bytes_sent", "syncs", "train_loss", "lr", "workers",
    "distance", "agreement",
}  # fmt: skip
MACHINE_KEYS = {
    "schema", "palsgd", "commit", "dirty", "command", "torch", "device", "simulated", "engine",
    "metric", "higher_is_better", "floor", "parameters",
}  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("runs")


@pytest.fixture(scope="module")
def real(folder):
    """The four methods in two processes."""
    said = apart("compare", *DIGITS, "--methods", ",".join(METHODS), "--out", folder / "real")
    assert said.code == 0, said.err
    return folder / "real"


@pytest.fixture(scope="module")
def simulated(folder):
    said = palsgd("compare", *DIGITS, "--methods", ",".join(METHODS), "--simulate",
                  "--out", folder / "simulated")  # fmt: skip
    assert said.code == 0, said.err
    return folder / "simulated"


@pytest.fixture(scope="module")
def stories(folder):
    """In two processes and simulated."""
    said = apart("compare", *STORIES, "--no-report", "--out", folder / "stories")
    assert said.code == 0, said.err
    there = folder / "stories-simulated"
    assert palsgd("compare", *STORIES, "--no-report", "--simulate", "--out", there).code == 0
    return folder / "stories", there


@pytest.fixture(scope="module")
def sweep(folder):
    """The same points in processes and simulated."""
    said = apart("sweep", "digits", *SWEEP, "--no-report", "--out", folder / "sweep")
    assert said.code == 0, said.err
    there = folder / "sweep-simulated"
    assert palsgd("sweep", "digits", *SWEEP, "--no-report", "--simulate", "--out", there).code == 0
    return folder / "sweep", there


both = pytest.mark.parametrize("which", ["real", "simulated"])
every_method = pytest.mark.parametrize("method", METHODS)


# -- files ---------------------------------------------------------------------------------------


@both
def test_compare_writes_every_documented_figure_for_each_method(which, request):
    out = request.getfixturevalue(which)
    found = records(out)
    assert list(summary(out)) == [*METHODS, "target", "verdicts"]
    assert summary(out)["target"] == {
        "value": pytest.approx(1.01 * found["ddp"]["final_loss"]), "on": "loss", "margin": 0.01,
        "source": "ddp's mean final loss over one seed + 1%",
    }  # fmt: skip
    for method, record in found.items():
        assert set(summary(out / method)) == SUMMARY_KEYS
        assert set(record) - {"difference_interval"} == COLLECTION_KEYS
        assert record.items() >= summary(out / method).items()
        assert record["seeds"] == [7]
        assert (record["method"], record["workload"]) == (method, "digits")
        assert (record["workers"], record["seed"], record["steps"]) == (2, 7, STEPS)
        assert record["simulated"] == (which == "simulated")
        assert 0 < record["final_loss"] < 1
        assert 0.8 < record["final_metric"] <= 1
        assert record["bytes_sent"] > 0
        assert (record["wall_s"] is None) == (which == "simulated")
        assert record["target"] == summary(out)["target"]["value"]
    assert found["ddp"]["syncs"] == found["ddp"]["gradient_steps"] == STEPS
    assert found["ddp"]["steps_to_target"] is not None
    assert (found["ddp"]["time_to_target_s"] is not None) == (which == "real")
    assert found["palsgd"]["syncs"] == found["diloco"]["syncs"] == WARMUP + len(SYNCS)
    assert found["palsgd"]["gradient_steps"] < found["diloco"]["gradient_steps"] == STEPS
    assert found["palsgd"]["bytes_sent"] < found["ddp"]["bytes_sent"] / 4
    assert (out / "report.html").stat().st_size > 10_000


@both
@every_method
def test_a_run_has_the_documented_lines_in_order(which, method, request):
    run = request.getfixturevalue(which) / method
    found = lines(run)
    keys = LINE_KEYS | ({"simulation_s"} if which == "simulated" else set())
    assert all(set(line) in (keys, keys | {"loss", "metric", "train_metric"}) for line in found)
    clock = "simulation_s" if which == "simulated" else "time_s"
    for key in ("step", "gradient_steps", clock, "bytes_sent", "syncs"):
        assert all(a[key] <= b[key] for a, b in pairwise(found)), key
    assert all(len(line["distance"]) == 2 for line in found)
    assert all(0 < line["train_loss"] < 3 for line in found[1:])
    syncs = [] if method == "ddp" else SYNCS
    local = [line for line in found if line["step"] > WARMUP and method != "ddp"]
    assert [line["step"] for line in local] == syncs
    assert all(0 < line["agreement"] <= 1 + 1e-6 and min(line["distance"]) > 0 for line in local)
    assert all(line["agreement"] is None for line in found if line not in local)
    assert len(found) <= len(syncs) + 2 * WARMUP_LINES
    record = summary(run)
    assert found[-1]["loss"] == record["final_loss"]
    assert found[-1]["step"] == record["steps"]
    assert found[-1]["time_s"] == record["wall_s"]


@both
@every_method
def test_the_model_is_evaluated_at_the_first_exchange_from_each_multiple_on(which, method, request):
    found = lines(request.getfixturevalue(which) / method)
    exchanges = range(1, STEPS + 1) if method == "ddp" else [*range(1, WARMUP + 1), *SYNCS]
    due = {next(x for x in exchanges if x >= multiple) for multiple in range(EVERY, STEPS, EVERY)}
    assert [line["step"] for line in found if "loss" in line] == [0, *sorted(due | {STEPS})]


@both
def test_config_tells_settings_and_machine(which, request):
    config = yaml.safe_load((request.getfixturevalue(which) / "palsgd/config.yaml").read_text())
    simulated = {"program", "warmup_computed_by"}
    machine = MACHINE_KEYS | (simulated if which == "simulated" else {"link"})
    assert set(config) == set(Settings(workload="digits").as_dict()) | machine
    known = {
        "schema": 1, "method": "palsgd", "workers": 2, "steps": STEPS, "sync_every": H, "seed": 7,
        "mix_prob": 0.2, "mix_rate": 4.0, "evaluate_every": EVERY, "metric": "accuracy",
        "engine": {"real": "processes", "simulated": "vectorized"}[which],
        "parameters": 64 * 128 + 128 + 128 * 10 + 10,
    }  # fmt: skip
    assert {key: config[key] for key in known} == known
    assert Settings(**{k: config[k] for k in Settings(workload="digits").as_dict()}).steps == STEPS


@both
def test_pandas_reads_the_files_in_one_line(which, request):
    out = request.getfixturevalue(which)
    table = pandas.read_json(out / "summary.json", typ="series")[:-2].apply(pandas.Series)
    assert list(table.index) == list(METHODS)
    figures = summary(out)["palsgd"]
    assert table.loc["palsgd", "final_loss"] == pytest.approx(figures["final_loss"], rel=1e-12)
    assert table.loc["palsgd", "gradient_steps"] == figures["gradient_steps"]
    curve = pandas.read_json(out / "palsgd" / "metrics.jsonl", lines=True)
    assert curve["step"].iloc[-1] == STEPS
    assert curve["loss"].notna().sum() >= 8


def test_what_is_no_number_is_null_in_every_file(tmp_path):
    """JSON has neither nan nor inf; a perplexity can be infinite."""
    folder = RunFolder(tmp_path)
    start, middle, end = (
        {"step": step, "gradient_steps": step, "syncs": step, "bytes_sent": 1, "time_s": 0.1,
         "loss": loss, "metric": loss, "distance": [math.nan, math.inf]}
        for step, loss in ((0, 5.0), (1, 2.0), (2, math.inf))
    )  # fmt: skip
    folder.append([start, middle, end])
    assert lines(tmp_path)[2]["metric"] is None
    assert lines(tmp_path)[2]["distance"] == [None, None]
    named = dict.fromkeys(("method", "workload", "workers", "seed", "simulated"))
    for found in ([start, middle, end], lines(tmp_path)):
        folder.write_summary(summarize({"higher_is_better": False, **named}, found, {}))
        record = summary(tmp_path)
        assert (record["steps"], record["final_loss"]) == (2, None)  # not the last finite one
        assert (record["best_step"], record["best_metric"]) == (1, 2.0)


def test_the_best_loss_is_the_lowest_also_where_the_best_metric_is_of_another_evaluation():
    found = [
        {"step": step, "gradient_steps": step, "syncs": step, "bytes_sent": 1, "time_s": 0.1,
         "loss": loss, "metric": accuracy}
        for step, loss, accuracy in ((0, 2.0, 0.1), (1, 0.9, 0.8), (2, 0.5, 0.7))
    ]  # fmt: skip
    named = dict.fromkeys(("method", "workload", "workers", "seed", "simulated"))
    record = summarize({"higher_is_better": True, **named}, found, {})
    assert record["best_loss"] == record["final_loss"] == 0.5
    assert (record["best_metric"], record["best_step"]) == (0.8, 1)


def test_workers_spans_do_not_overlap_and_show_gradients_mixing_and_syncs(real):
    spans = lines(real / "palsgd", "timeline")
    assert {span["worker"] for span in spans} == {0, 1}
    assert {"gradient", "mixing", "sync"} <= {span["kind"] for span in spans}
    assert {span["kind"] for span in spans} <= {"gradient", "mixing", "wait", "sync", "evaluate"}
    for worker in (0, 1):
        own = [span for span in spans if span["worker"] == worker]
        assert all(span["start_s"] < span["end_s"] for span in own)
        assert all(a["end_s"] <= b["start_s"] + 1e-9 for a, b in pairwise(own))
        assert sum(span["kind"] == "sync" for span in own) == 3
        assert own[-1]["end_s"] <= summary(real / "palsgd")["wall_s"] + 0.1


@both
def test_a_report_of_the_written_folders_names_every_method(which, request, tmp_path):
    out = request.getfixturevalue(which)
    assert {run.config["method"] for run in find_runs([out])} == set(METHODS)
    page = (out / "report.html").read_text()
    assert all(method in page for method in METHODS)


# -- the same numbers ----------------------------------------------------------------------------


@every_method
def test_processes_and_the_simulator_agree_on_digits(real, simulated, method):
    assert_alike(real / method, simulated / method, tolerance=1e-4)


@every_method
def test_processes_and_the_simulator_agree_on_stories(stories, method):
    assert_alike(stories[0] / method, stories[1] / method, tolerance=1e-4)


@pytest.mark.usefixtures("alone")
@every_method
@pytest.mark.parametrize("draws", ["balanced", "independent"])
def test_one_worker_in_a_process_is_the_simulator_with_one(method, draws, tmp_path):
    settings = Settings(workload="digits", method=method, workers=1, steps=45, sync_every=8,
                        mix_prob=0.3, warmup_steps=3, draws=draws, evaluate_every=9)  # fmt: skip
    workload = workloads.load("digits", seed=settings.seed)
    Trainer(settings, workload, RunFolder(tmp_path / "real"), quiet=True).train()
    run_all({"one": settings}, tmp_path / "simulated", Options(simulate=True, quiet=True))
    assert_alike(tmp_path / "real", tmp_path / "simulated" / "one", tolerance=1e-5)


@pytest.mark.parametrize(
    "how",
    [
        ("delay=5",),
        ("compress=int4", "fragments=3"),
        ("compress=int8", "fragments=2", "delay=3", "mix_prob=0.3"),
    ],
    ids=" ".join,
)
def test_processes_and_the_simulator_agree_on_overlapped_and_compressed_syncs(how, tmp_path):
    words = ("digits", *how, "--method", "palsgd", "--workers", 2, "--steps", 45, "--sync-every", 8,
             "warmup_steps=3", "evaluate_every=9", "--no-report")  # fmt: skip
    said = apart("train", *words, "--out", tmp_path / "real")
    assert said.code == 0, said.err
    assert palsgd("train", *words, "--simulate", "--out", tmp_path / "simulated").code == 0
    assert_alike(tmp_path / "real" / "palsgd", tmp_path / "simulated" / "palsgd", tolerance=1e-5)


@pytest.mark.parametrize(
    ("word", "message"),
    [
        ("compress=zip", "compress='zip' is unknown; use None, 'bf16', 'int8', 'int4'"),
        ("delay=-1", "delay=-1 must be a number >= 0"),
        ("fragments=0", "fragments=0 must be at least 1"),
        ("delay=99", "delay=99 is longer than the 16 steps until the next sync begins"),
        ("sync_every=auto", "sync_every='auto' measures a link, and simulated workers have none"),
        ("sync_every=often", "sync_every=often is no whole number"),
    ],
)
def test_an_impossible_way_to_sync_is_refused_in_one_line(word, message, tmp_path):
    said = palsgd("train", "digits", word, "--simulate", "--out", tmp_path / "run")
    assert said.code == 2
    assert message in said.err
    assert len(said.err.strip().splitlines()) == 1


def test_an_interval_can_be_left_to_the_run(tmp_path):
    said = apart("train", "digits", "--sync-every", "auto", "--workers", 2, "--steps", 60,
                 "warmup_steps=3", "--no-report", "--out", tmp_path)  # fmt: skip
    assert said.code == 0, said.err
    assert summary(tmp_path / "palsgd")["steps"] == 60


def assert_alike(one: Path, other: Path, *, tolerance: float) -> None:
    a, b = lines(one), lines(other)
    assert [(x["step"], x["gradient_steps"], x["syncs"], x["lr"]) for x in a] == [
        (x["step"], x["gradient_steps"], x["syncs"], x["lr"]) for x in b
    ]
    for key in ("loss", "metric", "distance", "agreement"):
        for x, y in zip(a, b, strict=True):
            assert x.get(key) == pytest.approx(y.get(key), abs=10 * tolerance), (key, x["step"])
    one_end, other_end = summary(one), summary(other)
    assert one_end["final_loss"] == pytest.approx(other_end["final_loss"], abs=tolerance)
    assert one_end["bytes_sent"] == pytest.approx(other_end["bytes_sent"], rel=0.01)


def test_the_global_model_that_was_best_is_kept(real, simulated):
    workload = workloads.load("digits", seed=7)
    for out in (real, simulated):
        for method in METHODS:
            kept = RunFolder(out / method).best()
            record = summary(out / method)
            assert (kept["step"], kept["metric"]) == (record["best_step"], record["best_metric"])
            model = workload.model()
            model.load_state_dict(kept["model"])
            loss, metric = workload.score(workload.totals(model))
            assert metric == record["best_metric"]
            (line,) = [x for x in lines(out / method) if x["step"] == kept["step"]]
            assert loss == pytest.approx(line["loss"], abs=1e-6)
            assert record["best_loss"] <= line["loss"]


def test_every_point_of_a_sweep_agrees_between_processes_and_simulator(sweep):
    found, others = records(sweep[0]), records(sweep[1])
    assert set(found) == set(others)
    assert len(found) == 4
    for name, record in found.items():
        tolerance = 0.02 if "bf16" in name else 1e-4
        assert record["final_loss"] == pytest.approx(others[name]["final_loss"], abs=tolerance)


def test_records_of_a_sweep_tell_the_swept_fields(sweep):
    for out in sweep:
        for name, record in records(out).items():
            assert set(record) >= {"micro_batches", "precision", "lr_warmup_steps", "max_norm"}
            assert (
                f"micro_batches={record['micro_batches']},precision={record['precision']}" in name
            )


def test_four_parts_of_a_batch_give_the_gradient_of_the_whole(sweep):
    for out in sweep:
        found = records(out)
        for name, record in found.items():
            if "micro_batches=1,precision=fp32" in name:
                parts = found[name.replace("micro_batches=1", "micro_batches=4")]
                assert parts["final_loss"] == pytest.approx(record["final_loss"], abs=1e-4)
                assert parts["gradient_steps"] == record["gradient_steps"]


def test_bf16_runs_and_rounds_otherwise_than_fp32(sweep):
    for out in sweep:
        found = records(out)
        for name, record in found.items():
            if "precision=bf16" in name:
                full = found[name.replace("bf16", "fp32")]["final_loss"]
                assert record["final_loss"] != full
                assert record["final_loss"] == pytest.approx(full, abs=0.05)


def test_recorded_learning_rates_warm_up_and_then_fall_to_zero(sweep):
    for out in sweep:
        for name in records(out):
            rates = {line["step"]: line["lr"] for line in lines(out / name)}
            assert rates[0] == pytest.approx(2e-3 / 7)
            assert rates[6] == pytest.approx(2e-3)
            assert rates[40] == pytest.approx(0.0)


def test_clipping_bounds_what_a_step_changes(tmp_path):
    base = Settings(workload="digits", method="ddp", workers=2, steps=10, lr=1.0, momentum=0.0)
    runs = {"free": base, "clipped": replace(base, max_norm=1e-3)}
    found = run_all(runs, tmp_path, Options(simulate=True, quiet=True))
    workload = workloads.load("digits", seed=base.seed)
    torch.manual_seed(base.seed)
    start = torch.cat([p.detach().flatten() for p in workload.model().parameters()])
    for name in runs:
        kept = RunFolder(tmp_path / name).best()
        moved = torch.cat([p.flatten() for p in kept["model"].values()]) - start
        assert (float(moved.norm()) <= 1e-3 * kept["step"] * 1.001) == (name == "clipped")
    assert found["clipped"]["final_loss"] > found["free"]["final_loss"]


# -- torchrun ------------------------------------------------------------------------------------


def torchrun(*words, **how):
    return apart(
        "--nproc-per-node", 2, "--master-port", "0", "--rdzv-backend", "c10d",
        "--rdzv-endpoint", "localhost:0", "-m", "palsgd", *words,
        module="torch.distributed.run", **how,
    )  # fmt: skip


def test_under_torchrun_its_processes_are_the_workers(real, tmp_path):
    said = torchrun("train", *DIGITS, "--no-report", "--out", tmp_path)
    assert said.code == 0, said.err
    assert said.out.count("results: ") == 1  # the first rank speaks for all
    assert summary(tmp_path)["palsgd"]["final_loss"] == summary(real)["palsgd"]["final_loss"]
    assert_same_run(tmp_path / "palsgd", real / "palsgd")


def test_under_torchrun_the_first_rank_alone_writes_the_collections_files(tmp_path, monkeypatch):
    for name, value in (("TORCHELASTIC_RUN_ID", "x"), ("RANK", "1"), ("WORLD_SIZE", "2")):
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(run_set, "_launch", lambda *args: None)
    run_all({"palsgd": Settings(workload="digits", workers=2, steps=4)}, tmp_path, Options())
    assert not list(tmp_path.rglob("*.*"))


@pytest.mark.parametrize("slow", [0, 1])
def test_workers_that_do_not_match_torchrun_are_refused_in_one_line(tmp_path, monkeypatch, slow):
    """Whichever process is slow: torchrun ends all as soon as one has ended, and the first must
    have spoken by then."""
    late = f"import os, time; time.sleep(4 * (os.environ.get('LOCAL_RANK') == '{slow}'))"
    (tmp_path / "sitecustomize.py").write_text(late)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    said = torchrun("train", "digits", "--workers", 3, "--out", tmp_path / "run")
    assert said.code != 0
    (line,) = [line for line in said.err.splitlines() if line.startswith("palsgd: ")]
    assert line == (
        "palsgd: --workers 3, but torchrun started 2 processes; use --workers 2, or --elastic to "
        "go on with whatever number there is"
    )
    assert "ValueError" not in said.err


def test_a_fault_that_the_first_process_does_not_find_is_said_by_the_one_that_does(
    monkeypatch, capsys
):
    for name in ("TORCHELASTIC_RUN_ID", "RANK", "LOCAL_RANK"):
        monkeypatch.setenv(name, "1")
    monkeypatch.setattr(output.time, "sleep", lambda seconds: None)
    with pytest.raises(SystemExit, match="2"):
        output.fail("no such file", 2)
    assert capsys.readouterr().err == "palsgd: no such file\n"


def jobs_of_rank_0(lr):
    """The folder and learning rate of the job that this rank is given. `lr` is what each rank was
    started with."""
    rank = dist.get_rank()
    job = Job(
        settings=Settings(workload="digits", lr=lr[rank]), folder=Path(f"digits-{rank}"),
        data=None, download=False, resume=False, quiet=True,
    )  # fmt: skip
    return [(job.folder.name, job.settings.lr) for job in launcher._as_rank_0_has_them([job])]


def test_ranks_that_were_started_with_other_settings_are_refused(world):
    assert world.run(jobs_of_rank_0, workers=2, lr=[0.1, 0.1]) == [[("digits-0", 0.1)]] * 2
    for outcome in world.outcomes(jobs_of_rank_0, workers=2, lr=[0.1, 0.2]):
        assert outcome.error == "ValueError"
        assert outcome.message.startswith("lr differs between workers: rank 1 has 0.2, rank 0 has")


# -- stopping and going on -----------------------------------------------------------------------


@pytest.fixture(scope="module")
def interrupted(folder, real):
    """A run whose launcher was killed, that went on, was stopped by Ctrl-C, and went on as it was
    told to."""
    out = folder / "interrupted"
    words = ("train", *DIGITS, "--no-report", "--out", out)
    with started(*words) as process:
        wait_for(lambda: saved_step(out / "palsgd") >= 40, process=process)
        workers = children(process.pid)
        os.kill(process.pid, signal.SIGKILL)
        process.wait(timeout=patient(30))
        wait_for(lambda: not alive(workers), process=None, timeout=20)  # workers go with it
    killed_at = saved_step(out / "palsgd")
    report = write_report([out], out / "unfinished.html").read_text()
    with started(*words, "--resume") as process:
        wait_for(lambda: saved_step(out / "palsgd") >= killed_at + 80, process=process)
        workers = children(process.pid)
        assert len(workers) == 2
        os.killpg(process.pid, signal.SIGINT)
        _, stderr = process.communicate(timeout=patient(30))
        wait_for(lambda: not alive(workers), process=None, timeout=10)
    stopped_at = saved_step(out / "palsgd")
    _, _, command = stderr.partition("Go on with: palsgd ")
    finished = apart(*shlex.split(command))
    return {
        "out": out, "killed_at": killed_at, "stopped_at": stopped_at, "report": report,
        "code": process.returncode, "err": stderr, "finished": finished,
    }  # fmt: skip


def test_ctrl_c_ends_all_processes_with_130_and_one_line_how_to_go_on(interrupted):
    assert interrupted["code"] == 130
    (line,) = interrupted["err"].splitlines()
    kept = f"kept: 1 run up to the last checkpoint (step {interrupted['stopped_at']})"
    assert line.startswith(f"palsgd: stopped; {kept}. Go on with: palsgd train digits")
    assert line.endswith("--resume")


def test_a_run_that_was_killed_and_stopped_ends_as_if_it_never_was(interrupted, real):
    assert 0 < interrupted["killed_at"] < interrupted["stopped_at"] < STEPS
    assert interrupted["finished"].code == 0, interrupted["finished"].err
    run = interrupted["out"] / "palsgd"
    assert_same_run(run, real / "palsgd")
    timed = {"wall_s", "time_to_target_s", "metric_at_equal_time", "waiting_s", "sync_s"}
    among_others = {name for name in SUMMARY_KEYS if "target" in name or "equal" in name}
    once, whole = (
        {k: v for k, v in summary(each).items() if k not in timed | among_others}
        for each in (run, real / "palsgd")
    )
    assert once == whole
    kept = [RunFolder(each).best() for each in (run, real / "palsgd")]
    assert kept[0]["step"] == kept[1]["step"]
    for a, b in zip(kept[0]["model"].values(), kept[1]["model"].values(), strict=True):
        assert torch.equal(a, b)
    assert not (run / "checkpoints").exists()  # finished: none is needed


def test_a_report_can_be_made_of_a_run_that_is_not_finished(interrupted):
    assert "digits" in interrupted["report"]


# -- sweeps --------------------------------------------------------------------------------------

TINY = ("steps=12", "warmup_steps=2", "workers=2", "--simulate", "--no-report", "--quiet")


def written(out: Path) -> dict[str, int]:
    return {path.parent.name: path.stat().st_mtime_ns for path in out.glob("*/metrics.jsonl")}


def test_finished_points_of_a_sweep_are_not_run_again(tmp_path):
    assert palsgd("sweep", "digits", "sync_every=2,4", *TINY, "--out", tmp_path).code == 0
    before = written(tmp_path)
    said = palsgd("sweep", "digits", "sync_every=2,4,8", *TINY, "--out", tmp_path, "--resume")
    assert said.code == 0, said.err
    after = written(tmp_path)
    assert len(after) == 3
    assert {name: after[name] for name in before} == before
    assert set(records(tmp_path)) == set(after)


def test_a_stopped_sweep_keeps_its_finished_points(tmp_path, monkeypatch):
    simulate, calls = run_set.simulate_runs, []

    def stop_at_the_third(runs, **options):
        calls.append(runs)
        if len(calls) == 3:
            raise KeyboardInterrupt
        simulate(runs, **options)

    monkeypatch.setattr(run_set, "simulate_runs", stop_at_the_third)
    words = ("sweep", "digits", "sync_every=2,3,4,6", *TINY, "--out", tmp_path)
    said = palsgd(*words)
    assert said.code == 130
    assert "Go on with: palsgd sweep digits" in said.line
    before = written(tmp_path)
    assert len(before) == 2
    assert palsgd(*shlex.split(said.line.partition("Go on with: palsgd ")[2])).code == 0
    assert len(calls) == 3 + 2
    assert {name: written(tmp_path)[name] for name in before} == before
    assert len(records(tmp_path)) == 4


def test_points_that_share_a_program_end_as_each_alone(tmp_path):
    base = Settings(workload="digits", workers=2, steps=40, sync_every=8, warmup_steps=5,
                    inner="adamw", lr=2e-3)  # fmt: skip
    runs = {
        f"{method}-{seed}": replace(base, method=method, seed=seed)
        for method in ("localsgd", "diloco", "palsgd")
        for seed in (1, 2)
    } | {"lr": replace(base, lr=1e-3), "eta": replace(base, mix_rate=8.0, mix_prob=0.3)}
    together = run_all(runs, tmp_path / "together", Options(simulate=True, quiet=True))
    apiece = run_all(
        runs, tmp_path / "apiece", Options(simulate=True, quiet=True, share_program=False)
    )
    exact = run_all(runs, tmp_path / "exact", Options(simulate=True, quiet=True, vectorize=False))
    assert len({together[name]["final_loss"] for name in runs}) == len(runs)
    for name in runs:
        one = lines(tmp_path / "together" / name)
        for other in ("apiece", "exact"):
            two = lines(tmp_path / other / name)
            assert [x["step"] for x in one] == [x["step"] for x in two]
            for key in ("loss", "metric", "distance", "agreement", "train_loss"):
                for x, y in zip(one, two, strict=True):
                    assert x.get(key) == pytest.approx(y.get(key), abs=1e-4), (name, key)
        for found in (apiece, exact):
            assert together[name]["final_loss"] == pytest.approx(
                found[name]["final_loss"], abs=1e-5
            )
        kept = RunFolder(tmp_path / "together" / name).best()
        assert kept["metric"] == together[name]["best_metric"]


def test_a_random_sweep_runs_as_many_points_as_asked_for(tmp_path):
    said = palsgd("sweep", "digits", "lr=1e-4..1e-2", "mix_prob=0.05..0.5", "pull=0.5", *TINY,
                  "--random", 3, "--out", tmp_path)  # fmt: skip
    assert said.code == 0, said.err
    found = records(tmp_path)
    assert len(found) == 3
    assert all(1e-4 <= record["lr"] <= 1e-2 for record in found.values())


def test_a_sweep_over_seeds_has_one_record_and_one_target_for_all_of_them(tmp_path):
    said = palsgd("sweep", "digits", "method=ddp,diloco", "seed=1,2", "steps=30", "warmup_steps=2",
                  "sync_every=4", "workers=2", "--simulate", "--no-report",
                  "--out", tmp_path)  # fmt: skip
    assert said.code == 0, said.err
    found = records(tmp_path)
    assert list(found) == ["method=ddp", "method=diloco"]
    ends = [summary(tmp_path / f"method=ddp,seed={seed}")["final_loss"] for seed in (1, 2)]
    assert found["method=ddp"]["final_loss"] == pytest.approx(sum(ends) / 2)
    assert found["method=ddp"]["seeds"] == [1, 2]
    for record in (*found.values(), summary(tmp_path / "method=diloco,seed=2")):
        assert record["target"] == pytest.approx(1.01 * sum(ends) / 2)


# -- recipes -------------------------------------------------------------------------------------

FEW = {"workers": 2, "batch_size": 2, "micro_batches": 1, "steps": 4, "sync_every": 2,
       "warmup_steps": 1, "evaluate_every": 4}  # fmt: skip


@pytest.mark.filterwarnings("ignore:mix_rate=4 gives beta")  # the paper's, in rounds of two steps
@pytest.mark.parametrize("name", list(workloads.recipes()))
def test_every_recipe_starts_on_a_small_problem(name, tmp_path, monkeypatch):
    """Its optimizers, schedule and mixing; the workloads themselves are in test_workloads.py."""
    digits = workloads.load("digits")
    monkeypatch.setattr(run_set, "load", lambda *args, **kwargs: digits)
    monkeypatch.setattr(run_set, "check_data", lambda *args: None)
    run = workloads.recipe(name).changed({**FEW, "precision": "fp32"})
    found = run_all({"palsgd": run}, tmp_path, Options(simulate=True, quiet=True))
    assert found["palsgd"]["steps"] == 4
    assert strict_json((tmp_path / "summary.json").read_text())


@pytest.mark.parametrize(
    ("name", "data"),
    [("digits", None), ("stories", None), ("cifar10-cnn", "cifar10-mini")],
)
def test_a_recipe_starts_on_its_own_data(name, data, tmp_path):
    if data is not None and not (SHARED / data).exists():
        pytest.skip(f"no {data} in ../shared/data here")
    words = [f"{key}={value}" for key, value in FEW.items()]
    given = () if data is None else ("--data", SHARED / data)
    said = palsgd("train", name, *words, "--simulate", "--no-report", "--out", tmp_path, *given)
    assert said.code == 0, said.err
    assert json.loads((tmp_path / "summary.json").read_text())["palsgd"]["steps"] == 4

"""lab/studies/times.py: seconds on other links follow from the runs of a record and the model of
time."""

import json
import sys
import tarfile
from importlib import import_module
from itertools import pairwise

import numpy as np
import pytest

from palsgd.cluster import Cluster, Work
from palsgd.lab.api import compare
from palsgd.lab.plan.paper import PUBLISHED
from palsgd.lab.run_folder import RunFolder
from palsgd.lab.settings import Settings
from support import runs
from support.places import STUDIES

LINK = "100mbit,10ms,step=10ms"
SETTINGS = dict(workers=2, steps=48, batch_size=8, sync_every=8, evaluate_every=8,
                warmup_steps=0, lr=1e-2, outer_lr=0.7, outer_momentum=0.0,
                tuned="none")  # fmt: skip


@pytest.fixture(scope="module")
def times():
    sys.path.insert(0, str(STUDIES))
    yield import_module("times")
    sys.path.remove(str(STUDIES))


@pytest.fixture(scope="module")
def kept(tmp_path_factory):
    """A record that keeps the runs of DDP and DiLoCo, each with two seeds."""
    folder = tmp_path_factory.mktemp("records")
    compare("digits", ["ddp", "diloco"], seeds=2, simulate=True, out=folder / "runs" / "only" / "a",
            options={"quiet": True}, **SETTINGS)  # fmt: skip
    (folder / "kept").mkdir()
    with tarfile.open(folder / "kept" / "runs.tar.xz", "w:xz") as packed:
        packed.add(folder / "runs", "runs")
    return folder


@pytest.fixture(scope="module")
def found(times, kept):
    subject = times.Subject("small", "kept", ("only",), (LINK,))
    return times.subject_record(subject, kept)


def mean_losses(kept, method):
    """By step, over the seeds."""
    folders = [each.parent for each in kept.glob(f"runs/only/a/{method}*/summary.json")]
    runs = [{line["step"]: line["loss"] for line in RunFolder(each).lines() if "loss" in line}
            for each in folders]  # fmt: skip
    assert len(runs) == 2
    return {step: np.mean([run[step] for run in runs]) for step in runs[0]}


def steps_to(losses, level):
    """Between two evaluations by a straight line."""
    steps = sorted(losses)
    for before, after in pairwise(steps):
        if losses[after] <= level:
            share = (losses[before] - level) / (losses[before] - losses[after])
            return before + share * (after - before)
    return None


def seconds_a_step(kept, method):
    parameters = RunFolder(next(kept.glob(f"runs/only/a/{method}*"))).config()["parameters"]
    place = Cluster.parse(LINK, workers=2)
    if method == "ddp":
        return place.project(Work.ddp(parameters), steps=1).time_s
    return place.project(Work(parameters=parameters, sync_every=8), steps=48).time_s / 48


def row(found, method):
    return next(each for each in found["rows"] if each["method"] == method)


def test_seconds_to_ddps_end_are_its_steps_to_it_by_the_time_of_a_step(found, kept):
    losses = mean_losses(kept, "ddp")
    level = 1.01 * losses[48]
    own = row(found, "ddp")
    assert own["reached"]
    assert own["target"]["value"] == pytest.approx(level)
    a_step = seconds_a_step(kept, "ddp")
    assert own["links"][LINK]["seconds"] == pytest.approx(
        steps_to(losses, level) * a_step, rel=1e-3
    )
    assert own["links"][LINK]["whole_run"] == pytest.approx(48 * a_step, rel=1e-3)


def test_a_method_that_misses_ddps_end_is_beside_ddp_at_its_own(found, kept):
    ddp, diloco = mean_losses(kept, "ddp"), mean_losses(kept, "diloco")
    assert diloco[48] > 1.02 * ddp[48], "the settings are to make it miss"
    level = 1.01 * diloco[48]
    own = row(found, "diloco")
    assert not own["reached"]
    assert own["target"]["value"] == pytest.approx(level)
    ours = steps_to(diloco, level) * seconds_a_step(kept, "diloco")
    theirs = steps_to(ddp, level) * seconds_a_step(kept, "ddp")
    assert own["links"][LINK]["seconds"] == pytest.approx(ours, rel=1e-3)
    assert own["links"][LINK]["speed_up"]["value"] == pytest.approx(theirs / ours, rel=1e-3)


def test_ddp_of_another_part_is_the_baseline_of_runs_that_have_none(times, kept, tmp_path):
    with tarfile.open(kept / "kept" / "runs.tar.xz") as packed:
        packed.extractall(tmp_path, filter="data")
    home = tmp_path / "runs"
    (home / "others").mkdir()
    for folder in (home / "only" / "a").glob("diloco*"):
        folder.rename(home / "others" / folder.name)
    (tmp_path / "apart").mkdir()
    with tarfile.open(tmp_path / "apart" / "runs.tar.xz", "w:xz") as packed:
        packed.add(home, "runs")
    subject = times.Subject("apart", "apart", ("others",), (LINK,), baseline="only")
    again = times.subject_record(subject, tmp_path)
    whole = times.Subject("small", "kept", ("only",), (LINK,))
    assert row(again, "diloco") == row(times.subject_record(whole, kept), "diloco")


def test_other_margins_ask_for_ddps_end_itself_as_the_paper_does(times, tmp_path):
    """DDP is at its end + 50% first, and at its end last: the margin decides who is sooner."""
    kept = kept_runs(tmp_path, ddp=[2.0, 1.4, 1.0], diloco=[2.0, 1.6, 0.8])
    subject = times.Subject("small", "kept", ("only",), (LINK,), margins=(0.5, 0.0))
    found = {(each["margin"], each["method"]): each
             for each in times.subject_record(subject, kept)["margins"]}  # fmt: skip
    steps = {key: each["steps"] for key, each in found.items()}
    ddp, diloco = 10 * (2.0 - 1.5) / 0.6, 10 + 10 * (1.6 - 1.5) / 0.8
    assert steps[0.5, "ddp"] == pytest.approx(ddp)
    assert steps[0.5, "diloco"] == pytest.approx(diloco)
    assert steps[0.0, "ddp"] == pytest.approx(20)
    assert steps[0.0, "diloco"] == pytest.approx(10 + 10 * 0.6 / 0.8)
    assert found[0.5, "diloco"]["steps_speed_up"]["value"] == pytest.approx(ddp / diloco)
    assert found[0.5, "diloco"]["target"]["value"] == pytest.approx(1.5)
    whole = found[0.0, "ddp"]["links"][LINK]
    assert whole["seconds"] == pytest.approx(whole["whole_run"]), "DDP's end takes all of its run"


def kept_runs(folder, **losses):
    """A record of one run of each method, with made-up losses."""
    for method, values in losses.items():
        own = Settings(workload="digits", method=method, steps=20, warmup_steps=0, workers=2)
        lines = [runs.line(10 * i, loss=1.0, metric=0.0, time_s=None) | {"loss": value}
                 for i, value in enumerate(values)]  # fmt: skip
        home = folder / "runs" / "only" / method
        runs.write_files(home, runs.config(own, simulated=True), lines)
        summary = runs.summary_of(own, lines, simulated=True)
        (home / "summary.json").write_text(json.dumps(summary))
    (folder / "kept").mkdir()
    with tarfile.open(folder / "kept" / "runs.tar.xz", "w:xz") as packed:
        packed.add(folder / "runs", "runs")
    return folder


def test_a_method_without_a_finite_end_has_no_row_and_is_named(times, tmp_path):
    kept = kept_runs(tmp_path, ddp=[2.3, 1.0, 0.5], diloco=[2.3, 4.0, None])
    found = times.subject_record(times.Subject("small", "kept", ("only",), (LINK,)), kept)
    assert [each["method"] for each in found["rows"]] == ["ddp"]
    assert found["without_an_end"] == ["diloco"]


def test_runs_without_a_baseline_are_refused_in_words(times, tmp_path):
    kept = kept_runs(tmp_path, diloco=[2.3, 1.0, 0.5])
    with pytest.raises(ValueError, match="kept has no baseline at the scale of diloco; leave"):
        times.subject_record(times.Subject("small", "kept", ("only",), (LINK,)), kept)


def test_a_steps_share_of_ddps_is_what_the_papers_clusters_say(times):
    """`palsgd plan --paper-clusters` computes it from the hardware, not from a link's text."""
    steps = [step for shape in times.SHAPES for step in shape.steps()]
    for run in (each for each in PUBLISHED if each.workers == 8 or "ResNet" in each.name):
        share = next(
            next(iter(step["share"].values()))
            for step in steps
            if run.name.startswith(step["workload"])
            and (step["workers"], step["H"], step["p"])
            == (run.workers, run.sync_every, run.mix_prob)
        )
        assert share == pytest.approx(run.local_s(run.mix_prob) / run.torch_ddp_s(), rel=1e-3)


def test_every_subject_has_a_record_with_its_runs_and_the_links_of_its_cluster(times):
    for subject in times.SUBJECTS:
        assert (times.RECORDS / subject.record / times.RUNS).is_file(), subject.name
    links = {each.name: each.links[0] for each in times.SUBJECTS}
    assert links["resnet50"].startswith("126gbit")  # cluster C
    assert links["gpt-neo-8m"].startswith("1200gbit")  # eight workers: B
    assert links["gpt-neo-125m"].startswith("1200gbit")

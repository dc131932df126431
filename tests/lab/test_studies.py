"""The studies of the paper: what they say they cost, what they run, and how they go on."""

import json
import shutil
import sys
from dataclasses import replace
from importlib import import_module
from statistics import mean, stdev
from types import SimpleNamespace

import pytest
import yaml

import palsgd.lab
from palsgd.lab import simulated_program, workloads
from palsgd.lab.api import compare
from palsgd.lab.comparison import Comparison
from palsgd.lab.groups import group
from palsgd.lab.run_folder import RunFolder, find_runs
from palsgd.lab.simulated_program import OutOfTimeError
from support.commands import lines, ran
from support.places import STUDIES

SCRIPTS = ("small_cnn", "vgg16", "gpt_neo_8m", "gpt_neo_125m", "resnet50", "released_code",
           "slowmo_table", "when_it_pays")  # fmt: skip


@pytest.fixture(scope="module")
def modules():
    """The modules of the studies, which find each other in their own folder."""
    sys.path.insert(0, str(STUDIES))
    yield import_module
    sys.path.remove(str(STUDIES))


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_study_says_what_every_part_costs_and_runs_nothing(modules, name, tmp_path, capsys):
    study = modules(name).STUDY
    assert modules("study").main(study, ["--plan", "--out", str(tmp_path / "out")]) == 0
    said = capsys.readouterr().out.splitlines()
    rows = {line.split()[0]: line.split() for line in said[2:]}
    for part in study.parts(False):
        runs, programs, minutes = (rows[part.name][place] for place in (1, 3, 5))
        assert int(runs) == part.estimate().runs >= int(programs) > 0
        assert float(minutes) > 0
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("name", SCRIPTS)
def test_the_tiny_version_has_all_parts_and_needs_no_data(modules, name):
    study = modules(name).STUDY
    small, full = study.parts(True), study.parts(False)
    assert [part.name for part in small] == [part.name for part in full]
    assert {claim.part for claim in study.claims} <= {part.name for part in small}
    for run in (run for part in small for call in part.calls for run in call.stages()[0]):
        assert workloads.kind(run.workload).source is None
        assert run.total_steps(workloads.examples(run.workload)) < 200


def test_a_shorter_study_is_shorter_by_the_same_share_everywhere(modules):
    calls = modules("calls")
    whole = calls.Compare(name="a", recipe="cifar10-vgg16", methods=["palsgd"])
    short = whole.shortened(0.1)
    (before,), (after,) = whole.stages()[0], short.stages()[0]
    assert (after.epochs, after.warmup_steps, after.lr_warmup_epochs) == (20, 205, 1)
    assert calls.gradient_examples(after) == pytest.approx(
        calls.gradient_examples(before) / 10, 0.05
    )


def small_study(modules, methods=("ddp", "palsgd")):
    calls, study = modules("calls"), modules("study")
    tuned = calls.tuned_comparison(
        "point", "digits", methods, trials=2, seeds=2, workers=2, steps=32, batch_size=4,
        sync_every=8,
    )  # fmt: skip
    ends = modules("readings").ends(*methods)
    parts = [study.Part("only", "Does it run?", tuned)]
    claims = [study.Claim("a figure", "only", ends)]
    return study.Study("small", "A small study", lambda tiny: parts, claims, ["1gbit,1ms,step=1ms"])


@pytest.mark.slow
def test_a_search_chooses_the_settings_that_are_compared_and_nothing_is_run_twice(
    modules, tmp_path
):
    study, command = small_study(modules), modules("study")
    (part,), place = study.parts(False), command.Place(tmp_path / "out")
    assert command.main(study, ["--quiet", "--out", str(place.folder)]) == 0
    assert place.done(part) == part.estimate().runs
    modules("recording").keep_tuned(part, place, tmp_path / "kept")
    chosen = yaml.safe_load((tmp_path / "kept" / "point.yaml").read_text())["methods"]
    for method in ("ddp", "palsgd"):
        config = RunFolder(place.judged(part)[0] / f"{method},seed=2024").config()
        assert config["lr"] == chosen[method]["settings"]["lr"]
        assert config["tuned"].startswith("tuned.yaml")
    before = {path: path.stat().st_mtime_ns for path in place.folder.rglob("metrics.jsonl")}
    assert command.main(study, ["--quiet", "--out", str(place.folder)]) == 0
    after = {path: path.stat().st_mtime_ns for path in place.folder.rglob("metrics.jsonl")}
    assert after == before


def small_grid(modules, tried=2, **more):
    rates = {"lr": (1e-3, 1e-2)}
    steps = rates | {"outer_lr": (0.4, 0.8)}
    return modules("grid").grid_comparison(
        "point", "digits", {"ddp": rates, "diloco": rates, "palsgd": steps}, tried=tried, seeds=2,
        beside={"palsgd-no-pull": rates | {"method": ("palsgd",), "pull": (0.0,)}},
        workers=2, steps=16, batch_size=4, sync_every=8, warmup_steps=0, **more,
    )  # fmt: skip


def small_grid_study(modules, **more):
    study = modules("study")
    parts = [study.Part("only", "Does it run?", small_grid(modules, **more))]
    return parts[0], study.Study("small", "A small study", lambda tiny: parts, [])


def test_all_methods_of_a_grid_have_as_many_runs_and_seeds_that_no_comparison_has(modules):
    grid, comparison = small_grid(modules)
    runs = grid.stages()[0]
    assert len(runs) == 4 * 8
    assert [run.method for run in runs].count("ddp") == 8
    assert {run.split for run in runs} == {"choose"}
    judged = {run.seed for run in comparison.stages()[0]}
    assert not judged & {run.seed for run in runs}


def test_a_grid_may_choose_on_the_data_that_are_judged_with_other_seeds(modules):
    grid, comparison = small_grid(modules)
    runs = replace(grid, split="test").stages()[0]
    judged = comparison.stages()[0]
    assert {run.split for run in runs} == {run.split for run in judged} == {"test"}
    assert not {run.seed for run in judged} & {run.seed for run in runs}


def test_a_grid_may_vary_a_setting_that_one_method_alone_has(modules, monkeypatch, tmp_path):
    grid, _ = modules("grid").grid_comparison(
        "point", "digits", {"anchordecay": {"decay": (0.1, 0.2)}}, tried=2, seeds=2, beside={},
        workers=2, steps=16, batch_size=4, sync_every=8, warmup_steps=0,
    )  # fmt: skip
    ends = {"decay=0.1": 2.0, "decay=0.2": 1.0}
    monkeypatch.setattr(type(grid), "_end", lambda _, run: ends[run.path.name.split(",")[1]])
    assert grid._chosen("anchordecay", tmp_path)["settings"] == {"decay": 0.2}


def written(place):
    return {path: path.stat().st_mtime_ns for path in place.folder.rglob("metrics.jsonl")}


@pytest.mark.slow
def test_the_best_point_of_a_grid_is_compared_and_a_study_goes_on_from_its_record(
    modules, tmp_path
):
    main, record = modules("study").main, tmp_path / "record"
    part, own = small_grid_study(modules)
    place = modules("study").Place(tmp_path / "out")
    words = ["--quiet", "--out", str(place.folder), "--record", str(record)]
    assert main(own, words) == 0
    ended = {}
    for folder in (place.tuning(part) / "point" / "tuned-runs").glob("palsgd,*"):
        config, summary = RunFolder(folder).config(), RunFolder(folder).summary()
        point = config["lr"], config["outer_lr"]
        ended.setdefault(point, []).append(summary["final_loss"])
    assert {len(losses) for losses in ended.values()} == {2}
    best = min(ended, key=lambda point: mean(ended[point]) + stdev(ended[point]))
    chosen = yaml.safe_load((record / "only" / "point.yaml").read_text())["methods"]["palsgd"]
    assert (chosen["settings"]["lr"], chosen["settings"]["outer_lr"]) == best
    (judged,) = place.judged(part)
    config = RunFolder(judged / "palsgd,seed=2024").config()
    assert (config["lr"], config["outer_lr"]) == best
    before = json.loads((record / "summary.json").read_text())["parts"]["only"]
    kept = before["grids"]["point"]
    palsgd = [sorted(found) for name, found in kept["ends"].items() if name.startswith("palsgd ")]
    assert sorted(palsgd) == sorted(map(sorted, ended.values()))
    # elsewhere the study goes on from its record, and has nothing to do
    shutil.rmtree(place.folder)
    assert main(own, [*words, "--minutes", "0"]) == 0
    unpacked = written(place)
    assert len(unpacked) == part.estimate().runs
    assert main(own, words) == 0
    assert written(place) == unpacked
    after = json.loads((record / "summary.json").read_text())["parts"]["only"]
    assert json.dumps(after) == json.dumps(before)


@pytest.mark.slow
def test_a_grid_that_chooses_others_after_more_seeds_has_its_comparison_run_anew(modules, tmp_path):
    part, own = small_grid_study(modules, tried=1)
    place, main = modules("study").Place(tmp_path / "out"), modules("study").main
    assert main(own, ["--quiet", "--out", str(place.folder)]) == 0
    (first,) = place.judged(part)
    path = modules("calls").tuning_file(place.tuning(part), "point")
    found = yaml.safe_load(path.read_text())
    found["methods"]["ddp"]["settings"]["lr"] = 0.02
    modules("grid").write_tuned(path, {k: v for k, v in found.items() if k != "schema"})
    assert place.judged(part) == []
    part.calls[1].do(place.runs(part), place.tuning(part), {"quiet": True})
    (second,) = place.judged(part)
    assert second != first
    assert RunFolder(second / "ddp,seed=2023").config()["lr"] == 0.02
    assert place.done(part) == part.estimate().runs


def test_a_grid_in_which_no_point_of_a_method_ends_well_chooses_nothing(modules, tmp_path):
    grid, _ = small_grid(modules)
    with pytest.raises(ValueError, match=r"no point of ddp in .* ends well; try gentler settings"):
        grid._chosen("ddp", tmp_path)


def test_above_the_plain_method_is_what_has_the_same_number_of_workers(modules, tmp_path):
    for workers in (2, 4):
        settings = {**RUNS, "steps": 16, "workers": workers}
        compare("digits", ["diloco", "palsgd"], out=tmp_path / str(workers), seeds=2, **settings)
    found = Comparison(group(find_runs([tmp_path])))
    for each in found.groups:
        twin = modules("recording")._plain_twin(found, each)
        if each.method == "diloco":
            assert twin is None
        else:
            assert (twin.method, twin.settings["workers"]) == ("diloco", each.settings["workers"])


@pytest.mark.slow
def test_every_point_of_a_map_is_beside_its_controls_and_each_of_these_is_run_once(
    modules, tmp_path
):
    calls, study = modules("calls"), modules("study")
    common = dict(recipe="digits", seeds=2)
    size = dict(workers=2, steps=16, batch_size=4, sync_every=8, warmup_steps=0)
    mixing = calls.Sweep(name="palsgd", settings=size | {"pull": [0.0, 0.5], "mix_prob": [0.25]},
                         **common)  # fmt: skip
    beside = calls.Controls(name="controls", of=mixing, wanted=("raised-lr", "equal-gradients"),
                            **common)  # fmt: skip
    raised, equal = (each for each in beside.points().values() if each.seed == 2023)
    (own,) = (each for each in mixing.points().values() if each.seed == 2023 and each.pull == 0.5)
    assert raised.lr == pytest.approx(own.lr / 0.75)
    assert (equal.sync_every, equal.steps, equal.lr) == (6, 12, own.lr)
    shorter = next(iter(beside.shortened(0.5).points().values()))
    assert shorter.steps == 8, "with its point"
    parts = [study.Part("only", "Does it run?", [mixing, beside])]
    small = study.Study("small", "A small study", lambda tiny: parts, [])
    record = tmp_path / "record"
    assert study.main(small, ["--quiet", "--out", str(tmp_path / "out"), "--record",
                              str(record)]) == 0  # fmt: skip
    found = json.loads((record / "summary.json").read_text())["parts"]["only"]
    assert found["runs"] == {"done": 8, "planned": 8, "failed": []}
    labels = {row["label"].partition(",")[0] for row in found["settings"]}
    kinds = {"diloco-raised-lr", "diloco-equal-gradients"}
    assert kinds <= labels, "a control is no setting of DiLoCo's own"
    rows = {row["given"]["pull"]: row for row in found["settings"] if row["method"] == "palsgd"}
    assert set(rows[0.0]["over_controls"]) == {"raised-lr", "equal-gradients"}
    assert set(rows[0.5]["over_controls"]) == {"raised-lr", "equal-gradients", "no-pull"}
    (control,) = (row for row in found["settings"] if row["given"]["sync_every"] == 6)
    above = rows[0.0]["loss"]["value"] / control["loss"]["value"] - 1
    assert rows[0.0]["over_controls"]["equal-gradients"]["value"] == pytest.approx(above)


def test_a_record_of_more_parts_or_of_another_study_is_not_written_over(modules, tmp_path):
    part, own = small_grid_study(modules)
    args = SimpleNamespace(record=tmp_path, tiny=False, length=1.0)
    check = modules("recording").check_record
    check(own, [part], args)
    for change, said in (({"parts": {"only": {}, "other": {}}}, "also has other"),
                         ({"study": "another"}, "is of study another, not small"),
                         ({"size": "tiny"}, "is of size tiny, not full")):  # fmt: skip
        before = {"study": "small", "size": "full", "length": 1.0, "parts": {"only": {}}} | change
        (tmp_path / "summary.json").write_text(json.dumps(before))
        with pytest.raises(ValueError, match=said):
            check(own, [part], args)


@pytest.mark.parametrize(("given", "searched"), [("lr", "lr"), ("mix_rate", "pull")])
def test_a_comparison_that_also_gives_what_was_tuned_is_refused(modules, tmp_path, given, searched):
    _, comparison = small_grid(modules, **{given: 0.1})
    path = modules("calls").tuning_file(tmp_path, "point")
    chosen = {"palsgd": {"settings": {searched: 0.01}}}
    modules("grid").write_tuned(path, {"workload": "digits", "conditions": {}, "methods": chosen})
    with pytest.raises(ValueError, match=f"point was tuned in {searched}, and also gives it"):
        comparison.do(tmp_path, tmp_path, {})


def test_a_study_that_is_given_no_time_runs_nothing_and_says_so(modules, tmp_path, capsys):
    words = ["--quiet", "--out", str(tmp_path), "--minutes", "1e-9"]
    assert modules("study").main(small_study(modules), words) == 0
    assert "the time is over; the same command goes on" in capsys.readouterr().out
    assert not list(tmp_path.rglob("summary.json"))


def test_programs_of_a_study_may_be_simulated_at_once(modules, tmp_path, monkeypatch, capsys):
    study, sweep = modules("study"), modules("calls").Sweep(
        name="sizes", recipe="digits", settings={"workers": [2, 3], "steps": 8, "batch_size": 4}
    )  # fmt: skip
    small = study.Study("small", "A study", lambda tiny: [study.Part("only", "?", [sweep])], [])
    words = ["--out", str(tmp_path), "--at-once"]
    assert study.main(small, [*words, "0"]) == 2
    assert "--at-once 0 must be a whole number >= 1" in capsys.readouterr().err
    given = []
    monkeypatch.setattr(palsgd.lab, "sweep", lambda recipe, **how: given.append(how["options"]))
    assert study.main(small, [*words, "2"]) == 0
    assert [options["at_once"] for options in given] == [2]


RUNS = dict(workers=2, steps=48, sync_every=8, evaluate_every=8, batch_size=4, tuned="none")


def over_at(monkeypatch, pauses):
    """The time is over at the n-th pause; two questions come before the first one."""
    asked = iter([0.0] * (2 + pauses - 1))
    monkeypatch.setattr(
        simulated_program, "time", SimpleNamespace(monotonic=lambda: next(asked, 1.0))
    )


@pytest.mark.slow
@pytest.mark.parametrize("carried", [False, True])
def test_runs_that_were_out_of_time_go_on_and_end_as_if_they_had_not_been(
    monkeypatch, tmp_path, carried
):
    whole, out = tmp_path / "whole", tmp_path / "out"
    compare("digits", ["diloco", "palsgd"], out=whole, **RUNS)
    with monkeypatch.context() as patch:
        over_at(patch, 3)
        with pytest.raises(OutOfTimeError, match="the same command with resume goes on"):
            compare("digits", ["diloco", "palsgd"], out=out, options={"until": 0.5}, **RUNS)
    assert RunFolder(out / "diloco").saved_steps == [24]  # saved there, and nowhere before
    if carried:  # without what is large, from which the runs start over
        for path in out.rglob("*"):
            if path.name == "best.safetensors":
                path.unlink()
        shutil.rmtree(out / "diloco" / "checkpoints")
    compare("digits", ["diloco", "palsgd"], out=out, options={"resume": True}, **RUNS)
    for name in ("diloco", "palsgd"):
        assert list(map(untimed, lines(out / name))) == list(map(untimed, lines(whole / name)))


def untimed(line):
    return {key: value for key, value in line.items() if not key.endswith("_s")}


def test_a_record_judges_and_shows_the_runs_that_have_ended(modules, tmp_path):
    study = modules("study")
    sweep = modules("calls").Sweep(
        name="sizes", recipe="digits",
        settings={"method": ["ddp", "localsgd"], "workers": 2, "steps": 8, "batch_size": 4},
    )  # fmt: skip
    part = study.Part("only", "?", [sweep])
    small = study.Study("small", "A study", lambda tiny: [part], [])
    words = ["--quiet", "--out", str(tmp_path / "runs"), "--device", "cpu"]
    assert study.main(small, words) == 0
    place = study.Place(tmp_path / "runs")
    (place.runs(part) / "sizes" / "method=localsgd" / "summary.json").unlink()  # under way
    assert [run.method for run in place.comparison(part).runs] == ["ddp"]
    assert study.main(small, [*words, "--minutes", "0", "--record", str(tmp_path / "record")]) == 0
    found = json.loads((tmp_path / "record" / "summary.json").read_text())["parts"]["only"]
    assert found["runs"]["done"] == 1
    assert [row["method"] for row in found["settings"]] == ["ddp"]
    assert "localsgd" not in (tmp_path / "record" / "only" / "loss-step.svg").read_text()


def test_finished_runs_are_known_by_their_small_files(tmp_path):
    compare("digits", ["diloco"], out=tmp_path, **RUNS)
    (tmp_path / "diloco" / "best.safetensors").unlink()
    before = (tmp_path / "diloco" / "metrics.jsonl").stat().st_mtime_ns
    compare("digits", ["diloco"], out=tmp_path, options={"resume": True}, **RUNS)
    assert (tmp_path / "diloco" / "metrics.jsonl").stat().st_mtime_ns == before


def test_an_end_is_for_simulated_runs():
    with pytest.raises(ValueError, match="until=0 ends simulated runs"):
        compare("digits", ["diloco"], simulate=False, options={"until": 0.0}, **RUNS)


@pytest.mark.slow
def test_a_study_runs_from_its_plan_to_its_record(tmp_path):
    said = ran(STUDIES / "vgg16.py", "--tiny", "--quiet", "--part", "scaling", "--out",
               tmp_path / "out", "--record", tmp_path / "record")  # fmt: skip
    assert said.code == 0, said.err
    found = json.loads((tmp_path / "record" / "summary.json").read_text())
    config = next((tmp_path / "out").rglob("config.yaml")).read_text()
    assert str(tmp_path) not in config + found["command"]  # a record names no folder of a machine
    assert "--out .../out" in found["command"]
    assert found["parts"]["scaling"]["runs"] == {"done": 6, "planned": 6, "failed": []}
    (claim,) = found["claims"]
    assert claim["ours"].count("2: ") == claim["ours"].count("4: ") == 3  # of three methods
    assert {"command", "commit", "dirty", "length"} <= set(found)
    assert found["made_by"][0]["device"]
    labels = [row["label"] for row in found["parts"]["scaling"]["settings"]]
    times = found["parts"]["scaling"]["time"]
    assert [list(each) for each in times.values()] == [labels] * 3
    assert "step=18.17ms" in next(iter(times)), "of 256 pictures, twice those of the other parts"
    assert len(found["parts"]["scaling"]["verdicts"]) > 4
    (call, _) = json.loads((tmp_path / "record" / "config.json").read_text())["scaling"]
    assert (call["kind"], call["recipe"], call["settings"]["workers"]) == ("compare", "digits", 2)
    assert "%" in claim["ours"]  # judged by accuracy
    assert (tmp_path / "record" / "scaling" / "loss-step.svg").exists()


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (
            ["--part", "nothing"],
            "--part nothing is unknown; vgg16 has interval, calm, tuned, scaling",
        ),
        (["--length", "2"], "--length 2 must be above 0 and at most 1"),
        (["--minutes", "-1"], "--minutes -1 must be a number >= 0"),
    ],
)
def test_what_cannot_be_is_refused_in_one_line(modules, capsys, words, said):
    assert modules("study").main(modules("vgg16").STUDY, ["--tiny", *words]) == 2
    assert capsys.readouterr().err == f"vgg16: {said}\n"


def test_the_table_has_a_row_for_every_claim_and_the_command_of_the_full_study(modules, tmp_path):
    reproduce, study = modules("reproduce"), modules("slowmo_table").STUDY
    rows = list(reproduce.rows(study, ["--tiny", "--out", str(tmp_path)]))
    assert [row[1] for row in rows] == [claim.paper for claim in study.claims]
    assert {row[2] for row in rows} == {"not run yet"}
    assert "python lab/studies/slowmo_table.py --part published" in reproduce.table(rows)
    assert set(reproduce.STUDIES) == set(SCRIPTS)


def test_pictures_are_the_same_after_they_were_shared_out_and_joined(modules, tmp_path):
    prepare = modules("prepare_cifar10")
    source, parts, joined = (tmp_path / name for name in ("source", "parts", "joined"))
    source.mkdir()
    for number, name in enumerate(prepare.FILES):
        (source / name).write_bytes(bytes([number]) * (1000 + number))
    made = prepare.split(source, parts, most=3500)
    assert len(made) == 3
    assert all(sum(p.stat().st_size for p in part.glob("*.*")) <= 3500 for part in made)
    aside = parts.parent / "aside"
    made[1].rename(aside)
    with pytest.raises(ValueError, match=r"data_batch_4\.webp.* is missing; bring the other parts"):
        prepare.join(parts, joined)
    aside.rename(made[1])
    prepare.join(parts, joined)
    for name in prepare.FILES:
        assert (joined / name).read_bytes() == (source / name).read_bytes()
    (made[0] / prepare.FILES[0]).write_bytes(b"other")
    with pytest.raises(ValueError, match="has not the SHA-256"):
        prepare.join(parts, joined)

"""Tuning: what is tried, that methods are treated alike, how the winner is chosen, and its file."""

import math
from dataclasses import replace
from statistics import fmean, stdev

import pytest
import yaml

from palsgd.lab import workloads
from palsgd.lab.explain import remarks
from palsgd.lab.forecast import forecast
from palsgd.lab.methods import default_names
from palsgd.lab.run_folder import RunFolder
from palsgd.lab.run_set import Options, run_all
from palsgd.lab.settings import Settings
from palsgd.lab.tuning.api import Tuning, tune
from palsgd.lab.tuning.budget import with_gradients
from palsgd.lab.tuning.halving import FRESH_SEEDS, RULE, SEARCH_SEEDS, halve, rungs, unlucky
from palsgd.lab.tuning.record import chosen_settings
from palsgd.lab.tuning.search_space import edges, points, shown, space_of
from palsgd.lab.tuning.tuned_file import read_tuned, shipped, tuned_elsewhere, tuned_settings
from palsgd.lab.tuning.tuner import Search, Trials
from support.commands import palsgd

METHODS = ("ddp", "localsgd", "diloco", "palsgd")
SPACE = {
    "lr": (1e-3, 1e-1),
    "schedule": ["constant", "cosine"],
    "sync_every": [4, 8],
    "outer_lr": (0.1, 1.0),
    "outer_momentum": [0.3, 0.6, 0.9],
    "mix_prob": [0.125, 0.25],
    "pull": (0.1, 0.6),
}


# -- the search space ------------------------------------------------------------------------------


def test_a_method_searches_the_fields_that_have_an_effect_on_it():
    fields = {method: set(space_of(SPACE, method)) for method in METHODS}
    assert fields["ddp"] == {"lr", "schedule"}
    assert fields["localsgd"] == fields["ddp"] | {"sync_every"}
    assert fields["diloco"] == fields["localsgd"] | {"outer_lr", "outer_momentum"}
    assert fields["palsgd"] == fields["diloco"] | {"mix_prob", "pull"} == set(SPACE)


def test_what_is_given_is_not_searched_nor_is_what_says_the_same():
    assert "lr" not in space_of(SPACE, "ddp", ["lr"])
    assert set(space_of(SPACE, "palsgd", ["mix_rate"])) == set(SPACE) - {"pull"}


def test_points_of_two_methods_are_equal_in_the_fields_that_both_have():
    ddp, palsgd_ = (points(space_of(SPACE, method), 12, 5) for method in ("ddp", "palsgd"))
    assert len(ddp) == len(palsgd_) == 12
    for one, other in zip(ddp, palsgd_, strict=True):
        assert one == {field: other[field] for field in one}
    assert points(SPACE, 12, 5) == points(SPACE, 12, 5) != points(SPACE, 12, 6)


def test_every_part_of_a_range_and_every_value_of_a_list_is_tried_equally_often():
    found = points(SPACE, 12, 5)
    parts = sorted(int(12 * math.log10(point["lr"] / 1e-3) / 2) for point in found)
    assert parts == list(range(12))
    assert all([p["outer_momentum"] for p in found].count(value) == 4 for value in (0.3, 0.6, 0.9))


@pytest.mark.parametrize(
    ("value", "end"),
    [(1.01e-3, "lowest"), (1.5e-3, "lowest"), (1.7e-3, None), (6e-2, None), (9e-2, "highest")],
)
def test_a_value_in_the_outer_tenth_of_a_range_is_at_its_edge(value, end):
    found = edges({"lr": (1e-3, 1e-1)}, {"lr": value})
    assert found == ({} if end is None else {"lr": end})


def test_the_first_and_last_value_of_a_list_are_edges_and_words_have_none():
    space = {"sync_every": [8, 16, 32], "schedule": ["constant", "cosine"], "workers": [4]}
    found = [edges(space, dict(sync_every=H, schedule="cosine", workers=4)) for H in (8, 16, 32)]
    assert found == [{"sync_every": "lowest"}, {}, {"sync_every": "highest"}]


def test_nothing_lies_below_zero_so_zero_is_no_edge():
    space = {"outer_momentum": [0.0, 0.3, 0.6]}
    found = [edges(space, {"outer_momentum": value}) for value in (0.0, 0.3, 0.6)]
    assert found == [{}, {}, {"outer_momentum": "highest"}]


@pytest.mark.parametrize("name", workloads.names())
def test_every_workload_says_what_to_try_and_every_value_can_be_trained(name):
    base = workloads.recipe(name)
    steps = base.total_steps(workloads.kind(name).examples)
    for method in METHODS:
        for point in points(space_of(workloads.search(name), method), 12, 0):
            settings = with_gradients(base.changed({"method": method, **point}), steps)
            assert remarks(forecast(settings, parameters=1)) == []


def test_a_workload_without_a_search_space_is_told_how_to_write_one(monkeypatch):
    monkeypatch.delattr("palsgd.lab.workloads.digits.SEARCH")
    with pytest.raises(ValueError, match=r"digits does not say what to try; add .* SEARCH = "):
        workloads.search("digits")


# -- equal examples --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("method", "changes", "steps"),
    [
        ("ddp", {}, 100),
        ("localsgd", {"sync_every": 10}, 100),
        ("localsgd", {"sync_every": 8}, 96),  # 12 rounds; 13 would be 104 gradients
        ("palsgd", {"sync_every": 10, "mix_prob": 0.2}, 120),  # 12 rounds of 8 gradients are 96
        ("palsgd", {"sync_every": 10, "mix_prob": 0.2, "warmup_steps": 20}, 120),  # 20 + 10 x 8
    ],
)
def test_steps_are_as_many_whole_rounds_as_the_gradients_allow(method, changes, steps):
    settings = Settings(workload="digits", steps=1).changed({"method": method, **changes})
    assert with_gradients(settings, 100).steps == steps


def test_a_budget_without_a_round_is_refused():
    settings = Settings(workload="digits", steps=1, sync_every=64, warmup_steps=50)
    with pytest.raises(ValueError, match=r"100 gradients are too few .*=50 .*=64; use more"):
        with_gradients(settings, 100)


# -- halving ---------------------------------------------------------------------------------------


def test_all_points_run_with_half_of_the_seeds_and_the_better_half_with_all():
    assert rungs(16, 8) == [(16, 4), (8, 8)]
    assert rungs(5, 3) == [(5, 2), (3, 3)]
    assert rungs(16, 1) == [(16, 1), (8, 1)]
    assert [rungs(few, 4) for few in (1, 2)] == [[(1, 2)], [(2, 2)]]


def table(loss, asked=None):
    """Trials that take no time: their loss is a function of method, point and seed."""

    def run(trials):
        if asked is not None:
            asked.append(trials)
        return {trial: loss(*trial) for trial in trials}

    return run


def test_the_best_point_wins_and_all_methods_get_equally_many_runs():
    best = {"ddp": 3, "palsgd": 11}
    asked = []
    run = table(lambda method, point, seed: abs(point - best[method]) + seed % 3, asked)
    runs_of_each = 16 * 2 + 8 * 2 + 2 * 4
    found = halve(list(best), 16, 4, 0, run)
    assert {method: outcome.winner for method, outcome in found.items()} == best
    assert {len(outcome.trials) for outcome in found.values()} == {runs_of_each}
    assert len(asked) == 3  # all methods of a rung are handed over together
    for outcome in found.values():
        assert len(set(outcome.trials)) == len(outcome.trials)


def test_finalists_are_judged_by_seeds_that_had_no_part_in_choosing_them():
    def loss(method, point, seed):  # point 0 was lucky in the search
        lucky = point == 0 and seed < FRESH_SEEDS
        return -1.0 if lucky else {0: 5.0, 1: 1.0}.get(point, 9.0)

    outcome = halve(["ddp"], 8, 2, 0, table(loss))["ddp"]
    assert outcome.finalists == [1, 0]
    assert outcome.judged[1] == {FRESH_SEEDS: 1.0, FRESH_SEEDS + 1: 1.0}
    searched = {seed for _, _, seed in outcome.trials} - set(outcome.judged[1])
    assert searched == {SEARCH_SEEDS, SEARCH_SEEDS + 1}


def test_a_point_whose_seeds_end_far_apart_does_not_win_by_a_lower_mean():
    def loss(method, point, seed):  # means 0.95 and 1
        return {0: 0.55 if seed % 2 else 1.35, 1: 1.0 + 0.01 * (seed % 2)}.get(point, 2.0)

    assert halve(["ddp"], 8, 4, 0, table(loss))["ddp"].winner == 1


def test_a_point_that_one_lucky_seed_makes_look_best_is_left_in_the_search():
    def loss(method, point, seed):
        lucky = point == 0 and seed == SEARCH_SEEDS
        return 0.1 if lucky else 1.0 + 0.1 * (point == 0)

    outcome = halve(["ddp"], 8, 8, 0, table(loss))["ddp"]
    assert 0 not in outcome.finalists


def test_an_unlucky_run_is_a_standard_deviation_above_the_mean():
    assert unlucky([1.0, 3.0]) == pytest.approx(2.0 + math.sqrt(2.0))
    assert unlucky([4.0]) == 4.0
    assert unlucky([1.0, math.inf]) == math.inf


def test_a_trial_that_failed_loses():
    run = table(lambda method, point, seed: math.inf if point < 7 else 1.0)
    assert halve(["ddp"], 8, 2, 0, run)["ddp"].winner == 7


# -- the file --------------------------------------------------------------------------------------

BASE = Settings(workload="digits", steps=600, mix_rate=4.0, lr=0.5, seed=3)
CHOSEN = {"lr": 0.01, "pull": 0.3, "sync_every": 16, "steps": 680}


@pytest.fixture
def tuned(tmp_path):
    path = tmp_path / "tuned.yaml"
    record = {
        "schema": 1, "workload": "digits", "recipe": "digits", "conditions": {"workers": 4},
        "methods": {"palsgd": {"settings": CHOSEN}},
    }  # fmt: skip
    path.write_text(yaml.safe_dump(record))
    return path


def test_a_method_gets_what_was_chosen_for_it_and_keeps_the_rest(tuned):
    found = tuned_settings(tuned, "palsgd", BASE)
    expected = dict(method="palsgd", lr=0.01, pull=0.3, mix_rate=None, sync_every=16, steps=680)
    assert found == replace(BASE, **expected)


def test_what_the_user_gives_is_kept_and_so_is_what_says_the_same(tuned):
    found = tuned_settings(tuned, "palsgd", BASE, given=["mix_rate", "steps"])
    assert (found.mix_rate, found.pull, found.steps, found.lr) == (4.0, None, 600, 0.01)


def test_what_was_tuned_under_other_conditions_says_so(tuned):
    assert tuned_elsewhere(tuned, BASE) is None
    assert "workers=4, not 8" in tuned_elsewhere(tuned, replace(BASE, workers=8))


@pytest.mark.parametrize(
    ("method", "changes", "said"),
    [
        ("ddp", {}, "has no settings for ddp, only for palsgd; tune it by .*--methods ddp"),
        ("palsgd", {"workload": "stories"}, "was tuned on digits, this is stories; tune it by"),
    ],
)
def test_a_file_for_something_else_is_refused(tuned, method, changes, said):
    with pytest.raises(ValueError, match=said):
        tuned_settings(tuned, method, replace(BASE, **changes))


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("a: 1", "has no schema, so it is no file of `palsgd tune`"),
        ("- 1", "has no fields"),
        ("{", "is not plain YAML"),
        ("{schema: 9, workload: x, conditions: {}, methods: {}}", "has schema 9, not 1; tune"),
    ],
)
def test_what_is_no_such_file_is_refused_in_one_line(tmp_path, text, said):
    path = tmp_path / "odd.yaml"
    path.write_text(text)
    with pytest.raises(ValueError, match=said):
        read_tuned(path)


def test_an_unknown_file_is_answered_with_the_recipes_that_come_with_one():
    with pytest.raises(ValueError, match=r"no file digitz; did you mean 'digits'\?.*: digits"):
        read_tuned("digitz")


@pytest.mark.parametrize("name", shipped())
def test_a_recipe_comes_with_settings_of_equal_trials_that_nothing_is_to_be_said_against(name):
    found, base = read_tuned(name), workloads.recipe(name)
    assert set(found["methods"]) >= set(default_names())
    assert found["split"] == "choose"
    assert not found["dirty"]
    assert found["search"] == {k: shown(v) for k, v in workloads.search(name).items()}
    assert len({own["runs"] for own in found["methods"].values()}) == 1
    examples = [own["gradient_examples"] for own in found["methods"].values() if not own["failed"]]
    assert min(examples) > 0.95 * max(examples)
    for method, own in found["methods"].items():
        settings = tuned_settings(name, method, base)
        assert settings.split == "test"
        assert own["loss"]["low"] < own["loss"]["value"] < own["loss"]["high"]
        assert remarks(forecast(settings, parameters=1)) == []


# -- trained ---------------------------------------------------------------------------------------

SMALL = dict(workers=2, batch_size=8, warmup_steps=4, steps=100)


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    """Two methods, four points each, on digits."""
    out = tmp_path_factory.mktemp("tune") / "tuned.yaml"
    return tune("digits", ["ddp", "palsgd"], trials=4, seeds=2, out=out, **SMALL)


def configs(tuning):
    return [RunFolder(path.parent).config() for path in tuning.runs.glob("*/config.yaml")]


def test_methods_get_equally_many_runs_and_examples_by_the_ledger(small):
    budget = 100 * 2 * 8
    assert small.record["gradient_examples_of_a_run"] == budget
    for method in ("ddp", "palsgd"):
        folders = [RunFolder(path.parent) for path in small.runs.glob(f"{method},*/config.yaml")]
        assert len(folders) == small.record["methods"][method]["runs"] == 4 + 2 + 2 * 2
        counted = [folder.summary()["gradient_steps"] * 2 * 8 for folder in folders]
        assert small.record["methods"][method]["gradient_examples"] == sum(counted)
        # whole rounds of 16 steps, of which a few more mix by chance
        assert all(budget - 2 * 16 * 16 < examples <= budget for examples in counted)
    mixed = [config["steps"] for config in configs(small) if config["method"] == "palsgd"]
    assert all(steps >= 100 for steps in mixed)
    assert max(mixed) > 100  # a method that skips gradients has more steps


def test_no_trial_sees_the_test_set(small):
    assert {config["split"] for config in configs(small)} == {"choose"}
    assert small.record["split"] == "choose"


def test_the_file_says_how_it_came_about(small):
    found = yaml.safe_load(small.path.read_text())
    assert found == small.record
    assert found["trials"] == 4
    assert found["search"]["lr"] == "0.003..0.1"
    assert found["rule"] == RULE
    assert found["seeds"] == {"search": [12023, 12024], "confirmed": [22023, 22024]}
    assert {"commit", "dirty", "command", "palsgd"} <= set(found)
    for own in found["methods"].values():
        losses = list(own["losses"].values())
        assert own["loss"]["value"] == pytest.approx(sum(losses) / 2)
        assert own["loss"]["low"] < min(losses)
        assert own["loss"]["deviation"] == pytest.approx(stdev(losses) / fmean(losses), abs=1e-4)
        assert own["runner_up"]["loss"]["n"] == 2


def test_the_winner_is_the_finalist_whose_runs_ended_lowest_on_held_out_data(small):
    frame = small.frame
    last = frame[frame.step == frame.steps]
    for method, own in small.record["methods"].items():
        fresh = last[(last.method == method) & (last.seed >= 22023)]
        assert len(fresh) == 2 * 2
        by_lr = {lr: list(losses) for lr, losses in fresh.groupby("lr").loss}
        lowest = min(by_lr, key=lambda lr: unlucky(by_lr[lr]))
        assert own["settings"]["lr"] == lowest
        assert small.settings(method).lr == lowest


def test_a_workload_that_is_judged_on_its_metric_is_tuned_on_it(small, monkeypatch):
    search = Search.of("digits", small.settings("ddp"), ["ddp"], trials=4, seeds=2)
    trials = Trials(search, small.runs, Options())
    trial = ("ddp", 0, 12023)
    summary = trials.summary(trial)
    assert trials.judged(trial) == summary["final_loss"]
    monkeypatch.setattr("palsgd.lab.workloads.digits.Digits.judged_on", "metric")
    assert trials.judged(trial) == -summary["final_metric"]
    assert trials.judged(("ddp", 99, 1)) == math.inf


def test_a_sentence_for_each_method_names_settings_loss_and_edges(small):
    record = small.record["methods"]["ddp"] | {"edges": {"lr": "highest"}, "failed": 1}
    odd = Tuning(small.path, small.runs, {"methods": {"ddp": record}})
    (sentence,) = odd.verdicts
    assert sentence.startswith("ddp: ")
    assert f", lr={record['settings']['lr']}, " in sentence
    assert "(n = 2, seeds deviate by " in sentence
    assert "at an edge of the search, better ones may lie beyond: lr at the" in sentence
    assert sentence.endswith("1 of 10 runs failed")


def test_a_page_about_the_trials_is_made_of_their_folder(small, tmp_path, monkeypatch):
    monkeypatch.setattr("palsgd.lab.report.write_report", lambda folders, path: (folders, path))
    assert small.report(tmp_path / "page.html") == ([small.runs], tmp_path / "page.html")


def test_finished_points_are_not_run_again(small, monkeypatch):
    def no_more(runs, **how):
        raise AssertionError(f"{len(runs)} runs were begun again")

    monkeypatch.setattr("palsgd.lab.run_set.simulate_runs", no_more)
    how = dict(trials=4, seeds=2, out=small.path, **SMALL)
    again = tune("digits", "ddp,palsgd", options={"resume": True}, **how)
    assert again.record["methods"] == small.record["methods"]
    with pytest.raises(ValueError, match="is not empty; add --resume"):
        tune("digits", ["ddp", "palsgd"], **how)


def test_a_trial_that_diverges_is_counted_and_loses(tmp_path, monkeypatch):
    monkeypatch.setattr("palsgd.lab.workloads.digits.SEARCH", {"lr": [1e25, 1e-2]})
    found = tune(
        "digits", ["ddp"], trials=2, seeds=1, out=tmp_path / "t.yaml", inner="sgd", **SMALL
    )
    own = found.record["methods"]["ddp"]
    assert own["settings"]["lr"] == 1e-2
    assert own["failed"] == 2  # with the seed of the search and with the fresh one


@pytest.mark.parametrize(
    ("methods", "said"),
    [
        (["ddp"], "no point of ddp in .*t-runs ends well .* try gentler settings$"),
        (["ddp", "localsgd"], "no point of localsgd in .* or tune the other methods alone$"),
    ],
)
def test_a_method_of_which_no_trial_ends_well_is_not_called_tuned(
    tmp_path, monkeypatch, methods, said
):
    space = {"lr": [1e25]} if len(methods) == 1 else {"lr": [1e-2], "sync_every": [8]}
    monkeypatch.setattr("palsgd.lab.workloads.digits.SEARCH", space)
    if len(methods) == 2:
        judged = Trials.judged
        monkeypatch.setattr(
            Trials, "judged", lambda own, t: math.inf if t[0] == "localsgd" else judged(own, t)
        )
    how = {"trials": 1, "seeds": 1, "inner": "sgd", **SMALL}
    with pytest.raises(ValueError, match=said):
        tune("digits", methods, out=tmp_path / "t.yaml", **how)
    assert not (tmp_path / "t.yaml").exists()


def test_a_recipe_in_epochs_gets_a_length_in_epochs_of_equal_gradients(tmp_path):
    base = workloads.recipe("digits").changed({"epochs": 4, "warmup_steps": 0, "sync_every": 8})
    given = ["sync_every", "mix_prob", "pull"]
    search = Search.of("digits", base, ["palsgd"], trials=1, seeds=1, given=given)
    assert search.gradients == 4 * (1150 // (4 * 32))  # of the data without the held out part
    chosen = chosen_settings(search, "palsgd", 0)
    assert chosen["epochs"] == pytest.approx(4 * 32 / 32)  # 4 rounds of 7.2 gradients are in 32
    assert base.changed(chosen).total_steps(1437) == 48  # 44 steps, to the nearest round


def test_runs_of_one_program_may_differ_in_their_schedules(tmp_path):
    base = workloads.recipe("digits").changed(SMALL | {"method": "diloco", "sync_every": 8})
    runs = {
        "constant": base,
        "cosine": replace(base, schedule="cosine"),
        "warm": replace(base, schedule="cosine", lr_warmup_steps=9),
    }
    for folder, share in (("one", True), ("three", False)):
        options = Options(simulate=True, quiet=True, share_program=share)
        run_all(runs, tmp_path / folder, options)
    for name in runs:
        one, three = (RunFolder(tmp_path / f / name).lines() for f in ("one", "three"))
        assert [line["lr"] for line in one] == [line["lr"] for line in three]
        losses = [[line["loss"] for line in lines if "loss" in line] for lines in (one, three)]
        assert losses[0] == pytest.approx(losses[1], rel=1e-4)


# -- the command -----------------------------------------------------------------------------------


def test_the_command_writes_the_file_and_says_what_was_chosen(tmp_path):
    out = tmp_path / "tuned.yaml"
    said = palsgd(
        "tune", "digits", "lr=0.01", "batch_size=8", "warmup_steps=0", "--methods",
        "localsgd,diloco", "--trials", 2, "--seeds", 1, "--workers", 2, "--steps", 16, "--quiet",
        "--out", out,
    )  # fmt: skip
    assert said.code == 0, said.err
    found = read_tuned(out)
    assert list(found["methods"]) == ["localsgd", "diloco"]
    assert "lr" not in found["search"]
    assert found["command"].startswith("palsgd tune digits lr=0.01")
    assert said.out.splitlines()[-1] == f"tuned: {out}"
    assert tuned_settings(out, "diloco", BASE, given=["lr"]).lr == 0.5


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--trials", 0), "trials=0 must be a whole number >= 1"),
        (("--out", "tuned"), "--out tuned is no YAML file; give for instance tuned/tuned.yaml"),
        (("--methods", "ddq"), "ddq"),
        (("--steps", 4), "4 gradients are too few for warmup_steps=0 and a round of sync_every=16"),
    ],
)
def test_bad_input_gets_one_line(tmp_path, monkeypatch, words, said):
    monkeypatch.chdir(tmp_path)
    found = palsgd("tune", "digits", *words)
    assert found.code == 2
    assert said in found.line
    assert not list(tmp_path.rglob("config.yaml"))

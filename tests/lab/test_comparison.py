"""What a comparison says, beside numbers worked out by hand from made-up runs."""

import json
import math
import re

import numpy as np
import pytest
from scipy import stats

from palsgd.lab.comparison import Comparison
from palsgd.lab.controls import controls_for
from palsgd.lab.groups import group
from palsgd.lab.report.speedups import QualityUnit, speed_lines
from palsgd.lab.report.tables import target_table
from palsgd.lab.run_folder import find_runs
from palsgd.lab.settings import Settings
from support import runs

BASE = Settings(workload="digits", method="palsgd", steps=300, workers=4, batch_size=32)


def write(folder, losses, *, simulated=False, settings=BASE, lines=None, **changes):
    """A finished run that was evaluated at steps 100, 200, ... with these losses."""
    chosen = settings.changed(changes)
    share = 90 if chosen.method == "palsgd" else 100  # gradients of a hundred steps
    lines = lines or [
        runs.line(0),
        *(
            runs.line(100 * at, loss=loss, metric=1 - loss, gradient_steps=share * at)
            for at, loss in enumerate(losses, start=1)
        ),
    ]
    runs.write_files(folder, runs.config(chosen, simulated=simulated), lines)
    (folder / "summary.json").write_text(json.dumps(runs.summary_of(chosen, lines)))


def seeds(folder, finals, **changes):
    """Runs that fall to these final losses, one for each seed from 1 on."""
    name = "-".join(str(value) for value in changes.values())
    for seed, final in enumerate(finals, start=1):
        write(folder / f"{name}-{seed}", [4.0, 2.0, final], seed=seed, **changes)


def compare(folder):
    return Comparison(group(find_runs([folder])))


def labelled(comparison, rows):
    return {row.group.label: row for row in rows(comparison)}


def finals(comparison):
    return labelled(comparison, Comparison.finals)


def to_target(comparison):
    return labelled(comparison, Comparison.to_target)


def by_label(comparison, label):
    return next(each for each in comparison.groups if each.label == label)


# -- the target ------------------------------------------------------------------------------------


def test_the_target_is_the_baselines_mean_final_loss_and_the_margin(tmp_path):
    seeds(tmp_path, [1.0, 1.2, 1.4], method="ddp", margin=0.05)
    seeds(tmp_path, [1.0, 1.2, 1.4], method="palsgd", margin=0.05)
    target = compare(tmp_path).target
    assert target.value == pytest.approx(1.2 * 1.05)
    assert (target.on, target.margin) == ("loss", 0.05)
    assert target.source == "ddp's mean final loss over 3 seeds + 5%"


def test_a_stated_target_goes_before_what_the_baseline_reaches(tmp_path):
    seeds(tmp_path, [1.0, 1.2], method="ddp", target=1.5)
    assert compare(tmp_path).target.value == 1.5
    assert compare(tmp_path).target.source == "stated"


def test_a_target_may_be_on_the_metric(tmp_path):
    """More is better: DDP ends with accuracies of .8 and .9, PALSGD passes .85 - 1% on its way."""
    how = {"target_on": "metric"}
    write(tmp_path / "d1", [0.5, 0.3, 0.2], method="ddp", seed=1, **how)
    write(tmp_path / "d2", [0.5, 0.3, 0.1], method="ddp", seed=2, **how)
    write(tmp_path / "p1", [0.5, 0.1, 0.1], seed=1, **how)
    found = compare(tmp_path)
    assert found.target.value == pytest.approx(0.85 * 0.99)
    cost = to_target(found)["palsgd"].costs["step"].cost.value
    assert cost == pytest.approx(100 + 100 * (0.85 * 0.99 - 0.5) / 0.4)
    assert finals(found)["palsgd"].difference.value == pytest.approx(-0.1 / 0.8)
    assert "12.5% above ddp's" in found.verdicts[0]


def test_a_badly_tuned_baseline_makes_no_target(tmp_path):
    for rate, final in ((0.1, 3.0), (0.01, 1.0)):
        write(tmp_path / f"ddp{rate}", [4.0, 3.5, final], method="ddp", lr=rate)
        write(tmp_path / f"palsgd{rate}", [4.0, 3.5, final], lr=rate)
    found = compare(tmp_path)
    assert found.target.value == pytest.approx(1.01)
    assert "the best of 2 by its own final loss" in found.target.source
    assert found.baseline(by_label(found, "palsgd lr=0.1")).label == "ddp lr=0.01"


def test_each_k_and_batch_has_its_own_target_and_budgets(tmp_path):
    for workers, batch, final in ((4, 32, 1.0), (8, 32, 2.0), (4, 64, 3.0)):
        how = {"workers": workers, "batch_size": batch}
        name = f"{workers}-{batch}"
        write(tmp_path / f"ddp{name}", [4.0, 3.5, final], method="ddp", **how)
        write(tmp_path / f"palsgd{name}", [4.0, 3.5], **how)
    found = compare(tmp_path)
    targets = sorted({found.target_of(each).value for each in found.groups})
    assert targets == pytest.approx([1.01, 2.02, 3.03])
    assert found.target is None
    assert found.budgets(by_label(found, "palsgd K=8 batch size=32")) == {
        "step": 200, "gradient_steps": 180, "examples": 180 * 8 * 32, "bytes_sent": 200_000,
        "time_s": pytest.approx(20.0),
    }  # fmt: skip


def test_without_a_baseline_there_is_no_target_and_the_sentence_says_why(tmp_path):
    seeds(tmp_path, [1.0, 1.1], method="palsgd")
    found = compare(tmp_path)
    assert (found.target, found.to_target()) == (None, [])
    assert "without a run of ddp there is nothing to compare it with" in found.verdicts[0]


# -- costs -----------------------------------------------------------------------------------------


def test_a_target_is_reached_between_two_evaluations_on_every_axis(tmp_path):
    write(tmp_path / "ddp", [4.0, 2.0, 1.0], method="ddp", target=1.5)
    write(tmp_path / "palsgd", [4.0, 1.0, 1.0], target=1.5)
    rows = to_target(compare(tmp_path))
    assert rows["ddp"].costs["step"].cost.value == pytest.approx(250)
    assert rows["ddp"].costs["step"].resolution == 100
    place = 100 + 100 * 2.5 / 3
    costs = {axis: found.cost.value for axis, found in rows["palsgd"].costs.items()}
    assert costs == {
        "step": pytest.approx(place),
        "gradient_steps": pytest.approx(0.9 * place),
        "examples": pytest.approx(0.9 * place * 128),
        "bytes_sent": pytest.approx(1000 * place),
        "time_s": pytest.approx(place / 10),
    }
    assert rows["palsgd"].speed_ups["step"].value == pytest.approx(250 / place)
    assert not rows["palsgd"].speed_ups["step"].known


def test_what_is_not_reached_says_how_far_it_is(tmp_path):
    seeds(tmp_path, [1.0, 1.0, 1.0], method="ddp", target=1.0)
    seeds(tmp_path, [1.1, 1.2, 1.3], method="palsgd", target=1.0)
    found = compare(tmp_path)
    row = to_target(found)["palsgd"]
    assert not row.reached
    low, high = stats.t.interval(0.95, 2, 0.2, stats.sem([0.1, 0.2, 0.3]))
    assert (row.shortfall.low, row.shortfall.high) == pytest.approx((low, high))
    (sentence,) = [each for each in found.verdicts if each.startswith("To loss")]
    assert "palsgd does not reach it within 300 steps (ends 20% [-4.84, 44.8] above)" in sentence
    assert "missed" not in " ".join(found.verdicts)


def test_an_accuracy_that_is_not_reached_is_ended_below(tmp_path):
    """Of a loss the method would have ended above it."""
    write(tmp_path / "ddp", [0.5, 0.2], method="ddp", target=0.75, target_on="metric")
    write(tmp_path / "palsgd", [0.5, 0.4], method="palsgd", target=0.75, target_on="metric")
    found = compare(tmp_path)
    (sentence,) = [each for each in found.verdicts if each.startswith("To ")]
    assert "palsgd does not reach it within 200 steps (ends 20% below)" in sentence
    (_, row) = target_table(found).rows
    assert "(ends 20% below)" in row.cells[0].text


def test_a_target_that_is_reached_in_the_warm_up_tells_nothing_about_a_method(tmp_path):
    """Until then it is no other method than the baseline, so that what differs is chance."""
    write(tmp_path / "ddp", [4.0, 2.0, 1.0], method="ddp", target=3.0)
    for name, warmup in (("diloco", 200), ("palsgd", 199)):
        write(tmp_path / name, [4.0, 1.0, 1.0], method=name, target=3.0, warmup_steps=warmup)
    found = compare(tmp_path)
    rows = to_target(found)
    assert rows["diloco"].in_warmup
    assert rows["diloco"].speed_ups == {}
    assert not rows["palsgd"].in_warmup, "it was seen there at step 200, and no sooner"
    assert rows["palsgd"].speed_ups["step"].value == pytest.approx(150 / (100 + 100 / 3))
    said = {each.split(": ")[1] for each in found.verdicts if each.startswith("To loss")}
    early = "diloco arrives in its warm-up of 200 steps, until when it is no other method than ddp"
    assert early in said
    assert any(each.startswith("palsgd takes 0.889 x ddp's steps") for each in said)
    (line,) = speed_lines(found, found.groups, "step", QualityUnit(found))
    assert line.group.label == "palsgd", "the figure leaves out what is reached in a warm-up"


def test_a_target_above_the_first_loss_is_in_no_warm_up_of_a_method_without_one(tmp_path):
    write(tmp_path / "ddp", [4.0, 2.0], method="ddp", target=9.0)
    for name in ("diloco", "localsgd"):
        lines = [runs.line(0, loss=5.0, metric=0.1), runs.line(100, loss=4.0, metric=0.2)]
        write(tmp_path / name, [], lines=lines, method=name, target=9.0, warmup_steps=0)
    found = compare(tmp_path)
    assert not any(row.in_warmup for row in found.to_target())
    assert not any("warm-up" in each for each in found.verdicts)
    (said,) = [each for each in found.verdicts if each.startswith("To ")]  # of two like programs
    assert said.endswith("diloco has it before it trains: this target does not compare methods.")


def over_a_link(folder):
    return Comparison(group(find_runs([folder])), "100mbit,1ms,step=50ms").headline


def test_a_headline_says_that_a_target_is_reached_in_the_warm_up(tmp_path):
    write(tmp_path / "ddp", [4.0, 2.0, 1.0], method="ddp", target=3.0, simulated=True)
    write(tmp_path / "palsgd", [4.0, 1.0, 1.0], target=3.0, warmup_steps=200, simulated=True)
    said = over_a_link(tmp_path)
    assert "PALSGD reaches DDP's loss in its warm-up, until when both are one method" in said


def test_a_headline_makes_no_gain_of_what_a_method_ends_with_in_its_warm_up(tmp_path):
    write(tmp_path / "ddp", [4.0, 2.2, 1.0], method="ddp", simulated=True)
    write(tmp_path / "palsgd", [4.0, 2.0, 2.0], warmup_steps=250, simulated=True)
    said = over_a_link(tmp_path)
    assert "2.02, it reaches in its warm-up, until when both are one method" in said


def test_a_headline_makes_no_gain_of_a_target_that_takes_no_time(tmp_path):
    for method, loss in (("ddp", 1.0), ("palsgd", 1.1)):
        lines = [runs.line(step, loss=loss, metric=0.0) for step in (0, 100)]
        write(tmp_path / method, [], lines=lines, method=method, target=5.0, simulated=True)
    assert "PALSGD reaches DDP's loss at once, with" in over_a_link(tmp_path)


def test_a_headline_says_at_once_only_where_no_time_is_taken(tmp_path):
    write(tmp_path / "ddp", [4.0, 3.0, 2.0], method="ddp", seed=1, simulated=True)
    for seed, losses in ((1, [4.0, 3.5, 3.0]), (2, [4.0, 2.0, 1.0]), (3, [4.0, 2.0, 1.0])):
        write(tmp_path / f"p{seed}", losses, method="palsgd", seed=seed, simulated=True)
    said = over_a_link(tmp_path)
    assert "PALSGD reaches DDP's loss with seeds that DDP has not, and not with those that" in said


def test_a_headline_says_which_of_two_never_arrives_with_the_seeds_that_both_have(tmp_path):
    for seed, end in ((1, 3.0), (2, 1.0), (3, 1.0)):
        write(tmp_path / f"d{seed}", [4.0, 3.5, end], method="ddp", seed=seed, simulated=True)
    write(tmp_path / "palsgd", [4.0, 2.0, 1.5], method="palsgd", seed=1, simulated=True)
    said = over_a_link(tmp_path)
    assert "PALSGD reaches DDP's loss where DDP never is with the seeds that both have" in said


def test_a_headline_of_a_method_that_ends_worse_than_it_began_has_its_end_at_once(tmp_path):
    for method, losses in (("ddp", [2.3, 1.0, 0.5]), ("palsgd", [2.3, 4.0, 5.0])):
        lines = [runs.line(100 * i, loss=loss, metric=0.0) for i, loss in enumerate(losses)]
        write(tmp_path / method, [], lines=lines, method=method, warmup_steps=0, simulated=True)
    assert "its own final loss + 1%, 5.05, it reaches at once, with" in over_a_link(tmp_path)


def test_a_headline_says_below_of_a_lower_accuracy_and_above_of_a_higher_loss(tmp_path):
    for end, said in ((0.4, "25% below DDP"), (0.1, "12% above DDP")):
        for method, last in (("ddp", 0.2), ("palsgd", end)):
            write(tmp_path / f"{end}" / method, [0.9, last], method=method, simulated=True,
                  target_on="metric")  # fmt: skip
        assert f"it ends {said} with 0.9 x" in over_a_link(tmp_path / f"{end}")
    for method, last in (("ddp", 0.2), ("palsgd", 0.3)):
        write(tmp_path / "loss" / method, [0.9, last], method=method, simulated=True)
    assert "it ends 50% above DDP with 0.9 x" in over_a_link(tmp_path / "loss")


def test_a_headline_gives_a_method_without_a_finite_end_no_target_and_no_gain(tmp_path):
    write(tmp_path / "ddp", [2.3, 1.0, 0.5], method="ddp", simulated=True)
    lines = [runs.line(100 * i, loss=loss, metric=0.0) for i, loss in enumerate([2.3, 4.0, 5.0])]
    lines[-1]["loss"] = None
    write(tmp_path / "palsgd", [], lines=lines, simulated=True)
    said = over_a_link(tmp_path)
    assert "PALSGD does not reach DDP's loss in 200 steps, with" in said
    assert said.endswith("1 of 1 run of palsgd ends without a finite loss: no verdict.")


def test_a_headline_and_sentences_say_that_a_stated_target_is_reached_by_the_method_alone(tmp_path):
    write(tmp_path / "ddp", [4.0, 3.0, 2.0], method="ddp", target=1.5, simulated=True)
    write(tmp_path / "palsgd", [4.0, 1.0, 1.0], target=1.5, warmup_steps=200, simulated=True)
    assert "PALSGD reaches loss 1.5, which DDP never does" in over_a_link(tmp_path)
    said = " ".join(compare(tmp_path).verdicts)
    assert "To loss 1.5 (stated): palsgd takes 183" in said


def test_a_run_that_diverged_reaches_nothing_and_is_judged_by_nobody(tmp_path):
    seeds(tmp_path, [1.0, 1.1], method="ddp")
    lines = [runs.line(100, loss=2.0, metric=0.1), runs.line(200, loss=None, metric=0.1)]
    lines[1]["loss"] = None
    for seed in (1, 2):
        write(tmp_path / f"p{seed}", [], lines=lines, seed=seed)
    found = compare(tmp_path)
    assert finals(found)["palsgd"].loss.value == math.inf
    assert any("it ends without a finite value" in each for each in found.verdicts)


def test_simulated_runs_without_a_cluster_have_no_seconds(tmp_path):
    for method in ("ddp", "palsgd"):
        write(tmp_path / method, [4.0, 2.0, 1.0], method=method, simulated=True)
    found = compare(tmp_path)
    assert all("time_s" not in found.curve(each).costs for each in found.groups)
    assert "time_s" not in finals(found)["palsgd"].equal
    assert "no seconds, give --link to project" in found.verdicts[-1]


def test_equal_budgets_are_interpolated(tmp_path):
    """PALSGD ends at 270 gradients, where DDP is between 2 and 1."""
    write(tmp_path / "ddp", [4.0, 2.0, 1.0], method="ddp")
    write(tmp_path / "palsgd", [4.0, 2.0, 1.5])
    rows = finals(compare(tmp_path))
    assert rows["ddp"].equal["gradient_steps"].value == pytest.approx(2.0 - 0.7)
    assert rows["ddp"].equal["examples"].value == pytest.approx(1.3)
    assert rows["palsgd"].equal["gradient_steps"].value == pytest.approx(1.5)


# -- seeds -----------------------------------------------------------------------------------------


def test_copies_of_a_run_are_no_replicates(tmp_path):
    """DDP ignores the interval: of nine runs three are different."""
    for every in (16, 32, 64):
        for seed, final in enumerate((1.0, 1.2, 1.4)):
            write(tmp_path / f"{every}-{seed}", [4.0, final], method="ddp", seed=seed,
                  sync_every=every)  # fmt: skip
    (row,) = compare(tmp_path).finals()
    assert (row.loss.n, len(row.group.repeats)) == (3, 6)
    low, high = stats.t.interval(0.95, 2, 1.2, stats.sem([1.0, 1.2, 1.4]))
    assert (row.loss.low, row.loss.high) == pytest.approx((low, high))


def test_differences_are_paired_and_relative_to_the_baseline(tmp_path):
    ddp, own = np.array([1.0, 1.5, 2.0]), np.array([1.02, 1.56, 2.04])
    seeds(tmp_path, ddp.tolist(), method="ddp")
    seeds(tmp_path, own.tolist(), method="palsgd")
    found = finals(compare(tmp_path))["palsgd"].difference
    ends = stats.t.interval(0.95, 2, (own - ddp).mean(), stats.sem(own - ddp))
    assert (found.low, found.high) == pytest.approx(tuple(np.array(ends) / ddp.mean()))


def test_runs_without_a_common_seed_get_no_verdict(tmp_path):
    write(tmp_path / "ddp", [4.0, 1.0], method="ddp", seed=1)
    write(tmp_path / "palsgd", [4.0, 1.0], seed=2)
    assert "no seed in common with ddp, no verdict" in compare(tmp_path).verdicts[0]


# -- words -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("ddp", "palsgd", "said"),
    [
        ([1.0] * 3, [1.0, math.inf, math.inf], "2 of 3 runs of palsgd end without a finite loss"),
        ([1.0, math.inf, 1.0], [1.0] * 3, "but 1 of 3 runs of ddp ends without a finite loss"),
        ([math.inf] * 3, [math.inf] * 3, "3 of 3 runs of palsgd end without a finite loss"),
    ],
)
def test_runs_without_a_finite_end_are_counted_and_get_no_verdict(tmp_path, ddp, palsgd, said):
    for method, ends in (("ddp", ddp), ("palsgd", palsgd)):
        ends = [None if math.isinf(end) else end for end in ends]
        for seed, end in enumerate(ends, start=1):
            lines = [runs.line(0), runs.line(100, loss=4.0, metric=0.1, gradient_steps=90)]
            gradients = 180 if method == "palsgd" else 200
            last = runs.line(200, metric=0.2, gradient_steps=gradients) | {"loss": end}
            how = {"method": method, "seed": seed, "tuned": "digits.yaml"}
            write(tmp_path / f"{method}{seed}", [], lines=[*lines, last], **how)
    words = " ".join(compare(tmp_path).verdicts)
    assert f"{said}: no verdict." in words
    assert not re.search(r"\b(nan|inf)\b|undecided", words)


@pytest.mark.parametrize(
    ("ends", "word"),
    [
        ([1.3, 1.31, 1.29], "30% [27.5, 32.5] above ddp's"),
        ([1.3, 1.31, 1.29], ": worse (3 paired seeds, margin 1%)."),
        ([0.7, 0.71, 0.69], ": better (3 paired seeds, margin 1%)."),
        ([1.001, 1.0, 0.999], ": equivalent (3 paired seeds, margin 1%)."),
        ([1.05, 0.98, 1.0], ": undecided, about 102 seeds would decide (3 paired seeds"),
    ],
)
def test_words_come_from_the_interval_where_settings_are_tuned(ends, word, tmp_path):
    seeds(tmp_path, [1.0, 1.0, 1.0], method="ddp", tuned="digits.yaml")
    seeds(tmp_path, ends, method="palsgd", tuned="digits.yaml")
    assert word in compare(tmp_path).verdicts[0]


def test_untuned_settings_get_numbers_and_no_word(tmp_path):
    seeds(tmp_path, [1.0, 1.0], method="ddp", tuned="digits.yaml")
    seeds(tmp_path, [1.3, 1.31], method="palsgd")
    said = compare(tmp_path).verdicts
    assert said[0].endswith(": untuned, no verdict (2 paired seeds).")
    assert "untuned: curves only, no verdict on methods" in said[-1]
    assert not any(word in " ".join(said) for word in ("better", "worse", "equivalent"))


def test_one_seed_gets_no_verdict(tmp_path):
    for method, final in (("ddp", 1.0), ("palsgd", 2.0)):
        write(tmp_path / method, [4.0, final], method=method, tuned="digits.yaml")
    said = compare(tmp_path).verdicts
    assert said[0].endswith(": one seed: no verdict.")
    assert not any(word in " ".join(said) for word in ("better", "worse", "["))


def test_the_first_sentence_has_gain_and_loss_in_numbers(tmp_path):
    seeds(tmp_path, [1.0, 1.1], method="ddp")
    for seed, final in ((1, 1.2), (2, 1.3)):
        lines = [runs.line(300, loss=final, metric=0.1, gradient_steps=270, bytes_sent=30_000)]
        write(tmp_path / f"p{seed}", [], lines=lines, seed=seed)
    first = compare(tmp_path).verdicts[0]
    assert first.startswith("palsgd ends at loss 1.25, 19% [19, 19] above ddp's, with 0.9 x its")
    assert "0.9 x its gradients and 0.1 x its bytes" in first


def test_a_sweep_of_many_settings_says_what_its_best_comes_to(tmp_path):
    for rate in (0.1, 0.2, 0.3):
        for place, method in enumerate(("ddp", "diloco", "palsgd")):
            ends = [1 + rate + place, 1.1 + rate + place]
            seeds(tmp_path, ends, method=method, lr=rate)
    said = compare(tmp_path).verdicts
    assert "palsgd lr=0.1 ends at loss 3.15 (the best of 3 settings by this figure)" in said[0]
    assert sum("ends at loss" in each for each in said) == 2


# -- the same program ------------------------------------------------------------------------------


def test_runs_with_equal_lines_are_the_same_program_and_have_no_speed_up(tmp_path):
    lines = [runs.line(100, loss=2.0, metric=0.5), runs.line(200, loss=1.0, metric=0.6)]
    for method in ("ddp", "localsgd", "palsgd"):
        write(tmp_path / method, [], lines=[x | {"time_s": len(method)} for x in lines],
              method=method)  # fmt: skip
    found = compare(tmp_path)
    same = {one.label: other.label for one, other in found.same_programs.items()}
    assert same == {"localsgd": "ddp", "palsgd": "ddp"}
    assert all(not row.speed_ups for row in found.to_target())
    assert found.verdicts[:2] == [
        f"{name} is the same program as ddp: there is nothing to compare."
        for name in ("palsgd", "localsgd")
    ]


def test_one_evaluation_that_differs_tells_programs_apart(tmp_path):
    write(tmp_path / "ddp", [2.0, 1.0], method="ddp")
    write(tmp_path / "localsgd", [2.0, 1.0 + 1e-9], method="localsgd")
    assert compare(tmp_path).same_programs == {}


# -- controls --------------------------------------------------------------------------------------


def write_controls(folder, values, **more):
    """Finals of palsgd and of its controls, by name; each a list over seeds."""
    subject = BASE.changed({"mix_prob": 0.2, "mix_rate": 1.0, "sync_every": 4, **more})
    made = {"palsgd": subject, **controls_for({"palsgd": subject})[0]}
    made["ddp"] = subject.changed({"method": "ddp"})
    for name, ends in values.items():
        for seed, final in enumerate(ends, start=1):
            write(folder / f"{name},seed={seed}", [4.0, 2.0, final], seed=seed,
                  settings=made[name])  # fmt: skip


VALUES = {
    "ddp": [1.0, 1.1, 1.2],
    "diloco-same-settings": [2.0, 2.2, 2.4],
    "diloco-raised-lr": [1.8, 2.1, 2.2],
    "palsgd-no-pull": [2.1, 2.3, 2.4],
    "palsgd": [2.0, 2.25, 2.3],
}


def test_mixing_is_judged_by_its_best_control(tmp_path):
    write_controls(tmp_path, VALUES, tuned="digits.yaml")
    said = " ".join(compare(tmp_path).verdicts)
    assert "Against its best control of 3, diloco-raised-lr, palsgd ends" in said
    assert "ddp-accumulated" not in said


@pytest.mark.parametrize("lost", [["palsgd"], ["palsgd-no-pull"], [*VALUES][1:4]])
def test_controls_without_a_finite_end_give_no_parts_and_no_nan(tmp_path, lost):
    gone = {name: [1e9, math.inf, 1e9] for name in lost}
    write_controls(tmp_path, VALUES | gone, tuned="digits.yaml")
    said = " ".join(compare(tmp_path).verdicts)
    assert "without a finite loss" in said
    assert "Of palsgd's" not in said
    assert not re.search(r"\b(nan|inf)\b", said)


def test_the_parts_of_mixing_sum_up_to_the_whole_difference(tmp_path):
    write_controls(tmp_path, VALUES, tuned="digits.yaml")
    (sentence,) = [each for each in compare(tmp_path).verdicts if each.startswith("Of palsgd's")]
    plain, raised, skipped, own = (
        np.array(VALUES[name])
        for name in ("diloco-same-settings", "diloco-raised-lr", "palsgd-no-pull", "palsgd")
    )
    parts = {
        "the raised learning rate": raised - plain,
        "skipping gradients": skipped - raised,
        "the pull": own - skipped,
    }
    for name, difference in parts.items():
        low, high = stats.t.interval(0.95, 2, difference.mean(), stats.sem(difference))
        share = 100 / plain.mean()
        value = f"{name} {difference.mean() * share:+.2g}%"
        assert f"{value} [{low * share:.3g}, {high * share:.3g}]" in sentence
    assert sum(part.mean() for part in parts.values()) == pytest.approx((own - plain).mean())


def test_controls_have_names_of_their_own_and_are_no_methods(tmp_path):
    write_controls(tmp_path, VALUES)
    found = compare(tmp_path)
    labels = [each.label for each in found.groups]
    assert labels[:2] == ["ddp", "palsgd"]
    assert set(labels[2:]) == set(VALUES) - {"ddp", "palsgd"}
    assert sum("ends at loss" in each for each in found.verdicts) == 1

"""Controls differ from a mixing method in one thing, and are recognised wherever they come from."""

import pytest

from palsgd.lab import workloads
from palsgd.lab.controls import CONTROLS, controls_beside, controls_for, find_controls
from palsgd.lab.groups import group
from palsgd.lab.run_folder import find_runs
from palsgd.lab.run_list import compared_runs, with_controls, with_seeds
from support import runs

BASE = workloads.recipe("stories").changed(
    {"method": "palsgd", "workers": 2, "steps": 1000, "warmup_steps": 40, "sync_every": 32,
     "mix_prob": 0.25, "mix_rate": 1.0, "lr": 0.003, "compress": "int8", "evaluate_every": 64}
)  # fmt: skip


def changed(control):
    """The settings in which a control of BASE differs from it."""
    made, before = controls_for({"palsgd": BASE})[0][control].as_dict(), BASE.as_dict()
    return {name: value for name, value in made.items() if before[name] != value}


def test_each_control_changes_its_one_thing():
    assert changed("palsgd-no-pull") == {"mix_rate": 0.0}
    assert changed("diloco-same-settings") == {"method": "diloco"}
    assert changed("diloco-raised-lr") == {"method": "diloco", "lr": 0.004}


def test_equal_gradients_are_equal_syncs_too():
    """H' = .75 * 32 = 24; 40 steps of warm-up, 960 local ones in 30 rounds, 30 rounds of 24."""
    assert changed("diloco-equal-gradients") == {
        "method": "diloco", "sync_every": 24, "steps": 40 + 30 * 24, "evaluate_every": 49,
    }  # fmt: skip


def test_accumulation_sees_as_many_examples_in_as_few_exchanges_as_rounds():
    found = controls_for({"palsgd": BASE})[0]["ddp-accumulated"]
    assert (found.method, found.steps) == ("ddp", round(1000 / 32))
    assert found.batch_size == 32 * BASE.batch_size
    assert found.batch_size // found.micro_batches == BASE.batch_size // BASE.micro_batches
    assert found.evaluate_every == 2


def test_a_control_that_cannot_be_had_is_left_out_with_the_reason():
    digits = workloads.recipe("digits").changed({"sync_every": 32})
    found, left_out = controls_for({"palsgd": digits})
    assert "ddp-accumulated" not in found
    (reason,) = left_out.values()
    assert "take 4096 examples in a step, and an epoch has 1437" in reason
    assert len(controls_for({"palsgd": digits.changed({"sync_every": "auto"})})[1]) == 2


def test_controls_are_chosen_by_their_names():
    runs, _ = compared_runs(
        {"palsgd": BASE}, recipe="stories", tuned="none", controls=["no-pull", "equal-gradients"]
    )
    assert set(runs) == {"palsgd", "palsgd-no-pull", "diloco-equal-gradients"}
    with pytest.raises(ValueError, match="a control='pull' is unknown; use one of 'no-pull'"):
        compared_runs({"palsgd": BASE}, recipe="stories", tuned="none", controls=["pull"])
    with pytest.raises(ValueError, match="controls='no-pull' must be True, False or a list"):
        compared_runs({"palsgd": BASE}, recipe="stories", tuned="none", controls="no-pull")


def test_methods_that_do_not_mix_have_no_controls():
    plain = {"diloco": BASE.changed({"method": "diloco"}), "p": BASE.changed({"mix_prob": 0.0})}
    assert controls_for(plain) == ({}, {})


def test_the_noise_floor_of_a_single_seed_is_another_one():
    both = {name: BASE.changed({"method": name}) for name in ("ddp", "palsgd")}
    assert with_controls(both, seeds=1)[0]["ddp-other-seed"].seed == BASE.seed + 1
    assert "ddp-other-seed" not in with_controls(both, seeds=2)[0]


def test_seeds_are_counted_from_the_runs_own():
    found = with_seeds({"ddp": BASE.changed({"method": "ddp", "seed": 7}), "palsgd": BASE}, 2)
    own = BASE.seed
    names = ["ddp,seed=7", f"palsgd,seed={own}", "ddp,seed=8", f"palsgd,seed={own + 1}"]
    assert list(found) == names, "the first seed of all before the second of any"
    assert [settings.seed for settings in found.values()] == [7, own, 8, own + 1]
    assert with_seeds({"palsgd": BASE}, 1) == {"palsgd": BASE}
    with pytest.raises(ValueError, match="seeds=0 must be a whole number >= 1"):
        with_seeds({"palsgd": BASE}, 0)


def test_a_recipe_as_it_is_comes_with_its_tuned_settings():
    digits = {m: workloads.recipe("digits").changed({"method": m}) for m in ("ddp", "palsgd")}
    found, remarks = compared_runs(digits, recipe="digits", given=("seed", "workers"))
    assert remarks == []
    assert found["ddp"].lr != found["palsgd"].lr
    assert all(each.tuned.startswith("digits.yaml ") for each in found.values())


def test_a_user_who_changes_the_recipe_gets_equal_settings_for_all():
    digits = {m: workloads.recipe("digits").changed({"method": m}) for m in ("ddp", "palsgd")}
    longer = {name: each.changed({"warmup_steps": 600}) for name, each in digits.items()}
    found, (remark,) = compared_runs(longer, recipe="digits", given=("warmup_steps",))
    assert found == longer
    assert remark.startswith(
        "warmup_steps as given, so all methods have the settings of the recipe"
    )


def test_controls_are_found_by_their_settings_whatever_their_folders_are_called(tmp_path):
    for number, settings in enumerate(
        [BASE, BASE.changed({"lr": 0.001}), *controls_for({"palsgd": BASE})[0].values()]
    ):
        runs.write_files(tmp_path / f"run{number}", runs.config(settings), [runs.line(1)])
    groups = group(find_runs([tmp_path]))
    (subject,) = [g for g in groups if g.settings["lr"] == 0.003 and g.settings.get("mix_rate")]
    found = find_controls(groups)
    assert set(found[subject]) == set(CONTROLS)
    assert {recipe.suffix: twin.method for recipe, twin in found[subject].items()} == {
        "no-pull": "palsgd", "same-settings": "diloco", "raised-lr": "diloco",
        "equal-gradients": "diloco", "accumulated": "ddp",
    }  # fmt: skip
    assert list(found) == [subject], "neither the one that does not pull, nor the one without any"
    everyone = controls_beside(groups)
    assert everyone[subject] == found[subject]
    (plain,) = [each for each in everyone if each is not subject]
    assert plain is next(twin for each, twin in found[subject].items() if each.suffix == "no-pull")
    assert everyone[plain] == {
        recipe: twin for recipe, twin in found[subject].items() if recipe.suffix != "no-pull"
    }, "the one that does not pull is beside its other controls"

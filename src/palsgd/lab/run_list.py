"""Which runs a comparison has: every method with its tuned settings and the same seeds, and the
controls.

A run's name is that of its setting, and `,seed=S` where there are several seeds.
"""

import hashlib
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

from palsgd.checks import check_int
from palsgd.lab import workloads
from palsgd.lab.controls import CONTROLS, OTHER_SEED, Recipe, chosen_controls, controls_for
from palsgd.lab.methods import is_baseline
from palsgd.lab.programs import NOT_COMPUTED
from palsgd.lab.settings import Settings, setting_name, with_alternatives
from palsgd.lab.tuning.tuned_file import (
    read_tuned,
    shipped,
    tuned_elsewhere,
    tuned_path,
    tuned_settings,
)

NO_TUNING = "none"


def compared_runs(
    runs: Mapping[str, Settings],
    *,
    recipe: str,
    seeds: int = 1,
    controls: bool | Sequence[str] = False,
    tuned: Path | str | None = None,
    given: Collection[str] = (),
) -> tuple[dict[str, Settings], list[str]]:
    """The runs of a comparison, from one for each method, and what a user should know of them.

    `controls`: are there any, or the names of those that there are.

    `tuned`: a file of `palsgd tune`, or a recipe that comes with one; "none" leaves the recipe's
    settings. By default the recipe's own file, for a user who changes nothing that is computed: one
    who does asks what that comes to with equal settings for all. `given`: the names of settings
    that the user asked for, which stay.
    """
    remarks: list[str] = []
    if tuned is None and recipe in shipped():
        changed = _changed(runs, recipe, given)
        tuned = NO_TUNING if changed else recipe
        remarks += [
            f"{', '.join(changed)} as given, so all methods have the settings of the recipe, "
            f"untuned; add --tuned {recipe} for those that were tuned"
        ] if changed else []  # fmt: skip
    if tuned is not None and tuned != NO_TUNING:
        runs, remarks = with_tuned(runs, tuned, given=given, all_of_them=tuned != recipe)
    if chosen := chosen_controls(controls):
        runs, left_out = with_controls(runs, seeds=seeds, wanted=chosen)
        remarks += [f"the control {name} is left out: {why}" for name, why in left_out.items()]
    return with_seeds(runs, seeds), remarks


def _changed(runs: Mapping[str, Settings], recipe: str, given: Collection[str]) -> list[str]:
    """What the user gives that is computed and is not what the recipe has."""
    before = workloads.recipe(recipe).as_dict()
    now = next(iter(runs.values())).as_dict()
    names = sorted(set(given) - NOT_COMPUTED - {"seed", "cluster", "evaluate_every"})
    return [name for name in names if now.get(setting_name(name)) != before.get(name)]


def with_tuned(
    runs: Mapping[str, Settings],
    source: Path | str,
    *,
    given: Collection[str] = (),
    all_of_them: bool = True,
) -> tuple[dict[str, Settings], list[str]]:
    """Each method with the settings that were tuned for it, and why some do not count as tuned: a
    setting that the user gives in their place, or other conditions than those of the tuning. A
    method that the file does not have is an error, or keeps its settings without `all_of_them`."""
    found, remarks = dict(runs), []
    chosen = read_tuned(source)["methods"]
    for run, settings in runs.items():
        if settings.method not in chosen and not all_of_them:
            remarks.append(f"{run} is untuned: {tuned_path(source).name} has no settings for it")
            continue
        made = tuned_settings(source, settings.method, settings, given=given)
        kept = sorted(with_alternatives(given) & chosen[settings.method]["settings"].keys())
        odd = f"{', '.join(kept)} as given" if kept else tuned_elsewhere(source, settings)
        if odd is not None:
            remarks.append(f"{run} counts as untuned: {odd}")
        found[run] = made.changed({"tuned": None if odd else _name_of(source)})
    return found, remarks


def _name_of(source: Path | str) -> str:
    """The name of the file, and what tells apart files of one name."""
    path = tuned_path(source)
    return f"{path.name} {hashlib.sha256(path.read_bytes()).hexdigest()[:12]}"


def with_seeds(runs: Mapping[str, Settings], seeds: int) -> dict[str, Settings]:
    """Each run with so many seeds, counted from its own. The first seed of all comes before the
    second of any: what ends early has left seeds that can be compared."""
    check_int("seeds", seeds, least=1)
    if seeds == 1:
        return dict(runs)
    return {
        f"{name},seed={settings.seed + more}": settings.changed({"seed": settings.seed + more})
        for more in range(seeds)
        for name, settings in runs.items()
    }


def with_controls(
    runs: Mapping[str, Settings], *, seeds: int, wanted: Sequence[Recipe] = CONTROLS
) -> tuple[dict[str, Settings], dict[str, str]]:
    """The runs and their controls, before they get their seeds; and why some controls are left
    out. The noise floor is the baseline beside itself: several seeds have it already, to a single
    one another is added."""
    found, left_out = controls_for(runs, wanted)
    noise = {
        f"{name}-{OTHER_SEED}": settings.changed({"seed": settings.seed + 1})
        for name, settings in runs.items()
        if seeds == 1 and is_baseline(settings.method)
    }
    return {**runs, **found, **noise}, left_out

"""Controls: runs that differ from a mixing method in one thing, so that its effect can be told.

A mixing method changes three things against the plain local method at once: it skips a share p of
the gradients, it raises the learning rate of the others to lr / (1 - p), and it pulls towards the
anchor. CONTROLS is the table of the runs that take them apart. Files name no controls: a run is
recognised as one by its settings, wherever it comes from.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass

from palsgd import registry
from palsgd.checks import check_choice, in_error
from palsgd.lab import workloads
from palsgd.lab.groups import Group
from palsgd.lab.methods import baseline, method_of, plain_local
from palsgd.lab.programs import Program, program, settings_in
from palsgd.lab.settings import FIELDS, IN_EPOCHS, Settings


@dataclass(frozen=True)
class Recipe:
    """How a control is made from the settings of a mixing method. `make` raises a ValueError with
    the reason where there is none."""

    suffix: str
    isolates: str
    make: Callable[[Settings], Settings]

    def name(self, method: str) -> str:
        return f"{method}-{self.suffix}"


def mixed_share(settings: Settings) -> float:
    """p, the share of the steps that take no gradient; 0 for methods that do not mix."""
    row = registry.row(settings.method)
    return 1.0 - method_of(settings).gradient_share if row.mixes else 0.0


def _no_pull(settings: Settings) -> Settings:
    if "mix_rate" not in registry.row(settings.method).settings():
        raise ValueError(f"{settings.method} has no mix_rate that could be 0")
    return settings.changed({"mix_rate": 0.0})


def _same_settings(settings: Settings) -> Settings:
    return settings.changed({"method": plain_local().name})


def _raised_rate(settings: Settings) -> Settings:
    return _same_settings(settings).changed({"lr": settings.lr / (1 - mixed_share(settings))})


def _equal_gradients(settings: Settings) -> Settings:
    """H' = (1 - p) H, and a local phase that is shorter by the same factor, so that there are as
    many syncs too. The warm-up has no mixing steps and stays."""
    every, whole = _fixed_interval(settings), _in_steps(settings)
    assert whole.steps is not None
    shorter = max(1, round((1 - mixed_share(settings)) * every))
    warmup = min(whole.warmup_steps, whole.steps)
    length = round(warmup + (whole.steps - warmup) * shorter / every)
    changes = {"sync_every": shorter, **_shortened(whole, length)}
    return _same_settings(whole).changed(changes)


def _accumulated(settings: Settings) -> Settings:
    """The baseline with the mean gradient of H batches at once: as few bytes as a local method
    sends, and as many examples, with the same learning rate."""
    every, whole = _fixed_interval(settings), _in_steps(settings)
    assert whole.steps is not None
    if every == 1:
        raise ValueError("with sync_every=1 it is the baseline itself")
    batch, examples = settings.batch_size * every, workloads.examples(settings.workload)
    if settings.workers * batch > examples:
        raise ValueError(
            f"{settings.workers} workers with {every} batches of {settings.batch_size} take "
            f"{settings.workers * batch} examples in a step, and an epoch has {examples}"
        )
    changes = {
        "method": baseline().name,
        "batch_size": batch,
        "micro_batches": settings.micro_batches * every,
        "lr_warmup_steps": round(whole.lr_warmup_steps / every),
        **_shortened(whole, max(1, round(whole.steps / every))),
    }
    return whole.changed(changes)


def _fixed_interval(settings: Settings) -> int:
    if not isinstance(settings.sync_every, int):
        raise ValueError(f"sync_every={settings.sync_every} is no fixed H")
    return settings.sync_every


def _in_steps(settings: Settings) -> Settings:
    """Settings whose lengths are given in steps, as config.yaml has them."""
    found = settings.in_steps(workloads.examples(settings.workload))
    return found.changed({in_epochs: FIELDS[in_epochs].default for _, in_epochs in IN_EPOCHS})


def _shortened(whole: Settings, steps: int) -> dict[str, int]:
    """A run of so many steps, with as many evaluations, and a schedule that is shorter too."""
    assert whole.steps is not None
    found = {"steps": steps}
    for name in ("evaluate_every", "schedule_every"):
        if (value := getattr(whole, name)) is not None:
            found[name] = max(1, round(value * steps / whole.steps))
    return found


CONTROLS = (
    Recipe("no-pull", "the pull", _no_pull),
    Recipe("same-settings", "mixing as a whole, with equal codec, delay and fragments",
           _same_settings),
    Recipe("raised-lr", "the raised learning rate", _raised_rate),
    Recipe("equal-gradients", "computing: equal gradients and equal syncs", _equal_gradients),
    Recipe("accumulated", "bytes: as few of them without local models", _accumulated),
)  # fmt: skip
NO_PULL, SAME_SETTINGS, RAISED_RATE, *_ = CONTROLS
OTHER_SEED = "other-seed"  # the baseline once more: two runs of it differ by nothing but noise


def chosen_controls(wanted: bool | Sequence[str]) -> tuple[Recipe, ...]:
    """All of them, none, or those whose suffixes are named."""
    if isinstance(wanted, bool):
        return CONTROLS if wanted else ()
    if not isinstance(wanted, list | tuple):
        raise ValueError(
            f"controls={in_error(wanted)} must be True, False or a list, such as ['no-pull']"
        )
    known = {recipe.suffix: recipe for recipe in CONTROLS}
    for name in wanted:
        check_choice("a control", name, tuple(known))
    return tuple(known[name] for name in wanted)


def controls_for(
    runs: Mapping[str, Settings], wanted: Sequence[Recipe] = CONTROLS
) -> tuple[dict[str, Settings], dict[str, str]]:
    """The controls of the mixing methods among the runs, by names that explain themselves, and
    the reasons for those that are left out."""
    found: dict[str, Settings] = {}
    left_out: dict[str, str] = {}
    for settings in [each for each in runs.values() if mixed_share(each) > 0]:
        for recipe in wanted:
            try:
                made = recipe.make(settings)
            except ValueError as reason:
                left_out[f"{recipe.suffix} of {settings.method}"] = str(reason)
            else:
                found.setdefault(recipe.name(made.method), made)
    return found, left_out


def find_controls(groups: list[Group]) -> dict[Group, dict[Recipe, Group]]:
    """For each group of a mixing method the groups that are its controls, whatever they are there
    for: the plain method with the same settings is an opponent and a control. One that does not
    pull is its own control, and has none here."""
    return {own: there for own, there in _there(groups).items() if own not in there.values()}


def controls_beside(groups: list[Group]) -> dict[Group, dict[Recipe, Group]]:
    """The same, with those that do not pull: all of their controls but themselves."""
    return {
        own: {recipe: each for recipe, each in there.items() if each is not own}
        for own, there in _there(groups).items()
    }


def _there(groups: list[Group]) -> dict[Group, dict[Recipe, Group]]:
    settings = {group: _settings(group) for group in groups}
    by_program = {
        program(own): group for group, own in reversed(settings.items()) if own is not None
    }
    found: dict[Group, dict[Recipe, Group]] = {}
    for group, own in settings.items():
        made = {} if own is None or mixed_share(own) == 0 else _programs(own)
        there = {recipe: by_program[each] for recipe, each in made.items() if each in by_program}
        if there:
            found[group] = there
    return found


def _programs(settings: Settings) -> dict[Recipe, Program]:
    found = {}
    for recipe in CONTROLS:
        with suppress(ValueError):  # there is no such control
            found[recipe] = program(recipe.make(settings))
    return found


def _settings(group: Group) -> Settings | None:
    """Those of all its seeds."""
    found = settings_in(group.runs[0].config)
    return None if found is None else found.changed({"seed": 0})

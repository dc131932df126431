"""Which settings are the same program, so that nobody trains it twice or compares it with itself.

`program` is the one place that knows it. It is stated by what rows and settings say, never by the
names of methods; what they do not say (a weight of 0 in a method's own rule) shows in equal lines
after the runs.
"""

from collections.abc import Mapping
from typing import Any

from palsgd import registry
from palsgd.lab.factory import outer_momentum
from palsgd.lab.methods import baseline, method_of, takes_outer, without_effect
from palsgd.lab.settings import FIELDS, IN_EPOCHS, Settings, method_setting
from palsgd.method import Method
from palsgd.outer import plain_average
from palsgd.registry import Row

# What says how a run is kept and judged, not what it computes.
NOT_COMPUTED = frozenset({"checkpoint_every", "target", "target_on", "margin", "tuned"})

Program = tuple[tuple[str, str], ...]


def program(settings: Settings) -> Program:
    """Equal for settings whose runs cannot differ, but by rounding. The seed counts."""
    found = _common(settings)
    if not _averages_every_step(settings):
        found |= _rounds(settings)
    return tuple(sorted((name, repr(value)) for name, value in found.items()))


def first_of_each(runs: Mapping[str, Settings]) -> dict[str, str]:
    """For the name of each run that of the first one with the same program, which may be itself."""
    first: dict[Program, str] = {}
    return {name: first.setdefault(program(settings), name) for name, settings in runs.items()}


def settings_in(config: Mapping[str, Any]) -> Settings | None:
    """The settings that a config.yaml holds; None if another version wrote what this one refuses,
    for instance a method that is not here. The file may be somebody else's, so that no method is
    imported because it names one."""
    method = config.get("method")
    if not isinstance(method, str) or registry.known(method) is None:
        return None
    try:
        own = {method_setting(name) for row in registry.rows() for name in row.settings()}
        return Settings.from_dict({k: v for k, v in config.items() if k in FIELDS or k in own})
    except (TypeError, ValueError):
        return None


def _common(settings: Settings) -> dict[str, Any]:
    """What the baseline has: settings that have an effect whatever the method."""
    ignored = without_effect(baseline().name) | NOT_COMPUTED | {"method"}
    found = {name: value for name, value in settings.as_dict().items() if name not in ignored}
    for name, in_epochs in IN_EPOCHS:
        if found[name]:  # config.yaml has both, and these are the steps of those epochs
            del found[in_epochs]
    if settings.inner == "nesterov" and settings.momentum == 0:
        found["inner"] = "sgd"
    if settings.inner not in ("sgd", "nesterov"):
        del found["momentum"]
        if settings.weight_decay == 0:  # then it does not matter how it is applied
            found["inner"] = "adam"
    return found


def _averages_every_step(settings: Settings) -> bool:
    """Is it the baseline? Also a warm-up as long as the run is, and a worker that averages its
    model with nobody."""
    row = registry.row(settings.method)
    if not row.rounds:
        return True
    if settings.steps is not None and settings.warmup_steps >= settings.steps:
        return True
    whole = settings.compress is None and settings.delay == 0 and settings.fragments == 1
    averaged = _is_plain(settings, row) and _outer(settings, row) == _MEAN
    return settings.workers == 1 and whole and averaged


def _rounds(settings: Settings) -> dict[str, Any]:
    row = registry.row(settings.method)
    names = ("sync_every", "warmup_steps", "compress", "delay", "fragments")
    found = {name: getattr(settings, name) for name in names}
    found["outer step"] = _outer(settings, row)
    if settings.draws == "paced":
        found |= {"draws": settings.draws, "speeds": settings.worker_speeds}
    if _is_plain(settings, row):
        return found
    own = method_of(settings).settings()
    if row.mixes:
        found |= {"draws": settings.draws, "discard_batches": settings.discard_batches}
        if 0 in (own.get("mix_rate"), own.get("pull")):  # two ways to say that nothing is pulled
            own |= {"mix_rate": None, "pull": 0.0}
    return found | {"rule": row.name, **{f"rule's {name}": value for name, value in own.items()}}


def _is_plain(settings: Settings, row: Row) -> bool:
    """Are there gradient steps and outer steps, and nothing else?"""
    if row.mixes:
        return method_of(settings).gradient_share == 1.0
    return row.method is Method


_MEAN = ("sgd", 1.0, 0.0, 0.0, "constant")  # the outer step that averages the models


def _outer(settings: Settings, row: Row) -> tuple[Any, ...]:
    """The outer step. Without momentum all kinds of SGD are one."""
    if not takes_outer(row):
        return _MEAN if row.outer is plain_average else (row.name,)
    momentum = outer_momentum(settings)
    kind = settings.outer if momentum or settings.outer in ("adam", "adamw") else "sgd"
    rest = (settings.outer_weight_decay, settings.outer_schedule)
    return (kind, settings.outer_lr, momentum, *rest)

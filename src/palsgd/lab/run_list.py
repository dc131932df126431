"""Which runs a comparison has: every method with the same seeds, and the controls.

A run's name is that of its setting, and `,seed=S` where there are several seeds.
"""

from collections.abc import Mapping

from palsgd.lab.controls import OTHER_SEED, controls_for
from palsgd.lab.methods import is_baseline
from palsgd.lab.settings import Settings


def with_seeds(runs: Mapping[str, Settings], seeds: int) -> dict[str, Settings]:
    """Each run with so many seeds, counted from its own."""
    if seeds < 1:
        raise ValueError(f"--seeds {seeds} are none; ask for at least 1")
    if seeds == 1:
        return dict(runs)
    return {
        f"{name},seed={settings.seed + more}": settings.changed({"seed": settings.seed + more})
        for name, settings in runs.items()
        for more in range(seeds)
    }


def with_controls(
    runs: Mapping[str, Settings], *, seeds: int
) -> tuple[dict[str, Settings], dict[str, str]]:
    """The runs and their controls, before they get their seeds; and why some controls are left
    out. The noise floor is the baseline beside itself: several seeds have it already, to a single
    one another is added."""
    found, left_out = controls_for(runs)
    noise = {
        f"{name}-{OTHER_SEED}": settings.changed({"seed": settings.seed + 1})
        for name, settings in runs.items()
        if seeds == 1 and is_baseline(settings.method)
    }
    return {**runs, **found, **noise}, left_out

"""Which simulated runs have their warm-up in common, so that it is computed once."""

from collections import Counter
from collections.abc import Iterable
from dataclasses import fields
from typing import Any

from palsgd.lab.settings import Settings
from palsgd.simulator.warm_start import SharedWarmUp

# What a warm-up does not depend on: it acts after it, or on nothing that is computed.
LATER = (
    "method",
    "method_settings",
    "sync_every",
    "mix_prob",
    "mix_rate",
    "pull",
    "draws",
    "discard_batches",
    "speeds",
    "compress",
    "delay",
    "fragments",
    "outer",
    "outer_lr",
    "outer_momentum",
    "outer_weight_decay",
    "outer_schedule",
    "target",
    "target_on",
    "margin",
    "tuned",
    "checkpoint_every",
    "cluster",
)


class LabWarmUp(SharedWarmUp):
    """A warm-up with the run that computed it, and the best model that this run saw in it."""

    def __init__(self, steps: int):
        super().__init__(steps)
        self.computed_by = ""
        self.best: dict[str, Any] = {}


class SharedWarmUps:
    """Those of runs that are simulated one after another. A warm-up is kept until the last run that
    needs it has begun."""

    def __init__(self, waiting: Iterable[Settings]):
        self._left = Counter(warmup_of(settings) for settings in waiting)
        self._shared: dict[tuple[Any, ...], LabWarmUp] = {}

    def of(self, settings: Settings) -> LabWarmUp | None:
        """For the next run: what it starts from, or leaves to those that come after it. None: it
        has its warm-up for itself."""
        key = warmup_of(settings)
        self._left[key] -= 1
        if not settings.warmup_steps:
            return None
        if self._left[key] <= 0:
            return self._shared.pop(key, None)
        return self._shared.setdefault(key, LabWarmUp(settings.warmup_steps))


def warmup_of(settings: Settings) -> tuple[Any, ...]:
    """Equal for settings that are the same until the warm-up has ended. Where a length in epochs is
    rounded to rounds, H changes it, and with it the schedule of the learning rate."""
    rounded = settings.whole_rounds and settings.steps is None
    later = set(LATER) - ({"sync_every"} if rounded else set())
    own = [each.name for each in fields(settings) if each.name not in later]
    return tuple((name, str(getattr(settings, name))) for name in own)

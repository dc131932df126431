"""Where the time of a method goes."""

from palsgd.lab.groups import Group
from palsgd.lab.timing.pace import Pace

STEPS = 1000  # that shares are told for


def shares(group: Group, pace: Pace) -> dict[str, float]:
    """The seconds of 1000 steps of a group, by `PARTS`, over the whole length of its runs: a
    warm-up counts by its share of the steps."""
    steps = max((run.lines[-1]["step"] for run in group.runs if run.lines), default=0)
    if not steps:
        raise ValueError(f"{group.label} has no step yet; train it first")
    found = pace.parts(0, steps)
    return {part: seconds * STEPS / steps for part, seconds in found.items()}

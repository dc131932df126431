"""Runs in real processes beside the simulated runs of the same settings and seed.

A twin is evidence for what the simulator computed and for what the timed steps add up to. It is no
further seed, and no mean has it.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass

from palsgd.lab.groups import Group
from palsgd.lab.run_folder import Run
from palsgd.lab.timing import record


@dataclass(frozen=True, eq=False, kw_only=True)
class Twin:
    """A run in real processes that has ended, and its simulated twin, which has too."""

    group: Group  # of the simulated one
    simulated: Run
    real: Run

    def ends(self, figure: str) -> tuple[float | None, float | None]:
        """A figure of summary.json: the real run's and the simulated one's."""
        real, simulated = ((run.summary or {}).get(figure) for run in (self.real, self.simulated))
        return real, simulated

    @property
    def apart(self) -> float:
        """The largest difference of the two losses at any evaluation that both have, relative to
        the simulated one's; nan if they have none in common."""
        own, other = (
            {line["step"]: line["loss"] for line in run.evaluations if line.get("loss") is not None}
            for run in (self.real, self.simulated)
        )
        shared = own.keys() & other.keys()
        differences = [abs(own[step] - other[step]) / (abs(other[step]) or 1.0) for step in shared]
        return max(differences, default=math.nan)

    @property
    def network(self) -> str:
        """What the processes communicated over, in words."""
        link = self.real.config.get("link")
        return "this machine's own network, no link" if link is None else f"a link of {link}"

    @property
    def timed_s(self) -> float | None:
        """The seconds by the steps that the same processes timed before; None: they timed none."""
        place, (steps, _) = self.real.folder.path.resolve(), self.ends("steps")
        session = record.session_of(place)
        if session is None or session.link != self.real.config.get("link") or steps is None:
            return None
        pace = session.pace(place.name)
        return None if pace is None else pace.seconds(steps)


def twins(groups: Iterable[Group]) -> list[Twin]:
    """Those of which both runs have ended."""
    return [
        Twin(group=group, simulated=run, real=real)
        for group in groups
        for real in group.repeats
        for run in (*group.runs, *group.repeats)
        if run.folder.path.resolve() == real.twin_place and run.finished and real.finished
    ]

"""The pace of every group of a comparison."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import mode
from typing import Any

import numpy as np

from palsgd.lab.groups import Group
from palsgd.lab.run_folder import Run
from palsgd.lab.timing import record
from palsgd.lab.timing.pace import Pace
from palsgd.lab.timing.projection import projected_pace, says_step


def paces(groups: Iterable[Group], link: str | None = None) -> dict[Group, Pace | None]:
    """How many seconds the steps of each group take; None where nobody knows.

    With a `link` (`100mbit,20ms` or `100mbit,20ms,step=50ms`; any field of `palsgd.Cluster` by its
    name) all groups are projected on it. A gradient step lasts what the text says, else what the
    runs of the comparison measured; where neither is known, ValueError says what to add. A group
    that was measured over an emulated link of the same text keeps what was measured. The step that
    a text says is one of the batch that most groups have; a larger batch takes longer in
    proportion.

    Without a link, real processes have what they measured: the blocks in timing.json, else the
    clocks of the runs themselves, each run a repetition. A simulated group whose steps nobody timed
    is projected on the cluster that its settings name, and has no pace if they name none. Measured
    and projected seconds are not compared: where both occur, the projected groups have no pace.

    Seconds from a pace are those of training alone, without evaluations.
    """
    groups = list(groups)
    if link is not None:
        steps, usual = _Steps.of(groups), mode(_batch(group) for group in groups)
        return {group: _on_link(group, link, steps, _batch(group) / usual) for group in groups}
    found = {group: _as_it_was(group) for group in groups}
    if any(pace is not None and pace.kind == "measured" for pace in found.values()):
        for group, pace in found.items():
            found[group] = None if pace is not None and pace.kind == "projected" else pace
    return found


def _batch(group: Group) -> int:
    return int(group.runs[0].config.get("batch_size") or 1)


def _on_link(group: Group, link: str, steps: "_Steps", batch: float) -> Pace | None:
    """`batch` is the group's, in shares of the usual one."""
    run = group.runs[0]
    place = timed_at(run)
    session = record.session_of(place)
    if session is not None and session.link == link:
        return session.pace(place.name)
    measured = steps.of_group(group)
    return projected_pace(run.config, link, step_s=measured.step_s, batch=batch, **measured.fields)


def _as_it_was(group: Group) -> Pace | None:
    run = group.runs[0]
    place = timed_at(run)
    session = record.session_of(place)
    # what was timed is a step of the workers that there were then
    changed = any(each.config.get("changes") for each in group.runs)
    if session is not None and not changed:
        return session.pace(place.name)
    if run.config.get("simulated"):
        cluster = run.config.get("cluster")
        return None if cluster is None else projected_pace(run.config, cluster)
    return _own_clocks(group)


def timed_at(run: Run) -> Path:
    """The folder of the run itself, or of the one that is the same program and was run instead."""
    own = run.folder.path.resolve()
    return own.with_name(str(run.config.get("same_as") or own.name))


# -- the seconds of a gradient step --------------------------------------------------------------


@dataclass(frozen=True)
class _Step:
    step_s: Sequence[float] | None = None
    fields: Mapping[str, Any] = field(default_factory=dict)  # of the cluster, unless the link says


class _Steps:
    """The seconds of a gradient step, for every kind of step that some run here measured."""

    def __init__(self, found: dict[tuple[Any, ...], _Step]):
        self._found = found

    @classmethod
    def of(cls, groups: Iterable[Group]) -> "_Steps":
        found: dict[tuple[Any, ...], _Step] = {}
        for run in (run for group in groups for run in group.runs):
            place = timed_at(run)
            session = record.session_of(place)
            if session is not None and (timed := session.program(place.name)):
                ring = {"all_reduce": "gloo"} if session.backend == "gloo" else {}
                known = found.get(_kind(run), _Step(timed.step_s, ring | {"mix": 0.0}))
                # methods without mixing steps have measured none
                mix = max(known.fields["mix"], timed.mixing_s)
                found[_kind(run)] = replace(known, fields={**known.fields, "mix": mix})
        return cls(found)

    def of_group(self, group: Group) -> _Step:
        """Of its own runs, or of runs whose steps are alike but for the size of the batch."""
        run, (workload, size, *others) = group.runs[0], _kind(group.runs[0])
        step = self._found.get((workload, size, *others), _Step())
        for (named, other, *rest), known in self._found.items():
            if step.step_s is None and (named, rest) == (workload, others) and known.step_s:
                longer = [size / other * each for each in known.step_s]
                step = replace(known, step_s=longer)
        return replace(step, step_s=step.step_s or _of_cluster(run))


def _kind(run: Run) -> tuple[Any, ...]:
    """Runs with equal kinds compute the same gradients."""
    keys = ("workload", "batch_size", "micro_batches", "ranks_per_worker", "precision")
    return tuple(run.config.get(key) for key in keys)


def _of_cluster(run: Run) -> list[float] | None:
    """The step that the run's own cluster names."""
    cluster = run.config.get("cluster")
    if cluster is None or not says_step(cluster):
        return None
    from palsgd.cluster import Cluster

    return [Cluster.parse(cluster, workers=run.config["workers"]).step]


# -- runs that were not timed --------------------------------------------------------------------


def _own_clocks(group: Group) -> Pace | None:
    """The pace by the clocks of the runs themselves: as good as a run alone on a quiet machine.
    What the seconds were spent on is not known, so all of them count as computing."""
    rounds = "sync_every" in group.settings
    warmup = float(group.settings.get("warmup_steps") or 0) if rounds else np.inf
    clocks = [_clock(run) for run in group.runs]
    steps = np.array([_step_seconds(*clock, warmup) for clock in clocks if len(clock[0]) > 1])
    if not len(steps):
        return None
    computing = np.array([1.0, 0.0, 0.0, 0.0])
    return Pace(
        kind="measured",
        source=f"by the clocks of {len(steps)} runs, one after another",
        warmup=warmup,
        averaging=steps[:, :1] * computing,
        local=steps[:, 1:] * computing,
    )


def _clock(run: Run) -> tuple[list[int], list[float]]:
    """Steps and seconds, from the first step on, which a run need not have recorded."""
    known = [line for line in run.lines if line.get("time_s") is not None and line["step"]]
    return [0, *(line["step"] for line in known)], [0.0, *(line["time_s"] for line in known)]


def _step_seconds(steps: list[int], times: list[float], warmup: float) -> tuple[float, float]:
    """Of a step of the warm-up, and of one after it; 0 for a phase without steps."""
    turn, end = min(warmup, steps[-1]), steps[-1]
    until = float(np.interp(turn, [0, *steps], [0.0, *times]))  # a run starts at zero
    local = (times[-1] - until) / (end - turn) if end > turn else 0.0
    return (until / turn if turn else 0.0), local

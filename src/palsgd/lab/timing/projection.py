"""Paces by the model of a cluster."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from palsgd.checks import check_int, in_error
from palsgd.cluster import Cluster, Projection, TimeSimulation, Work
from palsgd.cluster.gradient_counts import Counts, Expected
from palsgd.lab import workloads
from palsgd.lab.forecast import Forecast, forecast, model_size
from palsgd.lab.programs import settings_in
from palsgd.lab.settings import Settings
from palsgd.lab.timing.pace import PARTS, Pace
from palsgd.payload import MethodSize, ModelSize

# Steps of each phase that are projected: the others take as long
MOST_STEPS = 2000


def cluster_on(
    link: str, *, workers: int, step_s: float | None, batch: float = 1.0, **unless_said: Any
) -> Cluster:
    """The cluster of a text such as `100mbit,20ms` or `100mbit,20ms,step=50ms`. `step_s` and the
    other fields hold unless the text has them. The step that the text has is one of the usual
    batch; `batch` is the present one, in shares of it."""
    said = {part.partition("=")[0].strip() for part in link.split(",") if "=" in part}
    if "step" not in said:
        if step_s is None:
            raise ValueError(
                f"link {link!r} does not say how long a gradient step takes, and no run here "
                f"measured it; add it, for instance {link},step=50ms"
            )
        link = f"{link},step={step_s!r}"
    further = [f",{name}={value}" for name, value in unless_said.items() if name not in said]
    text = link + "".join(further)
    cluster = Cluster.parse(text, workers=workers)
    if "step" not in said or batch == 1:
        return cluster
    others = [part for part in text.split(",") if part.partition("=")[0].strip() != "step"]
    longer = f"step={batch * cluster.step!r}"
    return Cluster.parse(",".join([*others, longer]), workers=workers)


def says_step(link: str) -> bool:
    return any(part.partition("=")[0].strip() == "step" for part in link.split(","))


def projected_pace(
    config: Mapping[str, Any],
    link: str,
    *,
    step_s: Sequence[float] | None = None,
    batch: float = 1.0,
    **unless_said: Any,
) -> Pace:
    """The pace of a run with this config.yaml on a link. `step_s` are measurements of a gradient
    step, for a link that does not say what it takes; each becomes a repetition. `batch`: as for
    `cluster_on`."""
    settings = settings_in(config)
    if settings is None:
        raise ValueError(
            f"the settings of {in_error(config.get('method'))} on "
            f"{in_error(config.get('workload'))} are not of this "
            "palsgd, so its runs cannot be projected; leave them out"
        )
    ahead = _forecast(settings, config.get("parameters"))
    steps: Sequence[float | None] = [None] if says_step(link) or not step_s else step_s
    rows = []
    for each in steps:
        cluster = cluster_on(
            link, workers=settings.workers, step_s=each, batch=batch, **unless_said
        )
        rows.append(_steps(ahead, cluster))
    phases = {
        name: np.array([row[name] for row in rows])
        for name in ("averaging", "local")
        if rows[0][name] is not None
    }
    source = f"on {link}"
    if steps[0] is not None:
        source += f", with a gradient step of {1e3 * float(np.median(step_s or 0)):.3g} ms"
    return Pace(kind="projected", source=source, warmup=ahead.schedule.warmup, link=link, **phases)


def _forecast(settings: Settings, parameters: Any) -> Forecast:
    """The model of a workload that is here knows its buffers too. Of any other the file says how
    many parameters it has, and its steps are resolved."""
    here = workloads.known(settings.workload)
    model = model_size(settings.workload, settings.buffers) if here else None
    if model is None and parameters is not None:
        model = ModelSize(parameters=check_int("parameters", parameters, least=1))
    if model is None:
        raise ValueError(
            f"the size of {settings.workload}'s model is not known; its config.yaml has no "
            "`parameters`"
        )
    return forecast(settings, model=model, examples=workloads.examples(settings.workload))


def work_of(ahead: Forecast) -> Work:
    """The work of a run, as far as time is concerned."""
    settings, model = ahead.settings, ahead.model
    assert model is not None
    common: dict[str, Any] = {"parameters": model.parameters, "buffers": model.buffers}
    if not ahead.row.rounds:
        return Work.ddp(**common)
    return Work(
        **common,
        sync_every=ahead.sync_every,
        mix_prob=ahead.mix_prob,
        draws=settings.draws,
        warmup_steps=ahead.schedule.warmup,
        compress=settings.compress,
        delay=settings.delay,
        fragments=settings.fragments,
        carries=MethodSize.of(ahead.method),
    )


def _steps(ahead: Forecast, cluster: Cluster) -> dict[str, list[float] | None]:
    """The seconds of a step of each phase, by PARTS; None for a phase that the run has not."""
    work = work_of(ahead)
    found: dict[str, list[float] | None] = {"averaging": None, "local": None}
    if ahead.warmup:
        averaged = Work.ddp(work.parameters, buffers=work.buffers)
        found["averaging"] = _step(cluster, averaged, min(ahead.warmup, MOST_STEPS))
    if ahead.local:
        differ = ahead.settings.rounds_differ
        found["local"] = (_mean_local_step if differ else _local_step)(ahead, cluster, work)
    return found


def _mean_local_step(ahead: Forecast, cluster: Cluster, work: Work) -> list[float]:
    """Where rounds differ in length, the mean over the whole run."""
    machine = TimeSimulation(cluster, work, end=ahead.steps)
    machine.run_until(ahead.steps, ahead.schedule)
    whole = np.array(_spent(machine.projection, cluster, ahead.steps))
    warm = np.zeros(len(PARTS))
    if ahead.warmup:
        averaged = Work.ddp(work.parameters, buffers=work.buffers)
        warm = ahead.warmup * np.array(_step(cluster, averaged, ahead.warmup))
    return list(np.maximum(0.0, whole - warm) / ahead.local)


def _local_step(ahead: Forecast, cluster: Cluster, work: Work) -> list[float]:
    """Over whole rounds, so that each step has its share of a sync; a run that is shorter than a
    round syncs at its end."""
    steps = ahead.local
    if steps > MOST_STEPS:
        steps = work.sync_every * max(1, MOST_STEPS // work.sync_every)
    counts: Counts | None = Expected(workers=cluster.workers, mix_prob=work.mix_prob)
    uneven = work.draws == "independent" or cluster.spread != "constant"
    if (work.mix_prob and uneven) or work.draws == "paced":
        counts = None  # drawn, as workers then wait for the one with most gradients
    return _step(cluster, replace(work, warmup_steps=0), steps, counts)


def _step(cluster: Cluster, work: Work, steps: int, counts: Counts | None = None) -> list[float]:
    found = cluster.project(work, steps=steps, counts=counts)
    return [seconds / steps for seconds in _spent(found, cluster, steps)]


def _spent(found: Projection, cluster: Cluster, steps: int) -> list[float]:
    """The seconds by PARTS. They are means over workers, and the last worker ends the run: the
    others wait for it."""
    mixing = cluster.mix * (steps - found.gradient_steps)
    spent = [found.compute_s - mixing, mixing, found.wait_s, found.exchange_s]
    spent[2] += max(0.0, found.time_s - math.fsum(spent))
    return spent

"""`palsgd plan`: makes sentences, tables, a record and figures from what is given or measured."""

import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import RenderableType
from rich.text import Text

from palsgd import units
from palsgd.checks import check_int, check_mix_prob, check_number
from palsgd.cluster import Cluster
from palsgd.lab import workloads
from palsgd.lab.atomic import atomic_write
from palsgd.lab.plan.candidates import Planner, Task
from palsgd.lab.plan.choosing import BreakEven, Plan, break_even, make_plan, with_workers
from palsgd.lab.plan.memory import memory
from palsgd.lab.plan.text import (
    choice_table,
    conclusion,
    headline,
    interval_table,
    memory_table,
    record,
    remarks,
    worker_table,
)
from palsgd.lab.settings import Settings

if TYPE_CHECKING:
    from palsgd.lab.plan.measure import Measured


# Steps of each worker are drawn for each candidate, which takes a minute with so many.
MOST_WORKERS = 100_000
TOO_LARGE = 1e15  # parameters; bytes and coordinates must be numbers that NumPy can hold


def prepare(
    settings: Settings | None,
    *,
    step_ms: float | None,
    parameters: str | None,
    steps: int | None,
    extra_steps: float | None,
    mix_prob: float | None,
    data: str | None,
    device: str,
    coding_ns: float | None = None,
    **links: Any,
) -> tuple[Cluster, Task, "Measured | None"]:
    """The cluster and the task. Values that are not given are the recipe's, or are measured
    here."""
    if settings is None and (step_ms is None or parameters is None):
        raise ValueError(
            "give a recipe to measure, for instance stories, or --step-ms and --parameters"
        )
    check_int("workers", links["workers"], least=1, most=MOST_WORKERS)
    found, size = None, 0 if parameters is None else _given_size(parameters)
    if step_ms is None:
        from palsgd.lab.plan.measure import measure

        assert settings is not None
        found = measure(settings, data=data, device=device)
        step, size = found.step_s, size or found.parameters
    else:
        step = check_number("step_ms", step_ms, "more than 0 ms", low=0.0) / 1e3
        size = size or _size(settings)
    if mix_prob is None:
        mix_prob = 0.1 if settings is None else settings.mix_prob
    check_mix_prob(mix_prob)
    if extra_steps is not None:
        extra_steps = check_number("extra_steps", extra_steps, "more than -1", low=-1.0)
    task = Task(
        parameters=size,
        steps=_steps(settings, steps),
        warmup_steps=0 if settings is None else settings.warmup_steps,
        mix_prob=mix_prob,
        inner="adamw" if settings is None else settings.inner,
        extra_steps=extra_steps,
    )
    task = replace(task, coding=_coding(task.coding, found, coding_ns))
    cluster = Cluster(step=step, sync=0.0 if found is None else found.sync_s, **links)
    return cluster, task, found


def _coding(
    usual: dict[str, float], found: "Measured | None", given: float | None
) -> dict[str, float]:
    """Seconds per element: as given, as measured, or of a usual core."""
    if given is not None:
        seconds = check_number("coding_ns", given, "a time of 0 ns or more", low=-1e-12) * 1e-9
        return dict.fromkeys(usual, seconds)
    return usual if found is None else found.coding_s


def _given_size(parameters: str) -> int:
    size = units.count("parameters", parameters)
    check_number("parameters", size, "below 1000T", high=TOO_LARGE, shown=parameters)
    return size


def _size(settings: Settings | None) -> int:
    from palsgd.lab.forecast import parameters_of

    assert settings is not None
    found = parameters_of(settings.workload)
    if found is None:
        raise ValueError(
            f"the model of {settings.workload} depends on its data; add --parameters, e.g. 25M"
        )
    return found


def _steps(settings: Settings | None, steps: int | None) -> int:
    if steps is not None:
        return check_int("steps", steps, least=1)
    if settings is None:
        return 10_000
    return settings.total_steps(workloads.kind(settings.workload).examples)


def plan(
    cluster: Cluster, task: Task, out: Path | None, measured: "Measured | None" = None
) -> list[RenderableType]:
    """What to print, the conclusion first; plan.json and the pictures go into `out`."""
    planner = Planner(cluster, task)
    found = make_plan(planner)
    even = None if found.best.is_ddp else break_even(planner, found.best)
    numbers = sorted({max(2, cluster.workers * factor // 2) for factor in (1, 2, 4, 8, 32)})
    rows = list(with_workers(cluster, planner, found.best, numbers))
    said = conclusion(cluster, task, found)
    parts: list[RenderableType] = [Text(said, style="bold"), headline(cluster, task)]
    if measured is not None:
        parts.append(Text(measured.words))
    parts.append(choice_table(found))
    if found.families:
        parts.append(interval_table(task, found))
    parts += [Text(text) for text in remarks(cluster, task, found, even)]
    parts += [worker_table(rows, task.steps, cluster.step)]
    parts += [memory_table(found, task, cluster.workers)]
    if out is not None:
        parts.append(Text(f"plan: {_write(planner, found, even, said, measured, out)}"))
    return [piece for part in parts for piece in (part, Text())][:-1]


def _write(
    planner: Planner,
    found: Plan,
    even: BreakEven | None,
    said: str,
    measured: "Measured | None",
    out: Path,
) -> Path:
    from palsgd.lab.plan.picture import draw_plan

    cluster, task = planner.cluster, planner.task
    draw_plan(planner, found, even, out)
    every = [*found.opponents, *found.local]
    document = {
        "conclusion": said,
        "cluster": vars(cluster),
        "task": {name: value for name, value in vars(task).items() if name != "prices"},
        "measured": None if measured is None else asdict(measured),
        "candidates": [record(candidate) for candidate in every],
        "chosen": every.index(found.best),
        "opponent": every.index(found.opponent),
        "break_even": None if even is None else asdict(even),
        "memory_bytes": memory(found.best.work, inner=task.inner, workers=cluster.workers),
    }
    atomic_write(out / "plan.json", json.dumps(document, indent=1) + "\n")
    return out / "plan.png"

"""`palsgd plan`: makes tables, a record and figures from what is given or measured."""

import json
from pathlib import Path
from typing import Any

from rich.console import RenderableType
from rich.text import Text

from palsgd import units
from palsgd.checks import check_int, check_mix_prob, check_number
from palsgd.cluster import Cluster
from palsgd.lab import workloads
from palsgd.lab.atomic import atomic_write
from palsgd.lab.plan.candidates import (
    Choice,
    Task,
    baseline_of,
    best_of,
    break_even,
    choices,
    with_workers,
)
from palsgd.lab.plan.memory import memory
from palsgd.lab.plan.text import (
    choice_table,
    headline,
    memory_table,
    record,
    remarks,
    worker_table,
)
from palsgd.lab.settings import Settings


def prepare(
    settings: Settings | None,
    *,
    step_ms: float | None,
    parameters: str | None,
    steps: int | None,
    extra_steps: float,
    mix_prob: float | None,
    data: str | None,
    device: str,
    **links: Any,
) -> tuple[Cluster, Task]:
    """The cluster and the task. Values that are not given are the recipe's, or are measured
    here."""
    if settings is None and (step_ms is None or parameters is None):
        raise ValueError(
            "give a recipe to measure, for instance stories, or --step-ms and --parameters"
        )
    sync, size = 0.0, 0 if parameters is None else units.count("parameters", parameters)
    if step_ms is None:
        from palsgd.lab.plan.measure import measure

        assert settings is not None
        found = measure(settings, data=data, device=device)
        step, sync = found.step_s, found.sync_s
        size = size or found.parameters
    else:
        step = check_number("step_ms", step_ms, "more than 0 ms", low=0.0) / 1e3
        size = size or _size(settings)
    if mix_prob is None:
        mix_prob = 0.1 if settings is None else settings.mix_prob
    check_mix_prob(mix_prob)
    task = Task(
        parameters=size,
        steps=_steps(settings, steps),
        warmup_steps=0 if settings is None else settings.warmup_steps,
        mix_prob=mix_prob,
        inner="adamw" if settings is None else settings.inner,
        extra_steps=check_number("extra_steps", extra_steps, "more than -1", low=-1.0),
    )
    return Cluster(step=step, sync=sync, **links), task


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


def plan(cluster: Cluster, task: Task, out: Path | None) -> list[RenderableType]:
    """What to print; plan.json and the pictures go into `out`."""
    found = choices(cluster, task)
    base, best = baseline_of(found), best_of(found)
    even = None if best is base else break_even(cluster, task, best)
    numbers = sorted({max(2, cluster.workers * factor // 2) for factor in (1, 2, 4, 8, 32)})
    rows = list(with_workers(cluster, task, best, numbers))
    parts: list[RenderableType] = [headline(cluster, task), choice_table(found, base, best)]
    parts += [Text(text) for text in remarks(best, even)]
    parts += [worker_table(rows, cluster.step), memory_table(best, base, task, cluster.workers)]
    if out is not None:
        parts.append(Text(f"plan: {_write(cluster, task, found, best, even, out)}"))
    return [piece for part in parts for piece in (part, Text())][:-1]


def _write(
    cluster: Cluster, task: Task, found: list[Choice], best: Choice, even: float | None, out: Path
) -> Path:
    from palsgd.lab.plan.picture import draw_plan

    base = baseline_of(found)
    plain = next(c for c in found if not (c.work.is_ddp or c.work.mix_prob))
    shown = [base, plain] + [best] * (best is not base and best is not plain)
    draw_plan(cluster, task, shown, even, out)
    held = memory(best.work, inner=task.inner, workers=cluster.workers)
    document = {
        "cluster": vars(cluster),
        "task": vars(task),
        "choices": [record(choice, base) for choice in found],
        "chosen": found.index(best),
        "break_even_bits_per_s": even,
        "memory_bytes": held,
    }
    atomic_write(out / "plan.json", json.dumps(document, indent=1) + "\n")
    return out / "plan.png"

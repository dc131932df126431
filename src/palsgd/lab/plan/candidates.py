"""Choices of method, H, overlap and compression, and the time and bytes of each on a cluster.

The model of time gives the time of a step, not the number of steps that a choice needs. A longer H,
a delay or a code may need more steps; `extra_steps` has their share. At equal steps mixing saves
gradients, and so time. At equal gradients it saves nothing. The plan shows both.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

from palsgd.cluster import Cluster, Work
from palsgd.cluster.gradient_counts import Expected
from palsgd.lab import methods

INTERVALS = tuple(2**n for n in range(2, 13))  # the H that are tried
SHARE = 0.05  # the share of the time that exchanges may take; below it a longer H saves little
WORTH = 0.05  # a gain below this is not worth the change
TRIED = 64  # the longest H of the paper's main experiments
CODES: tuple[str | None, ...] = (None, "int8", "int4")


@dataclass(frozen=True)
class Task:
    """What is to be trained."""

    parameters: int
    steps: int
    warmup_steps: int = 0
    mix_prob: float = 0.1
    inner: str = "adamw"
    extra_steps: float = 0.0  # the share of steps more than DDP's that the local methods need


@dataclass(frozen=True)
class Choice:
    method: str
    work: Work
    step_s: float  # of a step of the local phase, or of DDP
    exchanging: float  # share of that time
    run_s: float  # of the whole run, warm-up and extra steps included
    bytes_on_the_wire: float  # in the run, of each worker
    gradient_s: float  # seconds for each gradient, extra steps included


def ddp(cluster: Cluster, task: Task) -> Choice:
    work = Work.ddp(task.parameters)
    steps = 1 if cluster.spread == "constant" else 200
    found = cluster.project(work, steps=steps)
    step = found.time_s / steps
    return Choice(
        method=methods.baseline().name,
        work=work,
        step_s=step,
        exchanging=found.exchange_s / found.time_s,
        run_s=step * task.steps,
        bytes_on_the_wire=found.bytes_on_the_wire / steps * task.steps,
        gradient_s=step,
    )


def local(cluster: Cluster, task: Task, work: Work, base: Choice) -> Choice:
    """The choice of a local method, with the times of rounds in the middle of a run."""
    rounds = 6 if cluster.spread == "constant" else 40
    counts = Expected(workers=cluster.workers, mix_prob=work.mix_prob)
    found = cluster.project(work, steps=rounds * work.sync_every, counts=counts)
    first, last = work.fragments, (rounds - 1) * work.fragments - 1
    steps = found.clocks[last] - found.clocks[first]
    step = (found.times[last] - found.times[first]) / steps
    computing = (1 - work.mix_prob) * cluster.step
    longer = 1 + task.extra_steps
    behind = max(0, task.steps - task.warmup_steps) * longer
    warm = min(task.warmup_steps, task.steps)
    return Choice(
        method=(methods.mixing() if work.mix_prob else methods.plain_local()).name,
        work=work,
        step_s=step,
        exchanging=max(0.0, 1 - computing / step),
        run_s=warm * base.step_s + behind * step,
        bytes_on_the_wire=warm * base.bytes_on_the_wire / task.steps
        + behind / work.sync_every * found.bytes_on_the_wire / rounds,
        gradient_s=step * longer / (1 - work.mix_prob),
    )


def choices(cluster: Cluster, task: Task) -> list[Choice]:
    """DDP, and each kind of local method with the shortest H for which exchanges take at most SHARE
    of the time."""
    base = ddp(cluster, task)
    found = [base, _shortest(cluster, task, base, mix_prob=0.0)]
    found += [
        _shortest(cluster, task, base, mix_prob=task.mix_prob, compress=code, overlap=overlap)
        for code in CODES
        for overlap in (False, True)
        if task.mix_prob
    ]
    return sorted(found, key=lambda choice: choice.run_s)


def baseline_of(found: list[Choice]) -> Choice:
    return next(choice for choice in found if choice.work.is_ddp)


def best_of(found: list[Choice]) -> Choice:
    """The simplest sufficient choice. It is DDP if no choice saves enough. Otherwise it is the
    first choice, in the order of what they change (overlap, int8, both, ...), whose H is among
    those that the paper tried, or else the choice with the shortest H."""
    base = baseline_of(found)
    local = [choice for choice in found if choice.work.mix_prob]
    local = local or [choice for choice in found if choice is not base]
    local.sort(key=lambda c: (CODES.index(c.work.compress), c.work.delay > 0))
    if max(gain(choice, base) for choice in local) < WORTH:
        return base
    tried = [choice for choice in local if choice.work.sync_every <= TRIED]
    return tried[0] if tried else min(local, key=lambda choice: choice.work.sync_every)


def gain(choice: Choice, base: Choice) -> float:
    """The share of DDP's time that is saved at equal gradients."""
    return 1 - choice.gradient_s / base.gradient_s


def break_even(cluster: Cluster, task: Task, choice: Choice, worth: float = WORTH) -> float | None:
    """The rate, in bits per second, above which less than `worth` of DDP's time is saved at equal
    gradients. None: enough is saved at any rate, because of latency. 0: enough is saved at no
    rate."""

    def pays(rate: float) -> bool:
        there = cluster.changed(rate=rate)
        base = ddp(there, task)
        return gain(local(there, task, choice.work, base), base) >= worth

    low, high = 3.0, 15.0  # powers of ten
    if pays(10**high):
        return None
    if not pays(10**low):
        return 0.0
    while high - low > 0.002:
        middle = (low + high) / 2
        low, high = (middle, high) if pays(10**middle) else (low, middle)
    return 10**low


def with_workers(
    cluster: Cluster, task: Task, choice: Choice, numbers: list[int]
) -> Iterator[tuple[int, Choice, Choice]]:
    """DDP and `choice` with other numbers of workers."""
    for number in numbers:
        there = cluster.changed(workers=number)
        base = ddp(there, task)
        yield number, base, base if choice.work.is_ddp else local(there, task, choice.work, base)


def _shortest(
    cluster: Cluster,
    task: Task,
    base: Choice,
    *,
    mix_prob: float,
    compress: str | None = None,
    overlap: bool = False,
) -> Choice:
    found = None
    for H in INTERVALS:
        work = Work(parameters=task.parameters, sync_every=H, mix_prob=mix_prob, compress=compress)
        if overlap:
            work = replace(work, delay=_delay(cluster, work))
        found = local(cluster, task, work, base)
        if found.exchanging <= SHARE:
            break
    assert found is not None
    return found


def _delay(cluster: Cluster, work: Work) -> int:
    """The number of steps that take as long as an exchange, at most a round."""
    messages = work.payload(cluster.workers).messages()
    exchange = sum(cluster.network.seconds(message) for message in messages)
    steps = exchange / ((1 - work.mix_prob) * cluster.step)
    return max(1, min(work.sync_every, math.ceil(steps)))

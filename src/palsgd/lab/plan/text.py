"""A plan in words and tables."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from rich.table import Table
from rich.text import Text

from palsgd.cluster import Cluster
from palsgd.lab.plan.candidates import UNUSABLE, Candidate, Task
from palsgd.lab.plan.choosing import (
    INTERVALS,
    LEAST_ROUNDS,
    WORTH,
    BreakEven,
    Family,
    Plan,
    intervals_for,
)
from palsgd.lab.plan.memory import memory
from palsgd.lab.plan.prices import Price
from palsgd.lab.report import formats
from palsgd.registry import row

NOT_MEASURED = "not measured"
PACED_ROUNDS = 20  # that are simulated to tell what pacing saves


def rate_words(bits: float) -> str:
    for unit in ("bit/s", "kbit/s", "Mbit/s", "Gbit/s", "Tbit/s"):
        if bits < 999.5 or unit == "Tbit/s":
            break
        bits /= 1000
    return f"{bits:.3g}{formats.GAP}{unit}"


def time_words(seconds: float) -> str:
    if seconds >= 1 or seconds == 0:
        return formats.seconds(seconds)
    unit, size = ("ms", 1e3) if seconds >= 1e-3 else ("us", 1e6)
    return f"{seconds * size:.3g}{formats.GAP}{unit}"


def setting_words(candidate: Candidate) -> str:
    """Short, for tables and legends."""
    work = candidate.work
    if candidate.is_ddp:
        return candidate.title
    parts = [f"{candidate.title} H={work.sync_every}"]
    if work.delay:
        parts.append(f"delay={work.delay}")
    if work.compress:
        parts.append(work.compress)
    return " ".join(parts)


def price_words(price: Price) -> str:
    if price.extra is None:
        return NOT_MEASURED
    if price.low == price.high:
        return formats.percent(price.extra)
    low, high = formats.percent(price.low), formats.percent(price.high)
    return f"{formats.percent(price.extra)} [{low}, {high}]"


# -- sentences -----------------------------------------------------------------------------------


def headline(cluster: Cluster, task: Task) -> Text:
    nodes = "" if cluster.per_node == 1 else f" in nodes of {cluster.per_node}"
    ranks = cluster.ranks_per_worker
    nodes += "" if ranks == 1 else f" of {ranks} ranks"
    return Text(
        f"{formats.count(task.parameters)} parameters, {cluster.workers} workers{nodes}, a step of "
        f"{time_words(cluster.step)}, {_link(cluster)} one way, {formats.count(task.steps)} steps "
        "of DDP",
        style="bold",
    )


def _link(cluster: Cluster) -> str:
    slow = cluster.slow_rate
    uneven = "" if slow is None else f" (one of {rate_words(slow)})"
    return f"links of {rate_words(cluster.rate)}{uneven} and {time_words(cluster.latency)}"


def conclusion(cluster: Cluster, task: Task, plan: Plan) -> str:
    """The answer in one sentence."""
    best, other = plan.best, plan.opponent
    where = f"Over {rate_words(cluster.rate)} with {time_words(cluster.latency)}"
    if not best.usable:
        return (
            f"{where}: nothing is usable; even {_named(best)} would communicate "
            f"{best.exchanging:.0%} of its time."
        )
    if best.is_ddp:
        return f"{where}: stay with {best.title}, which takes {_run(best)}{_rival(plan)}."
    return (
        f"{where}: {_named(best)} takes {_run(best)} against {_possessive(other.title)} "
        f"{_run(other)}{'' if other.usable else ' (unusable)'}; {_which_prices(task, best)}."
    )


def _named(candidate: Candidate) -> str:
    work = candidate.work
    if candidate.is_ddp:
        return candidate.title
    parts = [f"H = {work.sync_every}"]
    parts += [f"a delay of {work.delay} steps"] if work.delay else []
    parts += [work.compress] if work.compress else []
    listed = " and ".join([", ".join(parts[:-1]), parts[-1]] if len(parts) > 1 else parts)
    return f"{candidate.title} with {listed}"


def _run(candidate: Candidate) -> str:
    return formats.seconds(candidate.run_s)


def _possessive(name: str) -> str:
    return f"{name}'s"


def _rival(plan: Plan) -> str:
    """The fastest usable candidate with rounds, where DDP is recommended."""
    usable = [c for c in plan.local if c.usable]
    if not usable:
        return ", as no method with rounds is usable in so short a run" if not plan.local else ""
    fastest = min(usable, key=lambda c: c.run_s)
    if fastest.price.measured:
        return f"; the fastest with rounds, {_named(fastest)}, takes {_run(fastest)}"
    gradients = "with as many gradients as DDP takes"
    return (
        f"; the fastest with rounds, {_named(fastest)}, takes {_run(fastest)} {gradients}, "
        f"and its price is {NOT_MEASURED}"
    )


def _which_prices(task: Task, best: Candidate) -> str:
    """Which parts of the price are measured: of H, of the code, of the delay."""
    if task.extra_steps is not None:
        return f"its price of {formats.percent(task.extra_steps)} more steps is the one given"
    work, table = best.work, task.prices
    plain: dict[str, Any] = {
        "sync_every": work.sync_every, "steps": task.steps, "mix_prob": work.mix_prob,
    }  # fmt: skip
    found = [("H", table.local(best.method, **plain))]
    if work.compress:
        found.append((work.compress, table.local(best.method, **plain, compress=work.compress)))
    if work.delay:
        found.append(("the delay", best.price))
    words = [f"of {name} {'measured' if p.measured else NOT_MEASURED}" for name, p in found]
    return f"price {', '.join(words)}"


def remarks(cluster: Cluster, task: Task, plan: Plan, even: BreakEven | None) -> Iterator[str]:
    if even is not None:
        yield even_words(even, plan)
    if cluster.straggler > 1 and not plan.best.is_ddp:
        yield _about_stragglers(cluster, plan.best)
    yield (
        f"{_about_rounds(task.steps)} Of the measured and usable choices that take at most "
        f"{WORTH:.0%} longer than the fastest, * is the plainest."
    )
    yield f"unusable: communicates more than {UNUSABLE:.0%} of its time."
    if any(not c.price.measured for c in [*plan.opponents, *plan.local]):
        yield (
            f"?: the price in steps is {NOT_MEASURED}; the time is that of as many gradients as "
            "DDP takes. Give what you measured as --extra-steps, e.g. 0.1."
        )
    if plan.best.price.why_not:
        yield f"The price of * is {NOT_MEASURED}: {plan.best.price.why_not}."
    if plan.local and any(c.price.measured for c in plan.local) and task.extra_steps is None:
        yield _conditions(task)


def _about_rounds(steps: int) -> str:
    if intervals_for(steps):
        return f"H is at most {steps // LEAST_ROUNDS:,}, so that a run has {LEAST_ROUNDS} rounds."
    least = LEAST_ROUNDS * INTERVALS[0]
    return (
        f"{steps:,} steps are too few for methods with rounds: {LEAST_ROUNDS} rounds of "
        f"H = {INTERVALS[0]} are {least}."
    )


def _about_stragglers(cluster: Cluster, best: Candidate) -> str:
    """What paced draws would save, over some rounds."""
    work = replace(best.work, warmup_steps=0)
    waits = [
        cluster.project(replace(work, draws=draws), steps=PACED_ROUNDS * work.sync_every)
        for draws in ("balanced", "paced")
    ]
    even, paced = (formats.percent(run.wait_s / run.time_s) for run in waits)
    return (
        f"Slower workers make the others wait {even} of the time; draws=paced, under which they "
        f"take fewer gradients, leaves {paced}. What that costs in steps is {NOT_MEASURED} here."
    )


def _conditions(task: Task) -> str:
    on = task.prices.conditions
    return (
        f"Prices were measured on {on['workload']} ({formats.count(on['parameters'])} parameters, "
        f"{on['workers']} workers, {formats.count(on['steps'])} steps); other tasks may have "
        "others."
    )


_CAUSES = {
    "latency": "the latency of its all-reduces alone costs DDP more than that",
    "buckets": "DDP's many buckets cost that much even over a fast link; larger ones would not",
    "waiting": "DDP waits for the slowest worker at every step, which no link changes",
    "gradients": "it takes fewer gradients for the same quality, whatever the link",
}


def even_words(even: BreakEven, plan: Plan) -> str:
    worth, other = f"{WORTH:.0%}", plan.opponent.title
    if even.rate is None:
        return f"Break-even: it saves {worth} or more at any rate: {_CAUSES[even.cause]}."
    if even.rate == 0:
        return f"Break-even: never; with these extra steps it saves less than {worth} at any rate."
    return (
        f"Break-even: over links faster than {rate_words(even.rate)} it saves less than {worth} of "
        f"{_possessive(other)} time. Below, the rate of the link is what costs DDP."
    )


# -- tables --------------------------------------------------------------------------------------


def _table(first: str, *names: str) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0))
    table.add_column(first)
    for name in names:
        table.add_column(name, justify="right")
    return table


def choice_table(plan: Plan) -> Table:
    """DDP in its variants, and the fastest usable candidate of each usual method."""
    table = _table(
        "choice, fastest first", "a step", "computing", "waiting", "exchanging", "extra steps",
        "the run", "bytes on the wire",
    )  # fmt: skip
    for each in sorted(shown_choices(plan), key=lambda candidate: candidate.run_s):
        mark = "* " if each is plan.best else "  "
        shares = map(formats.percent, (each.computing, each.waiting, each.exchanging))
        table.add_row(
            mark + setting_words(each), time_words(each.step_s), *shares, price_words(each.price),
            _cell(each), formats.size(each.bytes_on_the_wire),
            style="bold" if each is plan.best else "",
        )  # fmt: skip
    return table


def shown_choices(plan: Plan) -> list[Candidate]:
    found = [*plan.opponents]
    by_method: dict[str, list[Candidate]] = {}
    for candidate in (c for c in plan.local if row(c.method).default):
        by_method.setdefault(candidate.method, []).append(candidate)
    for some in by_method.values():
        usable = [c for c in some if c.usable] or some
        found.append(min(usable, key=lambda c: (not c.price.measured, c.run_s)))
    return found if plan.best in found else [*found, plan.best]


def interval_table(task: Task, plan: Plan) -> Table:
    """Time against H, for each family. Methods that take the same time share a row."""
    intervals = intervals_for(task.steps)
    table = _table("time to DDP's quality", *(f"H={H}" for H in intervals))
    rows: dict[tuple[str, ...], list[str]] = {}
    for family, found in plan.families.items():
        by_interval = {candidate.work.sync_every: candidate for candidate in found}
        cells = [_cell(by_interval.get(H)) for H in intervals]
        rows.setdefault((_sent(family), *cells), []).append(family.row.title)
    starred = _sent_of(plan.best), plan.best.work.sync_every
    for (sent, *cells), titles in rows.items():
        if starred[0] == sent and row(plan.best.method).title in titles:
            place = intervals.index(starred[1])
            cells[place] = f"*{cells[place]}"
        table.add_row(f"{', '.join(titles)}: {sent}", *cells)
    return table


def _sent(family: Family) -> str:
    """What it sends, and whether training waits for it."""
    return (family.compress or "fp32") + (", delayed" if family.overlap else "")


def _sent_of(candidate: Candidate) -> str | None:
    if candidate.is_ddp:
        return None
    family = Family(row(candidate.method), candidate.work.compress, candidate.work.delay > 0)
    return _sent(family)


def _cell(candidate: Candidate | None) -> str:
    if candidate is None:
        return formats.NONE
    if not candidate.usable:
        return "unusable"
    return _run(candidate) + ("" if candidate.price.measured else "?")


def worker_table(rows: list[tuple[int, Candidate, Candidate]], steps: int, step: float) -> Table:
    """Gradients per second of all workers, counted as DDP's steps over the time to its quality."""
    table = _table("workers", "DDP, of the ideal", "*, of the ideal")
    for number, base, choice in rows:
        table.add_row(
            str(number), *(formats.percent(steps * step / each.run_s) for each in (base, choice))
        )
    return table


def memory_table(plan: Plan, task: Task, workers: int) -> Table:
    best, base = plan.best, plan.opponents[0]
    columns = [base] if best.is_ddp else [base, best]
    held = [memory(each.work, inner=task.inner, workers=workers) for each in columns]
    names = ("*" if each is best else each.title for each in columns)
    table = _table("memory per device, activations not counted", *names)
    for what in dict.fromkeys(name for each in held for name in each):
        table.add_row(what, *(formats.size(each.get(what)) for each in held))
    table.add_row("in all", *(formats.size(sum(each.values())) for each in held), style="bold")
    return table


def record(candidate: Candidate) -> dict[str, Any]:
    """The entry of a candidate in plan.json."""
    work, price = candidate.work, candidate.price
    return {
        "method": candidate.method,
        "variant": candidate.variant,
        "sync_every": None if work.is_ddp else work.sync_every,
        "mix_prob": work.mix_prob,
        "delay": work.delay,
        "compress": work.compress,
        "extra_steps": price.extra,
        "price": "measured" if price.measured else f"{NOT_MEASURED}: {price.why_not}",
        "steps": candidate.steps,
        "step_s": candidate.step_s,
        "run_s": candidate.run_s,
        "computing": candidate.computing,
        "waiting": candidate.waiting,
        "exchanging": candidate.exchanging,
        "usable": candidate.usable,
        "bytes_on_the_wire": candidate.bytes_on_the_wire,
    }

"""A plan in words and tables."""

from collections.abc import Iterator
from typing import Any

from rich.table import Table
from rich.text import Text

from palsgd.cluster import Cluster
from palsgd.lab.plan.candidates import SHARE, TRIED, WORTH, Choice, Task, gain
from palsgd.lab.plan.memory import memory
from palsgd.lab.report import formats

NOT_KNOWN = (
    "A model of time does not know how many steps a choice needs. The paper saw PALSGD need as "
    "many as DDP at H = 64 (ResNet-50, GPT-Neo-8M) and 15.8 % fewer at H = 16 (GPT-Neo-125M), and "
    "DiLoCo miss DDP's loss on TinyStories; of longer H, delays and codes it says little. Give "
    "what you measured as --extra-steps, e.g. 0.1."
)


def rate_words(bits: float) -> str:
    for unit in ("bit/s", "kbit/s", "Mbit/s", "Gbit/s", "Tbit/s"):
        if bits < 999.5 or unit == "Tbit/s":
            break
        bits /= 1000
    return f"{bits:.3g}{formats.GAP}{unit}"


def setting_words(choice: Choice) -> str:
    work = choice.work
    if work.is_ddp:
        return choice.method
    parts = [f"{choice.method} H={work.sync_every}"]
    if work.mix_prob:
        parts.append(f"p={work.mix_prob:g}")
    if work.delay:
        parts.append(f"delay={work.delay}")
    if work.compress:
        parts.append(work.compress)
    return " ".join(parts)


def headline(cluster: Cluster, task: Task) -> Text:
    nodes = "" if cluster.per_node == 1 else f" in nodes of {cluster.per_node}"
    return Text(
        f"{formats.count(task.parameters)} parameters, {cluster.workers} workers{nodes}, a step of "
        f"{time_words(cluster.step)}, links of {rate_words(cluster.rate)} and "
        f"{time_words(cluster.latency)} one way, {formats.count(task.steps)} steps",
        style="bold",
    )


def choice_table(found: list[Choice], base: Choice, best: Choice) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0))
    table.add_column("choice, fastest first")
    for name in ("a step", "exchanging", "the run", "saves of DDP's time", "at equal gradients",
                 "bytes on the wire", "of DDP's"):  # fmt: skip
        table.add_column(name, justify="right")
    for choice in found:
        mark = "* " if choice is best else "  "
        versus = ("", "") if choice is base else (
            formats.percent(1 - choice.run_s / base.run_s), formats.percent(gain(choice, base))
        )  # fmt: skip
        table.add_row(
            mark + setting_words(choice), time_words(choice.step_s),
            formats.percent(choice.exchanging), formats.seconds(choice.run_s), *versus,
            formats.size(choice.bytes_on_the_wire), _share(choice, base),
            style="bold" if choice is best else "",
        )  # fmt: skip
    return table


def _share(choice: Choice, base: Choice) -> str:
    """The share of DDP's bytes; there is none for a single worker."""
    if not base.bytes_on_the_wire:
        return ""
    return formats.percent(choice.bytes_on_the_wire / base.bytes_on_the_wire)


def remarks(best: Choice, even: float | None) -> Iterator[str]:
    if best.work.is_ddp:
        yield f"Nothing saves {100 * WORTH:g} % of DDP's time at equal gradients: stay with DDP."
    else:
        yield (
            f"* is the plainest choice that keeps exchanges near {100 * SHARE:g} % of the time "
            f"with an H of at most {TRIED}, the longest of the paper's main runs"
            + ("." if best.work.sync_every <= TRIED else "; here none does, so the shortest H.")
        )
        yield _even_words(even)
    yield NOT_KNOWN


def _even_words(even: float | None) -> str:
    worth = f"{100 * WORTH:g} %"
    if even is None:
        return f"Break-even: at any rate, as latency alone costs DDP more than {worth} of its time."
    if even == 0:
        return f"Break-even: never; with these extra steps it saves less than {worth} at any rate."
    return (
        f"Break-even: over links faster than {rate_words(even)} it saves less than {worth} of "
        "DDP's time at equal gradients."
    )


def worker_table(rows: list[tuple[int, Choice, Choice]], step: float) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0))
    for name in ("workers", "gradients/s, DDP", "of the ideal", "gradients/s, *", "of the ideal"):
        table.add_column(name, justify="right")
    for number, base, choice in rows:
        table.add_row(str(number), *(
            text for each in (base, choice)
            for text in (_figure(number / each.gradient_s), formats.percent(step / each.gradient_s))
        ))  # fmt: skip
    return table


def memory_table(best: Choice, base: Choice, task: Task, workers: int) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0))
    table.add_column("memory per device, activations not counted")
    columns = [base] if best is base else [base, best]
    held = [memory(each.work, inner=task.inner, workers=workers) for each in columns]
    for each in columns:
        table.add_column("*" if each is best else each.method, justify="right")
    for what in dict.fromkeys(name for each in held for name in each):
        table.add_row(what, *(formats.size(each.get(what)) for each in held))
    table.add_row("in all", *(formats.size(sum(each.values())) for each in held), style="bold")
    return table


def record(choice: Choice, base: Choice) -> dict[str, Any]:
    """The entry of a choice in plan.json."""
    work = choice.work
    return {
        "method": choice.method,
        "sync_every": None if work.is_ddp else work.sync_every,
        "mix_prob": work.mix_prob,
        "delay": work.delay,
        "compress": work.compress,
        "step_s": choice.step_s,
        "exchanging": choice.exchanging,
        "run_s": choice.run_s,
        "saved": 1 - choice.run_s / base.run_s,
        "saved_at_equal_gradients": gain(choice, base),
        "bytes_on_the_wire": choice.bytes_on_the_wire,
    }


def time_words(seconds: float) -> str:
    if seconds >= 1 or seconds == 0:
        return formats.seconds(seconds)
    unit, size = ("ms", 1e3) if seconds >= 1e-3 else ("us", 1e6)
    return f"{seconds * size:.3g}{formats.GAP}{unit}"


def _figure(value: float) -> str:
    return f"{value:,.3g}" if value < 1000 else f"{value:,.0f}"

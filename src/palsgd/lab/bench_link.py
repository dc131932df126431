"""`palsgd bench link`: every method over the same links, real packets where that is possible."""

from __future__ import annotations

import dataclasses
import json
import os
import statistics
import sys
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from palsgd import registry, units
from palsgd.cluster.network import ring_hops
from palsgd.lab.device import check_device, processor
from palsgd.lab.folder_lock import locked
from palsgd.lab.links import Finished, Link, Network, unavailable
from palsgd.lab.links.link import modelled_ring_seconds
from palsgd.lab.links.processes import run_on_loopback
from palsgd.lab.methods import is_baseline
from palsgd.lab.report import formats
from palsgd.lab.run_folder import write_json
from palsgd.lab.run_set import Options, check_method, clear_all, finish, is_used
from palsgd.lab.settings import Settings
from palsgd.lab.workloads import data_settings, load

if TYPE_CHECKING:
    from rich.table import Table

# Unless said otherwise: short, no warm-up (that would be DDP), evaluated at both ends only
DEFAULTS = ("steps=64", "sync_every=16", "warmup_steps=0", "evaluate_every=1000000")
TIMEOUT_S = 24 * 3600.0
Record = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Links:
    """The links of all workers. They are equal, except the last worker's if it is to be slow or
    lossy."""

    workers: int
    link: Link
    others: Mapping[int, Link]

    def each(self) -> list[Link]:
        return [self.others.get(worker, self.link) for worker in range(self.workers)]

    def words(self) -> str:
        last = [f"worker {worker}: {_words(link)}" for worker, link in self.others.items()]
        return "; ".join([_words(self.link), *last])


def links_of(
    *,
    workers: int,
    rate: str,
    latency: float | str,
    loss: float,
    slow: str | None,
    lossy: float | None,
) -> Links:
    """`latency` is text with a unit, or a number of milliseconds."""
    link = Link(None if rate == "none" else rate, units.milliseconds("latency", latency, zero=True),
                loss)  # fmt: skip
    last = dataclasses.replace(
        link, rate=slow or link.rate, loss=link.loss if lossy is None else lossy
    )
    return Links(workers=workers, link=link, others={} if last == link else {workers - 1: last})


def with_defaults(changes: list[str]) -> list[str]:
    """Length may also be given in epochs, which is instead of steps."""
    epochs = any(each.startswith("epochs=") for each in changes)
    return [each for each in DEFAULTS if not (epochs and each.startswith("steps="))] + changes


def check(runs: Mapping[str, Settings], out: Path, options: Options) -> None:
    """Refuse what cannot be run, before anything is."""
    for settings in runs.values():
        check_method(settings)
        if settings.ranks_per_worker > 1:
            raise ValueError(
                f"ranks_per_worker={settings.ranks_per_worker} has no links of its own here, where "
                "a link belongs to a worker; use ranks_per_worker=1"
            )
    check_device(options.device)
    if is_used(out) and not options.force:
        raise ValueError(
            f"{out} exists and is not empty; add --force to start over, or choose another --out"
        )


def bench(runs: Mapping[str, Settings], links: Links, out: Path, options: Options) -> Record:
    """Run them all, write their folders and DIR/link.json, and return what that holds. Where links
    cannot be emulated the runs are done over loopback, and the times are projections."""
    check(runs, out, options)
    first = next(iter(runs.values()))
    load(first.workload, data=options.data, download=options.download, **data_settings(first))
    with locked(out):
        check(runs, out, options)  # again, as another command may have been faster
        clear_all(out)
        reason = unavailable()
        found = _measured(runs, links, out, options, emulated=reason is None)
        result = _result(found, links, runs, projected=reason)
        write_json(out / "link.json", result)
        finish(runs, out)
    return result


def _measured(
    runs: Mapping[str, Settings], links: Links, out: Path, options: Options, *, emulated: bool
) -> Record:
    jobs = {
        "runs": {name: settings.as_dict() for name, settings in runs.items()},
        "out": str(out.resolve()),
        "data": options.data,
        "device": options.device,
        "quiet": options.quiet,
        "command": sys.argv,
    }
    with tempfile.TemporaryDirectory() as folder:
        write_json(Path(folder) / "jobs.json", jobs)
        results = Path(folder) / "results.json"
        command = [sys.executable, "-m", "palsgd.lab.links.worker_main", f"{folder}/jobs.json",
                   str(results)]  # fmt: skip
        _run(command, links, emulated=emulated, echo=not options.quiet)
        return json.loads(results.read_text())


def _run(command: list[str], links: Links, *, emulated: bool, echo: bool) -> list[Finished]:
    if not emulated:
        return run_on_loopback(command, links.workers, timeout=TIMEOUT_S, echo=echo)
    with Network(links.workers, links.link, links.others) as network:
        return network.run(command, timeout=TIMEOUT_S, echo=echo)


# -- figures -------------------------------------------------------------------------------------


def _result(
    found: Record, links: Links, runs: Mapping[str, Settings], projected: str | None
) -> Record:
    each = links.each()
    ring = found["ring"]
    records = {
        name: figures(runs[name].method, run, each)
        for name, run in found["methods"].items()
        if run is not None
    }
    key = "step_s" if projected is None else "projected_step_s"
    ddp = next((r[key] for name, r in records.items() if is_baseline(runs[name].method)), None)
    for record in records.values():
        record["speedup_over_ddp"] = ddp / record[key] if ddp else None
        if projected:  # loopback has one counter for all processes
            record |= {"kernel_bytes": None, "kernel_over_ring": None}
    return {
        "projected": projected,  # why, where times are no measurements
        "links": [dataclasses.asdict(link) for link in each],
        "links_in_words": links.words(),
        "machine": f"{processor()}, {os.uname().sysname} {os.uname().release}",
        "congestion_control": found["congestion_control"],
        "compute_s": found["compute_s"],
        "ring": {
            "bytes": ring["bytes"],
            "seconds": statistics.median(ring["seconds"]),
            "repeats": len(ring["seconds"]),
            "theory_s": modelled_ring_seconds(each, ring["bytes"]),
        },
        "methods": records,
    }


def figures(method: str, run: Record, links: list[Link]) -> Record:
    """DDP's exchanges overlap its backward pass, so their cost is the time of its steps less that
    of steps without exchanges. The ledgers of the other methods have the seconds of computing."""
    gradients = run["gradient_steps"]
    if not registry.row(method).rounds or gradients < 2:
        computing = run["compute_s"] * gradients
    else:  # a ledger's watch starts with the end of the first gradient, so one is missing from it
        computing = run["gradient_s"] * gradients / (gradients - 1) + run["mixing_s"]
    exchanging = max(0.0, run["wall_s"] - computing)
    messages = run["messages"] or run["syncs"]  # torch's DDP does not count its own
    on_the_wire = run["bytes_on_the_wire"]
    hops = ring_hops(len(links))  # in each of which an all-reduce moves a K-th of its bytes
    size = on_the_wire * len(links) / hops if hops else 0.0
    projected = computing + modelled_ring_seconds(links, size, messages)
    return run | {
        "step_s": run["wall_s"] / run["steps"],
        "communicating": exchanging / run["wall_s"],
        "exchange_s": exchanging / run["syncs"] if run["syncs"] else None,
        "projected_step_s": projected / run["steps"],
        "projected_communicating": 1 - computing / projected,
        "kernel_over_ring": run["kernel_bytes"] / on_the_wire if on_the_wire else None,
    }


# -- words ---------------------------------------------------------------------------------------


def tables(result: Record) -> list[Table | str]:
    """The tables and remarks that the terminal shows."""
    ring, workers = result["ring"], len(result["links"])
    size = formats.size(ring["bytes"])
    if result["projected"]:
        heading = (
            f"PROJECTION, nothing was sent over these links: {workers} workers, "
            f"{result['links_in_words']}. Computing was timed over loopback; a ring all-reduce of "
            f"{size} takes {_seconds(ring['theory_s'])} in theory. Lost packets, headers and TCP's "
            "slow start are not in it."
        )
        return [heading, _table(result, _PROJECTED)]
    heading = (
        f"{workers} workers, {result['links_in_words']}. Bare ring all-reduce of {size}: "
        f"{_seconds(ring['seconds'])}, {_seconds(ring['theory_s'])} in theory; a gradient step "
        f"without exchange: {_seconds(result['compute_s'])}"
    )
    return [heading, _table(result, _MEASURED)]


def _table(result: Record, columns: Mapping[str, Callable[[Record], str]]) -> Table:
    from rich import box
    from rich.table import Table

    table = Table("", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for title in columns:
        table.add_column(title, justify="right")
    for name, record in result["methods"].items():
        table.add_row(name, *(cell(record) for cell in columns.values()))
    return table


def _seconds(value: float | None) -> str:
    return formats.NONE if value is None else f"{value:.3g}{formats.GAP}s"


def _ratio(value: float | None) -> str:
    return formats.NONE if value is None else f"{value:.3g}{formats.GAP}x"


_ALWAYS: dict[str, Callable[[Record], str]] = {
    "sent, by the ledger": lambda run: formats.size(run["bytes_sent"]),
}
_MEASURED = {
    "time of a step": lambda run: _seconds(run["step_s"]),
    "by the model": lambda run: _seconds(run["projected_step_s"]),
    "exchanging": lambda run: formats.percent(run["communicating"]),
    "time of an exchange": lambda run: _seconds(run["exchange_s"]),
    **_ALWAYS,
    "by the kernel": lambda run: formats.size(run["kernel_bytes"]),
    "faster than DDP": lambda run: _ratio(run["speedup_over_ddp"]),
}
_PROJECTED = {
    "time of a step": lambda run: _seconds(run["projected_step_s"]),
    "exchanging": lambda run: formats.percent(run["projected_communicating"]),
    **_ALWAYS,
    "faster than DDP": lambda run: _ratio(run["speedup_over_ddp"]),
}


def _words(link: Link) -> str:
    parts = [link.rate or "no limit"]
    parts += [f"{link.delay_ms:g} ms"] if link.delay_ms else []
    parts += [f"{100 * link.loss:g} % lost"] if link.loss else []
    return ", ".join(parts)

"""Every method over emulated links: the tables of `palsgd bench link` in bench/README.md.

    sudo python bench/link.py --out bench/results/link-2cores.json    # about 90 minutes
    sudo python bench/link.py --only 100mbit none
    sudo python bench/link.py --ring 4200000     # only bare all-reduces of so many bytes

Each case is one command, which is printed before it runs; each has the four methods in one run, so
that ratios are of times taken within minutes. All cases are run --repeats times, one after another,
so that a slow hour hits all alike; figures are means with 95% intervals over the repeats, and those
of ratios are of ratios within a run. Linux and root; --tiny does without links.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from common import add_record_options, provenance, save, summary

from palsgd.lab.judging.interval import of_mean
from palsgd.lab.links import Link, Network
from palsgd.lab.links.link import modelled_ring_seconds

COMMON = "stories-1m batch_size=4 --workers 4 --steps 32 --sync-every 16"
CASES = {
    "10mbit": "--rate 10mbit",
    "100mbit": "--rate 100mbit",
    "1gbit": "--rate 1gbit",
    "none": "--rate none",
    "latency": "--rate 100mbit --latency 50",
    "slow": "--rate 100mbit --slow-worker 10mbit",
    "lossy": "--rate 100mbit --lossy 0.01",
}
TINY = "digits --workers 2 --steps 4 --sync-every 2 --methods ddp,diloco"
RING_LINKS = (Link("10mbit"), Link("100mbit"), Link("1gbit"), Link(), Link("100mbit", 20),
              Link("100mbit", 50), Link("100mbit", 150), Link("1gbit", 50))  # fmt: skip
RING_COLUMNS = ("links", "ms, median", "repeats", "in theory", "ratio")
BARE = """
import json, sys
import torch.distributed as dist
from palsgd.lab.links.worker_main import ring_seconds
dist.init_process_group("gloo")
print(json.dumps(ring_seconds(int(sys.argv[1]))))
dist.destroy_process_group()
"""


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--only", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--ring", type=int, metavar="BYTES")
    parser.add_argument("--repeats", type=int, default=5)
    add_record_options(parser)
    args = parser.parse_args()
    if args.ring is not None:
        print(markdown([RING_COLUMNS, *(bare_ring(link, args.ring) for link in RING_LINKS)]))
        return
    record: dict[str, Any] = provenance("cpu", tiny=args.tiny) | {"cases": {}, "untimed": {}}
    for _ in range(1 if args.tiny else args.repeats):
        for name in ["none"] if args.tiny else args.only:
            found = measured(CASES[name], tiny=args.tiny)
            record["cases"].setdefault(name, []).append(found)
            record["untimed"][name] = untimed(found)
            save(record, args.out)
    cases = record["cases"].values()
    print(markdown([COLUMNS, *(row for repeats in cases for row in rows(repeats))]))
    for repeats in cases:
        print(ring(repeats[-1]))
    print(summary(record))


def untimed(found: dict[str, Any]) -> dict[str, Any]:
    """What each method handed over, by its ledger: steps, exchanges and bytes."""
    keys = ("steps", "syncs", "bytes_sent")
    return {name: [run[key] for key in keys] for name, run in found["methods"].items()}


def measured(options: str, *, tiny: bool) -> dict[str, Any]:
    """Where links cannot be emulated, --tiny goes over loopback; times are then projections."""
    words = f"bench link {TINY if tiny else COMMON} {options}"
    print(f"palsgd {words}", file=sys.stderr, flush=True)
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "palsgd", *words.split(), "--quiet", "--out", folder]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        found = json.loads((Path(folder) / "link.json").read_text())
    if found["projected"] and not tiny:
        sys.exit(f"nothing was measured: {found['projected']}")
    return {"command": f"palsgd {words}", "load": os.getloadavg()[0]} | found


def bare_ring(link: Link, size: int) -> tuple[str, ...]:
    with Network(4, link) as network:
        done = network.run([sys.executable, "-c", BARE, str(size)])
    times, theory = json.loads(done[0].stdout), modelled_ring_seconds([link] * 4, size)
    found = statistics.median(times)
    words = f"{link.rate or 'no limit'}, {link.delay_ms:g} ms"
    ratio = f"{found / theory:.2f}" if theory else ""
    return words, f"{1e3 * found:.0f}", str(len(times)), f"{1e3 * theory:.0f}", ratio


def rows(repeats: list[dict[str, Any]]) -> list[tuple[str, ...]]:
    """One for each method of a case."""
    return [
        (
            repeats[0]["links_in_words"],
            name,
            *(
                figure([shown(found["methods"][name]) for found in repeats], form)
                for shown, form in FIGURES.values()
            ),
        )
        for name in repeats[0]["methods"]
    ]


FIGURES: dict[str, tuple[Callable[[dict[str, Any]], float | None], str]] = {
    "ms a step": (lambda run: 1e3 * run["step_s"], "{:.0f}"),
    "by the model": (lambda run: 1e3 * run["projected_step_s"], "{:.0f}"),
    "exchanging": (lambda run: 100 * run["communicating"], "{:.0f}%"),
    "ms an exchange": (lambda run: 1e3 * run["exchange_s"], "{:.0f}"),
    "MB, ledger": (lambda run: run["bytes_sent"] / 1e6, "{:.1f}"),
    # Over loopback the kernel counts everybody's bytes, and so nobody's.
    "MB, kernel": (lambda run: run["kernel_bytes"] and run["kernel_bytes"] / 1e6, "{:.1f}"),
    "kernel / ring": (lambda run: run["kernel_over_ring"], "{:.3f}"),
    "faster than DDP": (lambda run: run["speedup_over_ddp"], "{:.2f} x"),
}
COLUMNS = ("links", "method", *FIGURES)


def figure(values: list[float | None], form: str) -> str:
    """The mean over repeats and its interval; one repeat has none, and equal ones need none."""
    known = [value for value in values if value is not None]
    if not known:
        return ""
    found = of_mean(known)
    if not found.known or len(set(known)) == 1:
        return form.format(found.value)
    return f"{form.format(found.value)} [{form.format(found.low)}, {form.format(found.high)}]"


def ring(found: dict[str, Any]) -> str:
    bare = found["ring"]
    return (
        f"{found['links_in_words']}: bare ring all-reduce of {bare['bytes'] / 1e6:.2f} MB "
        f"{1e3 * bare['seconds']:.0f} ms, {1e3 * bare['theory_s']:.0f} in theory; gradient step "
        f"{1e3 * found['compute_s']:.0f} ms; load {found['load']:.1f}; {found['machine']}, "
        f"TCP {found['congestion_control']}"
    )


def markdown(lines: list[tuple[str, ...]]) -> str:
    head, *rest = ["| " + " | ".join(cells) + " |" for cells in lines]
    return "\n".join([head, "|" + "---|" * len(lines[0]), *rest])


if __name__ == "__main__":
    main()

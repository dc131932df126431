"""How long the cluster model itself takes: event simulations, and a plan.

python bench/cluster.py [--out FILE]
"""

import argparse
import json
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from common import machine

from palsgd.cluster import Cluster, Work
from palsgd.lab.plan.command import plan, prepare

H, ROUNDS = 64, 1000


def timed(call: Callable[[], Any]) -> dict[str, float]:
    """Seconds that passed, and seconds of a core: apart where other programs run."""
    began, busy = time.perf_counter(), time.process_time()
    call()
    return {"s": time.perf_counter() - began, "cpu_s": time.process_time() - busy}


def simulation(workers: int, spread: str, work: Work, steps: int) -> Callable[[], Any]:
    place = Cluster(
        workers=workers, step="50ms", rate="100gbit", latency="20us", spread=spread, cv=0.2
    )
    return lambda: place.project(work, steps=steps)


def told_plan(workers: int) -> Callable[[], Any]:
    def run() -> None:
        cluster, task = prepare(
            None, step_ms=50.0, parameters="8M", steps=None, extra_steps=0.0, mix_prob=None,
            data=None, device="cpu", workers=workers, rate="100mbit", latency="20ms",
        )  # fmt: skip
        with tempfile.TemporaryDirectory() as folder:
            plan(cluster, task, Path(folder))

    return run


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, help="a JSON file for the results")
    options = parser.parse_args()
    local = Work(parameters=8_000_000, sync_every=H, mix_prob=0.1)
    delayed = Work(parameters=8_000_000, sync_every=H, mix_prob=0.1, delay=32)
    ddp = Work.ddp(8_000_000)
    calls = {
        "10,000 workers, 1,000 rounds of 64, lognormal": simulation(
            10_000, "lognormal", local, H * ROUNDS
        ),
        "10,000 workers, 1,000 rounds of 64, heavy tail, delay 32": simulation(
            10_000, "heavy-tail", delayed, H * ROUNDS
        ),
        "10,000 workers, 1,000 rounds of 64, constant": simulation(
            10_000, "constant", local, H * ROUNDS
        ),
        "10,000 workers, 64,000 steps of DDP, lognormal": simulation(
            10_000, "lognormal", ddp, H * ROUNDS
        ),
        "100,000 workers, 100 rounds of 64, lognormal": simulation(
            100_000, "lognormal", local, H * 100
        ),
        "a plan, 4 workers, with its pictures (first)": told_plan(4),
        "a plan, 4 workers, with its pictures (again)": told_plan(4),
        "a plan, 10,000 workers, with its pictures": told_plan(10_000),
    }
    found = {}
    for name, call in calls.items():
        found[name] = timed(call)
        took = found[name]
        print(f"{took['s']:8.2f} s {took['cpu_s']:8.2f} s of a core  {name}", flush=True)
    if options.out:
        result = {"machine": machine("cpu"), "took": found}
        options.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()

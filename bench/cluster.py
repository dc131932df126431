"""How long the cluster model itself takes: event simulations, and a plan.

python bench/cluster.py --out bench/results/cluster-2cores.json
"""

import argparse
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from common import add_record_options, provenance, save, summary

from palsgd.cluster import Cluster, Work
from palsgd.lab.plan.command import plan, prepare

H, ROUNDS = 64, 1000
LOCAL = Work(parameters=8_000_000, sync_every=H, mix_prob=0.1)
DELAYED = Work(parameters=8_000_000, sync_every=H, mix_prob=0.1, delay=32)
DDP = Work.ddp(8_000_000)


def timed(call: Callable[[], Any]) -> dict[str, float]:
    """Seconds that passed, and seconds of a core: apart where other programs run."""
    began, busy = time.perf_counter(), time.process_time()
    untimed = call()
    took = {"s": time.perf_counter() - began, "cpu_s": time.process_time() - busy}
    return took | {"untimed": untimed}


def simulation(workers: int, spread: str, work: Work, steps: int) -> Callable[[], dict[str, float]]:
    place = Cluster(
        workers=workers, step="50ms", rate="100gbit", latency="20us", spread=spread, cv=0.2
    )

    def run() -> dict[str, float]:
        found = place.project(work, steps=steps)
        return {"exchanges": len(found.clocks), "gradient_steps": found.gradient_steps}

    return run


def told_plan(workers: int) -> Callable[[], dict[str, float]]:
    def run() -> dict[str, float]:
        cluster, task, _ = prepare(
            None, step_ms=50.0, parameters="8M", steps=None, extra_steps=None, mix_prob=None,
            data=None, device="cpu", workers=workers, rate="100mbit", latency="20ms",
        )  # fmt: skip
        with tempfile.TemporaryDirectory() as folder:
            plan(cluster, task, Path(folder))
            return {"pictures": len(list(Path(folder).rglob("*.png")))}

    return run


def all_calls() -> dict[str, Callable[[], dict[str, float]]]:
    steps = H * ROUNDS
    return {
        "10,000 workers, 1,000 rounds of 64, lognormal": simulation(
            10_000, "lognormal", LOCAL, steps
        ),
        "10,000 workers, 1,000 rounds of 64, heavy tail, delay 32": simulation(
            10_000, "heavy-tail", DELAYED, steps
        ),
        "10,000 workers, 1,000 rounds of 64, constant": simulation(
            10_000, "constant", LOCAL, steps
        ),
        "10,000 workers, 64,000 steps of DDP, lognormal": simulation(
            10_000, "lognormal", DDP, steps
        ),
        "100,000 workers, 100 rounds of 64, lognormal": simulation(
            100_000, "lognormal", LOCAL, H * 100
        ),
        "a plan, 4 workers, with its pictures (first)": told_plan(4),
        "a plan, 4 workers, with its pictures (again)": told_plan(4),
        "a plan, 10,000 workers, with its pictures": told_plan(10_000),
    }


def tiny_calls() -> dict[str, Callable[[], dict[str, float]]]:
    return {
        "8 workers, 10 rounds of 64": simulation(8, "lognormal", LOCAL, 10 * H),
        "8 workers, 10 rounds of 64, delay 32": simulation(8, "heavy-tail", DELAYED, 10 * H),
        "8 workers, 64 steps of DDP": simulation(8, "lognormal", DDP, H),
        "a plan, 4 workers": told_plan(4),
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    add_record_options(parser)
    args = parser.parse_args()
    record: dict[str, Any] = provenance("cpu", tiny=args.tiny) | {"took": {}, "untimed": {}}
    for name, call in (tiny_calls() if args.tiny else all_calls()).items():
        took = record["took"][name] = timed(call)
        record["untimed"][name] = took.pop("untimed")
        print(f"{took['s']:8.2f} s {took['cpu_s']:8.2f} s of a core  {name}", flush=True)
        save(record, args.out)
    print(summary(record))


if __name__ == "__main__":
    main()

"""Injects faults into training runs, and counts what comes of them.

    make chaos
    python tests/faults/chaos.py --count 300 --seed 0 --out runs/chaos.json
    python tests/faults/chaos.py --only 17      the fault of seed 17 once more, with what was said

Every fault follows from its seed. Kinds that need root (mounts, network namespaces) are left out
and counted where this is not root.
"""

import argparse
import atexit
import collections
import gc
import json
import os
import platform
import sys
import time
from collections.abc import Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from multiprocessing import get_context
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # where the tests' helpers lie
os.environ |= {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}  # a thread would not be forked

from faults.fault import KINDS, PAIRS, Fault
from support.patience import factor

_TWINS = {"launched": "lab", "elastic": ""}  # an elastic run has one for each round


def main() -> None:
    given = _arguments()
    faults = [Fault.of(seed) for seed in given.only or range(given.seed, given.seed + given.count)]
    able = [fault for fault in faults if os.geteuid() == 0 or not KINDS[fault.kind].needs_root]
    began, records = time.monotonic(), list[dict[str, Any]]()
    try:
        for record in _tried(able, given.jobs):
            records.append(record)
            if given.only or given.verbose or record["outcome"] not in _good():
                print(record["text"], flush=True)
    except KeyboardInterrupt:
        print(f"stopped after {len(records)} of {len(able)}")
    records.sort(key=lambda record: record["fault"]["seed"])
    tally = tallied(records)
    print(shown(tally, left_out=len(faults) - len(able)))
    if given.out:
        found = {"machine": machine(), "seconds": round(time.monotonic() - began, 1)}
        found |= {"first_seed": faults[0].seed, "jobs": given.jobs, "patience": factor()}
        found |= {"tally": tally, "kinds": by_kind(records), "faults": records}
        write(given.out, found)
    sys.exit(any(tally[name] for name in _bad()))


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--count", type=int, default=300, help="so many faults")
    parser.add_argument("--seed", type=int, default=0, help="of the first fault")
    parser.add_argument("--only", type=int, nargs="+", help="the faults of these seeds alone")
    parser.add_argument("--jobs", type=int, default=1, help="so many faults at a time")
    parser.add_argument("--out", help="a file for the record")
    parser.add_argument("--verbose", action="store_true", help="a line for every fault")
    return parser.parse_args()


def _good() -> tuple[str, ...]:
    from faults.trial import GOOD

    return GOOD


def _bad() -> tuple[str, ...]:
    from faults.trial import BAD

    return BAD


def _tried(faults: list[Fault], jobs: int) -> Iterator[dict[str, Any]]:
    """The records, as they come. Twins are trained once, before processes fork."""
    preload()
    from faults.scenario import twin

    for scenario in dict.fromkeys(_TWINS.get(each.scenario, each.scenario) for each in faults):
        if scenario:
            twin(scenario)
    if jobs == 1:
        yield from map(_one, faults)
        return
    pool = ProcessPoolExecutor(jobs, mp_context=get_context("fork"))
    try:
        for done in as_completed([pool.submit(_one, fault) for fault in faults]):
            yield done.result()
    finally:
        pool.shutdown(cancel_futures=True)


def preload() -> None:
    """Import what workers need, so that they are forked with it. Some of it is imported by the
    first optimizer and by the first command."""
    import sklearn.datasets
    import torch
    import torch.distributed.fsdp

    import palsgd.checkpoint
    import palsgd.lab.run_set
    import palsgd.lab.trainer
    import palsgd.lab.workloads.digits
    import palsgd.simulator.vectorized  # noqa: F401
    from support.commands import palsgd as command

    torch.set_num_threads(1)
    torch.optim.AdamW([torch.zeros(1, requires_grad=True)])
    sklearn.datasets.load_digits()
    command("train", "no-such-workload", "--workers", 2, "--device", "cpu")
    gc.collect()
    gc.freeze()  # a collection in a fork would copy all of it
    atexit.register(gc.unfreeze)


def _one(fault: Fault) -> dict[str, Any]:
    from faults.trial import tried

    record = tried(fault)
    return record.as_dict() | {"text": str(record)}


def tallied(records: Iterable[dict[str, Any]]) -> dict[str, int]:
    counted = collections.Counter(record["outcome"] for record in records)
    names = (*_good(), *_bad())
    return {"injected": sum(counted.values()), **{name: counted[name] for name in names}}


def by_kind(records: Iterable[dict[str, Any]]) -> dict[str, dict[str, int]]:
    found: dict[str, collections.Counter[str]] = {}
    for record in records:
        found.setdefault(record["fault"]["kind"], collections.Counter())[record["outcome"]] += 1
    return {kind: dict(counted) for kind, counted in found.items()}


def shown(tally: dict[str, int], *, left_out: int = 0) -> str:
    lines = [f"{name:<14} {count:>5}" for name, count in tally.items()]
    if left_out:
        lines.append(f"left out       {left_out:>5}, as they need root")
    return "\n".join(lines)


def machine() -> dict[str, Any]:
    import torch

    text = Path("/proc/cpuinfo").read_text() if Path("/proc/cpuinfo").exists() else ""
    models = [line.partition(":")[2].strip() for line in text.splitlines() if "model name" in line]
    return {
        "cpu": models[0] if models else platform.processor(),
        "cores": os.cpu_count(),
        "system": platform.platform(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "pairs": len(PAIRS),
    }


def write(out: str, found: dict[str, Any]) -> None:
    Path(out).parent.mkdir(parents=True, exist_ok=True)
    Path(out).write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()

"""The seconds to a target loss over a slow link, measured, beside those of the model of time.

    sudo python bench/time_to_target.py --out bench/results/time-2cores.json    # 40 minutes
    sudo python bench/time_to_target.py --rate 1gbit --out bench/results/time-1gbit-2cores.json
    sudo python bench/time_to_target.py --only k2-ddp k2-h32-p0.1 --seeds 1

Whole trainings of `stories` in gloo processes, each behind an emulated link: DDP, DiLoCo (p = 0)
and PALSGD, against H, p and K. Stated before the runs: the target is 1.05 x the mean final loss of
DDP over the seeds at the same K, and nothing is tuned. A run that never has so low a loss misses
the target and has no time. Evaluations are outside the clock. Seeds are the outer loop, so that a
slow hour hits all cases alike, and ratios are of runs of one seed.

The model's seconds are the lab's projection of the same run to the same step. It is told the rate
of the link and what a gradient step and a mixing step took in that run without any exchange.

The record is saved after every run. The same command goes on with the runs that it lacks. Linux and
root; --tiny does without links.
"""

import argparse
import json
import os
import sys
import tempfile
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch.distributed as dist
from common import add_record_options, provenance, save, summary
from markdown_table import markdown
from time_rows import COLUMNS, cells, rows

from palsgd.lab import workloads
from palsgd.lab.links import Link, Network, unavailable, worker_main
from palsgd.lab.links.processes import run_on_loopback
from palsgd.lab.run_folder import Line, Run, read_run
from palsgd.lab.settings import Settings
from palsgd.lab.timing.projection import projected_pace

Record = dict[str, Any]

SEEDS = 6
FIRST_SEED = 11  # smaller ones were used to choose the length and the target
# Stated before the runs; a record holds runs of one such statement. After the warm-up there are 3
# rounds of 128 steps, and whole ones of the other lengths. Larger batches would keep two cores busy
# for an hour.
STATED: Record = {
    "workload": "stories", "batch_size": 2, "steps": 484, "warmup_steps": 100, "pull": 0.5,
    "evaluate_every": 20, "rate": "100mbit", "margin": 0.05,
}  # fmt: skip
INTERVALS, PROBABILITIES = (8, 32, 128), (0.0, 0.05, 0.1, 0.25)
TINY: Record = STATED | {
    "workload": "digits", "batch_size": 32, "steps": 14, "warmup_steps": 2, "evaluate_every": 2,
    "rate": None, "margin": 0.02,
}  # fmt: skip
NO_LIMIT = "1000gbit"  # what the model is told of loopback
TIMEOUT_S = 3600.0


@dataclass(frozen=True)
class Case:
    """What is trained. p = 0 is DiLoCo, and without H it is DDP."""

    workers: int
    sync_every: int | None = None
    mix_prob: float | None = None

    @property
    def name(self) -> str:
        if self.sync_every is None:
            return f"k{self.workers}-ddp"
        return f"k{self.workers}-h{self.sync_every}-p{self.mix_prob:g}"

    @property
    def method(self) -> str:
        if self.sync_every is None:
            return "ddp"
        return "palsgd" if self.mix_prob else "diloco"

    @property
    def fields(self) -> Record:
        """As a run and a row have them."""
        return {"case": self.name, "workers": self.workers, "method": self.method,
                "sync_every": self.sync_every, "mix_prob": self.mix_prob}  # fmt: skip

    def settings(self, stated: Record, seed: int) -> Settings:
        """The recipe's, but for what is given here. Nothing is saved on the way: a run is done
        anew, not resumed."""
        given = stated | self.fields | {"seed": seed, "checkpoint_every": 10**6}
        others = ("rate", "case")  # of the link, and of this benchmark
        known = {name: value for name, value in given.items() if name not in others}
        changes = {name: value for name, value in known.items() if value is not None}
        return workloads.recipe(stated["workload"]).changed(changes)


CASES = (  # at K = 2 a cross: every p at the middle H, and every H at two of the p
    Case(2),
    *(Case(2, h, p) for h in INTERVALS for p in PROBABILITIES if h == 32 or p in (0.0, 0.1)),
    Case(4),
    Case(4, 32, 0.0),
    Case(4, 32, 0.1),
)
TINY_CASES = (Case(2), Case(2, 4, 0.0), Case(2, 4, 0.5))


# -- a worker --------------------------------------------------------------------------------------


def work(order: Path) -> None:
    """In each worker: the runs one after another. Worker 0 adds each to the record when it is done,
    as starting processes anew for every run would take a third of the time."""
    wanted = json.loads(order.read_text())
    record = Path(wanted["record"])
    # The models on which gradient steps are timed without exchanges are never synced.
    warnings.filterwarnings("ignore", message="the last .* steps of worker")
    dist.init_process_group("gloo")
    for name, seed in wanted["runs"]:
        if dist.get_rank() == 0:
            print(f"{name}, seed {seed}", file=sys.stderr, flush=True)
        case = next(each for each in (*CASES, *TINY_CASES) if each.name == name)
        run = trained(case, seed, wanted["stated"], order.parent)
        if dist.get_rank() == 0:
            add(run, record)
        dist.barrier()
    dist.destroy_process_group()


def trained(case: Case, seed: int, stated: Record, folder: Path) -> Record:
    """One run over the links. One that diverges has no loss, and so misses the target."""
    settings, load = case.settings(stated, seed), os.getloadavg()[0]
    place = folder / f"{case.name}-{seed}"
    job = {"runs": {case.name: settings.as_dict()}, "out": str(place), "data": None,
           "device": "cpu", "quiet": True, "command": sys.argv}  # fmt: skip
    measured = worker_main.measured(job)["methods"][case.name]
    head = case.fields | {"seed": seed, "load": load}
    if measured is None:
        return head | {"loss": None, "step_s": None, "lines": []}
    return head | figures(read_run(place / case.name), measured, stated)


def figures(run: Run, measured: Record, stated: Record) -> Record:
    """The evaluations of a run with its own seconds and the model's, and the means over workers of
    what it counted."""
    kept = ("gradient_steps", "syncs", "bytes_sent", "kernel_bytes", "wall_s", "compute_s")
    lines = projected(run, measured, stated["rate"])
    return {
        "loss": lines[-1]["loss"],
        "step_s": local_step_s(run.lines, run.config["warmup_steps"]),
        **{name: measured[name] for name in kept},
        "lines": lines,
    }


def projected(run: Run, measured: Record, rate: str | None) -> list[Line]:
    """The evaluations, with the seconds that the lab projects until each."""
    mixings = measured["steps"] - measured["gradient_steps"]
    pace = projected_pace(
        run.config,
        rate or NO_LIMIT,
        step_s=[measured["compute_s"]],
        all_reduce="gloo",
        mix=measured["mixing_s"] / mixings if mixings else 0.0,
    )
    kept = ("step", "gradient_steps", "time_s", "loss")
    return [
        {name: line[name] for name in kept} | {"projected_s": pace.seconds(line["step"])}
        for line in run.evaluations
    ]


def local_step_s(lines: Sequence[Line], warmup: int) -> float:
    """The seconds of a step from the end of the warm-up on; of DDP those of the same steps."""
    steps, times = ([line[name] for line in lines] for name in ("step", "time_s"))
    return (times[-1] - float(np.interp(warmup, steps, times))) / (steps[-1] - warmup)


# -- the record ------------------------------------------------------------------------------------


def opened(out: Path, stated: Record, head: Record) -> Record:
    """The record that is there, or a new one."""
    if not out.is_file():
        return head | {"stated": stated, "runs": []}
    try:
        found = json.loads(out.read_text())
        before = found["stated"]
    except (ValueError, KeyError, TypeError):
        sys.exit(f"{out} is no record of this benchmark; use another --out")
    if before != stated:
        others = {name: before.get(name) for name in stated if before.get(name) != stated[name]}
        words = ", ".join(f"{name}={value}" for name, value in others.items())
        sys.exit(f"{out} has runs with {words}; use another --out")
    return found


def add(run: Record, out: Path) -> None:
    record = json.loads(out.read_text())
    record["runs"].append(run | {"commit": record["commit"]})
    save(renewed(record), out)


def renewed(record: Record) -> Record:
    """With what follows from the runs."""
    return record | {
        "rows": rows(record["runs"], record["stated"]["margin"]),
        "untimed": {
            f"{run['case']}, seed {run['seed']}": [run["loss"], run["gradient_steps"], run["syncs"]]
            for run in record["runs"]
            if run["lines"]
        },
    }


def launch(workers: int, order: Record, folder: Path) -> None:
    """Processes that do what is ordered, over loopback if the links have no rate."""
    path = folder / "order.json"
    path.write_text(json.dumps(order))
    command, rate = [sys.executable, __file__, "--work", str(path)], order["stated"]["rate"]
    if rate is None:
        run_on_loopback(command, workers, timeout=TIMEOUT_S, echo=True)
        return
    with Network(workers, Link(rate)) as network:
        network.run(command, timeout=TIMEOUT_S, echo=True)


def measure(cases: Sequence[Case], seed: int, out: Path, head: Record) -> None:
    """The runs of a seed that the record lacks, those of equally many workers in one go. The head
    of a record is of the last command that ran something."""
    record = json.loads(out.read_text())
    done = {(run["case"], run["seed"]) for run in record["runs"]}
    lacking = [case for case in cases if (case.name, seed) not in done]
    for workers in dict.fromkeys(case.workers for case in lacking):
        runs = [(case.name, seed) for case in lacking if case.workers == workers]
        save(json.loads(out.read_text()) | head, out)
        order = {"record": str(out.resolve()), "stated": record["stated"], "runs": runs}
        with tempfile.TemporaryDirectory() as folder:
            launch(workers, order, Path(folder))


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    names = [case.name for case in CASES]
    parser.add_argument("--only", nargs="+", choices=names, default=names, metavar="CASE",
                        help=f"of {', '.join(names)}")  # fmt: skip
    parser.add_argument("--seeds", type=int, default=SEEDS)
    parser.add_argument("--rate", help=f"of the links, each way; default: {STATED['rate']}")
    parser.add_argument("--work", type=Path, help=argparse.SUPPRESS)
    add_record_options(parser)
    args = parser.parse_args()
    if args.tiny and args.rate is not None:
        parser.error("--tiny does without links, and takes no --rate")
    args.rate = args.rate or STATED["rate"]
    try:
        Link(args.rate)
    except ValueError as error:
        parser.error(f"--rate: {error}")
    if not args.work and not args.tiny and (reason := unavailable()):
        sys.exit(f"no emulated links here: {reason}")
    return args


def main() -> None:
    args = arguments()
    if args.work:
        work(args.work)
        return
    head = provenance("cpu", tiny=args.tiny)
    stated, seeds = (TINY, 1) if args.tiny else (STATED | {"rate": args.rate}, args.seeds)
    cases = TINY_CASES if args.tiny else [case for case in CASES if case.name in args.only]
    with tempfile.TemporaryDirectory() as folder:
        out = args.out or Path(folder) / "record.json"
        save(renewed(opened(out, stated, head)), out)
        for seed in range(FIRST_SEED, FIRST_SEED + seeds):
            measure(cases, seed, out, head)
        record = json.loads(out.read_text())
    print(markdown(COLUMNS, [cells(row) for row in record["rows"]]))
    print(summary(record))


if __name__ == "__main__":
    main()

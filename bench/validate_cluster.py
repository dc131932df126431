"""The cluster model against real processes over emulated links.

    sudo python bench/validate_cluster.py                 # about six minutes on two cores
    sudo python bench/validate_cluster.py --only 4        # networks with four workers

Workers are processes in network namespaces behind links of a given rate and latency, with torch's
gloo and palsgd's own optimizers. A gradient is a sleep, in the forward pass and layer by layer in
the backward pass, as two cores cannot compute for eight workers at once: it stands for a device
that leaves its host's cores alone. What the prediction knows was measured without a link: the step
time, and what a sync takes over loopback; the rest is nominal rate, latency and the model's size.
Every round counts. The record has the load of the machine, its own processes included.
Where links cannot be emulated, --tiny has its two workers meet over loopback.
"""

import argparse
import dataclasses
import json
import os
import statistics
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from common import add_record_options, provenance, save, summary
from torch import Tensor, nn

import palsgd
from palsgd.cluster import Cluster, TimeSimulation, Work
from palsgd.cluster.gradient_counts import Planned
from palsgd.events import Averaged, Synced
from palsgd.lab.links import Link, Network, unavailable
from palsgd.lab.links.processes import run_on_loopback

LAYERS, WIDTH = 8, 131_072  # a million parameters
FORWARD, BACKWARD = 0.010, 0.020  # seconds of a gradient
SEED = 7
now = time.perf_counter

Job = dict[str, Any]

METHODS: dict[str, Job] = {
    "ddp": {"rounds": 8},
    "diloco H=4": {"H": 4, "rounds": 7},
    "diloco H=16": {"H": 16, "rounds": 6},
    "palsgd H=16 p=0.1": {"H": 16, "p": 0.1, "rounds": 6},
    "palsgd H=32 p=0.25": {"H": 32, "p": 0.25, "rounds": 5},
    "palsgd H=16 p=0.1 delay=8": {"H": 16, "p": 0.1, "delay": 8, "rounds": 7},
    "palsgd H=16 p=0.1 int8": {"H": 16, "p": 0.1, "compress": "int8", "rounds": 6},
    "palsgd H=16 p=0.1 fragments=4": {"H": 16, "p": 0.1, "fragments": 4, "rounds": 6},
}

NETWORKS: list[tuple[int, str, float, tuple[str, ...]]] = [
    (2, "100mbit", 0.0, ("ddp", "diloco H=16", "palsgd H=16 p=0.1")),
    (2, "50mbit", 20.0, ("ddp", "diloco H=4", "palsgd H=32 p=0.25", "palsgd H=16 p=0.1 delay=8")),
    (3, "20mbit", 50.0, ("diloco H=16", "palsgd H=16 p=0.1 int8")),
    (4, "100mbit", 5.0, ("ddp", "diloco H=16", "palsgd H=16 p=0.1 delay=8",
                         "palsgd H=16 p=0.1 fragments=4")),
    (4, "50mbit", 0.0, ("ddp", "palsgd H=16 p=0.1", "palsgd H=16 p=0.1 int8")),
    (4, "20mbit", 20.0, ("diloco H=4", "palsgd H=32 p=0.25")),
    (6, "50mbit", 10.0, ("ddp", "diloco H=16", "palsgd H=16 p=0.1 delay=8")),
]  # fmt: skip
TINY_NETWORKS = [(2, "100mbit", 0.0, ("diloco H=4", "palsgd H=16 p=0.1 delay=8"))]


# -- a worker ------------------------------------------------------------------------------------


class Slow(torch.autograd.Function):
    """A layer that takes its time in both passes."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(weight)
        time.sleep(FORWARD / LAYERS)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        time.sleep(BACKWARD / LAYERS)
        return grad, torch.full_like(ctx.saved_tensors[0], 1e-3)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ParameterList(torch.zeros(WIDTH) for _ in range(LAYERS))

    def forward(self, x: Tensor) -> Tensor:
        for weight in self.layers:
            x = Slow.apply(x, weight)
        return x.sum()


def optimizer(job: Job, alone: bool = False) -> tuple[nn.Module, palsgd.LocalOptimizer]:
    model: nn.Module = Net()
    more: dict[str, Any] = {"transport": palsgd.Alone()} if alone else {}
    if "H" not in job:
        model = model if alone else nn.parallel.DistributedDataParallel(model)
        return model, palsgd.DDP(model, torch.optim.SGD(model.parameters(), 0.01), **more)
    inner = torch.optim.SGD(model.parameters(), 0.01)
    more |= {name: job[name] for name in ("delay", "compress", "fragments") if name in job}
    return model, palsgd.PALSGD(
        model, inner, sync_every=job["H"], mix_prob=job.get("p", 0.0), mix_rate=0.1, seed=SEED,
        same_data=True, **more,
    )  # fmt: skip


def steps_of(job: Job) -> int:
    return job["rounds"] * job.get("H", 1)


def work(names: list[str]) -> None:
    """Run the methods one after another; worker 0 prints when its exchanges were over."""
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo")
    found = {}
    for name in names:
        job = METHODS[name]
        model, opt = optimizer(job)
        torch.distributed.barrier()
        arrivals: list[tuple[int, float]] = []
        for event in (Averaged, Synced):
            opt.on(event, lambda event, to=arrivals: to.append((event.clock, now())))
        x = torch.ones(1, requires_grad=True)
        iterations, began = [], now()
        for batch in palsgd.until([x] * 1000, opt, steps=steps_of(job)):
            start, exchanges = now(), len(arrivals)
            model(batch).backward()
            opt.step()
            opt.zero_grad()
            iterations.append((len(arrivals) > exchanges, now() - start))
        found[name] = {
            "arrivals": [(at, then - began) for at, then in arrivals],
            "iterations": iterations,
        }
    if torch.distributed.get_rank() == 0:
        print(json.dumps(found))
    torch.distributed.destroy_process_group()


# -- measuring and predicting --------------------------------------------------------------------


def measured(workers: int, link: Link, names: tuple[str, ...]) -> dict[str, Any]:
    command = [sys.executable, __file__, "--work", ",".join(names)]
    if unavailable():  # only --tiny comes this far then
        return json.loads(run_on_loopback(command, workers, timeout=400)[0].stdout)
    paths = f"{Path(palsgd.__file__).parent.parent}:{Path(__file__).parent}"
    with Network(workers=workers, link=link) as network:
        done = network.run(command, env={"PYTHONPATH": paths}, timeout=400)
    return json.loads(done[0].stdout)


def round_s(job: Job, arrivals: list[tuple[int, float]]) -> float:
    """The mean time of a round, or step of DDP, from the first exchange, which opens connections,
    to the end of training. All rounds count, and so does the last sync, which nothing hides."""
    (first, began), (last, ended) = min(arrivals), max(arrivals)
    return (ended - began) / (last - first) * job.get("H", 1)


def predicted(workers: int, link: Link, name: str, alone: Any) -> list[tuple[int, float]]:
    """When exchanges are over, by the model; `alone` is what was measured over loopback."""
    job = METHODS[name]
    _, opt = optimizer(job, alone=True)
    step, sync = _without_link(job, alone)
    cluster = Cluster(
        workers=workers, step=step, sync=sync, rate=link.rate or "1000gbit",
        latency=link.delay_ms / 1e3, all_reduce="gloo", overlap=BACKWARD / (FORWARD + BACKWARD),
    )  # fmt: skip
    counts = Planned(opt.method, dataclasses.replace(opt.facts, workers=workers))
    machine = TimeSimulation(cluster, Work.of(opt), end=steps_of(job), counts=counts)
    machine.run_until(steps_of(job))
    return list(zip(machine.projection.clocks, machine.projection.times, strict=True))


def _without_link(job: Job, alone: Any) -> tuple[float, float]:
    """Seconds of a step and of a sync, the medians. DDP's step over loopback is all it does."""
    plain = [took for synced, took in alone["iterations"] if not synced]
    with_sync = [took for synced, took in alone["iterations"] if synced]
    if "H" not in job:
        return statistics.median(with_sync[1:]), 0.0
    step = statistics.median(plain)
    return step, max(0.0, statistics.median(with_sync) - step)


def rows(networks: list[tuple[int, str, float, tuple[str, ...]]]) -> Iterator[dict[str, Any]]:
    alone: dict[int, Any] = {}
    for workers, rate, delay, names in networks:
        if workers not in alone:
            every = {n for k, _, _, found in networks if k == workers for n in found}
            alone[workers] = measured(workers, Link(), tuple(sorted(every)))
        link = Link(rate=rate, delay_ms=delay)
        found = measured(workers, link, names)
        for name in names:
            job = METHODS[name]
            model = predicted(workers, link, name, alone[workers][name])
            real = round_s(job, [(at, then) for at, then in found[name]["arrivals"]])
            guess = round_s(job, model)
            yield {
                "workers": workers, "rate": rate, "latency_ms": delay, "method": name,
                "measured_s": real, "predicted_s": guess, "error": guess / real - 1,
                "exchanges": len(model), "load": os.getloadavg()[0],
                "same_clocks": [at for at, _ in found[name]["arrivals"]] == [at for at, _ in model],
            }  # fmt: skip


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--only", type=int, help="networks with so many workers")
    parser.add_argument("--work", help=argparse.SUPPRESS)
    add_record_options(parser)
    args = parser.parse_args()
    if not args.work and not args.tiny and (reason := unavailable()):
        sys.exit(f"no emulated links here: {reason}")
    return args


def main() -> None:
    args = arguments()
    if args.work:
        work(args.work.split(","))
        return
    networks = TINY_NETWORKS if args.tiny else NETWORKS
    record: dict[str, Any] = provenance("cpu", tiny=args.tiny) | {"rows": [], "untimed": {}}
    print("| K | rate | latency | method | measured | predicted | error |")
    print("|---|---|---|---|---|---|---|")
    for row in rows([each for each in networks if args.only in (None, each[0])]):
        record["rows"].append(row)
        record |= judged(record["rows"])
        print(
            f"| {row['workers']} | {row['rate']} | {row['latency_ms']:g} ms | {row['method']} | "
            f"{row['measured_s']:.3f} s | {row['predicted_s']:.3f} s | {row['error']:+.1%} |",
            flush=True,
        )
        save(record, args.out)
    count, median, worst = len(record["rows"]), record["median"], record["worst"]
    load = f"{record['least_load']:.1f} to {record['most_load']:.1f}"
    print(
        f"\n{count} combinations: median error {median:.1%}, worst {worst:.1%}, "
        f"with the machine at loads of {load}"
    )
    print(summary(record))


def judged(found: list[dict[str, Any]]) -> dict[str, Any]:
    errors = [abs(row["error"]) for row in found]
    return {
        "median": statistics.median(errors),
        "worst": max(errors),
        "least_load": min(row["load"] for row in found),
        "most_load": max(row["load"] for row in found),
        "untimed": {
            "exchanges": [row["exchanges"] for row in found],
            "at the predicted points of the clock": all(row["same_clocks"] for row in found),
        },
    }


if __name__ == "__main__":
    main()

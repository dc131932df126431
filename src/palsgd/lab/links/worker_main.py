"""What each worker of `palsgd bench link` does.

The command is `python -m palsgd.lab.links.worker_main JOBS RESULTS`. JOBS is a file with the
settings of the runs. Worker 0 writes the file RESULTS.
"""

import json
import os
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from palsgd.errors import NonFiniteError
from palsgd.lab.device import wait_for, worker_device
from palsgd.lab.factory import build_optimizer
from palsgd.lab.methods import plain_local
from palsgd.lab.run_folder import RunFolder, write_json
from palsgd.lab.settings import Settings
from palsgd.lab.trainer import Trainer
from palsgd.lab.workload import Workload
from palsgd.lab.workloads import data_settings, load
from palsgd.transports.json_exchange import gathered

# steps of a model without exchanges, to measure a gradient; the first fifth is not counted
COMPUTE_STEPS = 10
_RING_S, _MOST_RINGS = 5.0, 9  # how long, and how often, the bare all-reduce is repeated


class WatchedTrainer(Trainer):
    """A trainer that also counts the bytes that this worker's interface sends during training
    seconds."""

    kernel_bytes = 0
    _counted_from = 0

    def _pause(self) -> None:
        super()._pause()
        # Packets that are queued in the kernel are sent before the barrier's own messages.
        dist.barrier()
        self.kernel_bytes += interface_bytes() - self._counted_from

    def _go_on(self) -> None:
        super()._go_on()
        self._counted_from = interface_bytes()


def interface_bytes() -> int:
    """Sent so far by the interface that gloo uses, as the kernel counts them."""
    wanted = os.environ["GLOO_SOCKET_IFNAME"]
    for line in Path("/proc/self/net/dev").read_text().splitlines():
        name, _, counters = line.partition(":")
        if name.strip() == wanted:
            return int(counters.split()[8])
    return 0


def main() -> None:
    jobs = json.loads(Path(sys.argv[1]).read_text())
    dist.init_process_group("gloo")
    try:
        found = measured(jobs)
        if dist.get_rank() == 0:
            write_json(Path(sys.argv[2]), found)
        dist.barrier()
    finally:
        dist.destroy_process_group()


def measured(jobs: dict[str, Any]) -> dict[str, Any]:
    runs = {name: Settings.from_dict(settings) for name, settings in jobs["runs"].items()}
    first = next(iter(runs.values()))
    device = worker_device(jobs["device"], dist.get_rank())  # gloo carries what is sent
    workload = load(first.workload, data=jobs["data"], device=device, **data_settings(first))
    model_bytes = 4 * sum(p.numel() for p in workload.model().parameters())
    ring = {"bytes": model_bytes, "seconds": ring_seconds(model_bytes)}
    methods, compute = {}, [_mean(compute_seconds(first, workload))]
    for name, settings in runs.items():
        folder = RunFolder(Path(jobs["out"]) / name)
        run = _trained(settings, workload, folder, jobs)
        compute.append(_mean(compute_seconds(first, workload)))
        methods[name] = run and run | {"compute_s": statistics.fmean(compute[-2:])}
    return {
        "ring": ring,
        "compute_s": statistics.fmean(compute),
        "congestion_control": _congestion_control(),
        "methods": methods,
    }


def _congestion_control() -> str | None:
    """TCP's, on which lossy and long links depend."""
    path = Path("/proc/sys/net/ipv4/tcp_congestion_control")
    return path.read_text().strip() if path.exists() else None


# -- the parts -----------------------------------------------------------------------------------


def ring_seconds(size: int) -> list[float]:
    """The seconds of all-reduces alone, each until the last worker has its result. The first is
    left out, as connections are made in it."""
    values, times = torch.zeros(size // 4), []
    for _ in range(1 + _MOST_RINGS):
        dist.barrier()
        began = time.perf_counter()
        dist.all_reduce(values)
        times.append(max(gathered(time.perf_counter() - began)))
        if len(times) > 1 and sum(times[1:]) > _RING_S:
            break
    return times[1:]


def compute_seconds(settings: Settings, workload: Workload) -> float:
    """The seconds of a gradient and its step while the other workers compute too and no worker
    sends. The further time of a run is the cost of exchanges. It is measured before and after each
    run, as other programs may start and end."""
    torch.manual_seed(settings.seed)
    net = workload.model().to(workload.device)
    local = {"method": plain_local().name, "compress": None, "delay": 0, "fragments": 1}
    never = settings.changed(local | {"sync_every": 10**6, "warmup_steps": 0})
    never = never.in_steps(workload.examples)
    opt = build_optimizer(never, COMPUTE_STEPS, net)
    for step in range(COMPUTE_STEPS):
        if step == COMPUTE_STEPS // 5:
            dist.barrier()
            wait_for(workload.device)
            began = time.perf_counter()
        batch = workload.batch(
            worker=dist.get_rank(), workers=dist.get_world_size(), size=settings.batch_size,
            index=step,
        )  # fmt: skip
        workload.loss(net, batch).backward()
        opt.step()
        opt.zero_grad()
    wait_for(workload.device)
    return (time.perf_counter() - began) / (COMPUTE_STEPS - COMPUTE_STEPS // 5)


def _trained(
    settings: Settings, workload: Workload, folder: RunFolder, jobs: dict[str, Any]
) -> dict[str, Any] | None:
    """One run, with the lab's own files; figures are means over workers. None: it diverged."""
    trainer = WatchedTrainer(
        settings, workload, folder, quiet=jobs["quiet"], command=jobs["command"]
    )
    try:
        trainer.train()
    except NonFiniteError as error:  # all ranks raise it, so all go on with the next run
        if dist.get_rank() == 0:
            folder.write_failure(error)
        return None
    ledger = trainer.opt.ledger
    mine = {"wall_s": trainer._seconds, "kernel_bytes": trainer.kernel_bytes} | {
        name: getattr(ledger, name)
        for name in ("gradient_steps", "syncs", "messages", "bytes_sent", "bytes_on_the_wire",
                     "gradient_s", "mixing_s", "sync_s", "waiting_s")
    }  # fmt: skip
    everyone = gathered(mine)
    means = {name: statistics.fmean(each[name] for each in everyone) for name in mine}
    return {"steps": trainer.opt.clock} | means


def _mean(mine: float) -> float:
    return statistics.fmean(gathered(mine))


if __name__ == "__main__":
    main()

"""Seconds per step of all contenders, in blocks that take turns in one process group.

One worker: python pace.py '{"contenders": ..., "blocks": ..., "out": ...}'. A block is a round of a
local method, or a few steps of DDP. Rounds are timed from the step at which nothing is under way to
the next such step, so that every block has one whole exchange, overlapped or not, and leaves none
to its successor. The order moves on with every block; the first is not counted.
"""

import gc
import importlib
import json
import os
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from task import SIZES, Task
from trainee import Trainee


def main() -> None:
    order = json.loads(sys.argv[1])
    sys.path.append(order["peers"])  # behind this environment's own packages
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    gc.disable()  # a collection in one worker would be waited for by all
    size = SIZES[order["size"]]
    task = Task(size, (order["blocks"] + 3) * size.sync_every)
    trainees = {name: build(each, task) for name, each in order["contenders"].items()}
    found: dict[str, dict] = {
        name: {"step_s": [], "bytes_per_step": [], "gradient_share": []} for name in trainees
    }
    for number in range(order["blocks"] + 1):
        names = list(trainees)
        turn = number % len(names)
        for name in names[turn:] + names[:turn]:
            steps = order["contenders"][name]["block_steps"]
            block = timed(trainees[name], steps, number)
            for key, value in block.items() if number else ():
                found[name][key].append(value)
    for name, trainee in trainees.items():
        found[name]["norm"] = norm(trainee)
        trainee.close()
    Path(order["out"], f"{dist.get_rank()}.json").write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


def build(order: dict, task: Task) -> Trainee:
    module, name = order["adapter"].split(".")
    return getattr(importlib.import_module(module), name)(task, **order["settings"])


def timed(trainee: Trainee, steps: int, number: int) -> dict:
    worker, counted = dist.get_rank(), trainee.gradient_steps
    dist.barrier()
    sent, start = bytes_sent(), time.perf_counter()
    while trainee.clock < steps * (number + 1) + trainee.delay:
        trainee.step(worker)
    elapsed = time.perf_counter() - start
    dist.barrier()
    return {
        "step_s": elapsed / steps,
        "bytes_per_step": (bytes_sent() - sent) / steps,
        "gradient_share": (trainee.gradient_steps - counted) / steps,
    }


def norm(trainee: Trainee) -> float:
    """Of the global model, by which contenders that run one algorithm can be told to."""
    with trainee.global_model() as model:
        return sum(p.detach().double().square().sum().item() for p in model.parameters()) ** 0.5


def bytes_sent() -> float:
    """By this worker, as the kernel counted; workers on loopback share one counter."""
    interface = os.environ["GLOO_SOCKET_IFNAME"]
    for line in Path("/proc/self/net/dev").read_text().splitlines():
        name, _, counts = line.partition(":")
        if name.strip() == interface:
            sent = int(counts.split()[8])
            return sent / dist.get_world_size() if interface == "lo" else sent
    raise ValueError(f"no interface {interface} in /proc/self/net/dev")


if __name__ == "__main__":
    try:
        main()
    except Exception as error:
        # the last words on stderr are what the table will say; peers' threads must not add to them
        print(f"{type(error).__name__}: {error}", file=sys.stderr, flush=True)
        os._exit(1)

"""One worker of one run: python worker.py '{"contender": ..., "mode": ..., "out": ...}'.

In `quality` mode it trains to the end and evaluates the global model as it goes; in `pace` mode it
times a few rounds. Its findings go to OUT/RANK.json.
"""

import gc
import importlib
import json
import os
import resource
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from task import SIZES, Task
from trainee import Trainee


def build(order: dict, task: Task) -> Trainee:
    module, name = order["class"].split(".")
    return getattr(importlib.import_module(module), name)(task, **order["settings"])


def quality(order: dict, task: Task) -> dict:
    """Loss of the global model after each round of the second half; peak memory."""
    worker = dist.get_rank()
    before = peak_bytes()
    trainee = build(order, task)
    curve, memory, start, evaluating = [], 0, time.perf_counter(), 0.0
    while trainee.clock < task.steps:
        trainee.step(worker)
        if trainee.round_ended() and 2 * trainee.clock >= task.steps:
            memory = memory or peak_bytes()  # before the first evaluation, which takes more
            paused = time.perf_counter()
            curve.append((trainee.clock, held_out_loss(trainee, task)))
            evaluating += time.perf_counter() - paused
    elapsed = time.perf_counter() - start - evaluating
    elements = sum(p.numel() for p in trainee.net.parameters())
    gradient_steps = trainee.gradient_steps
    trainee.close()
    return {
        "parameters": elements,
        "curve": curve,
        "gradient_steps": gradient_steps,
        "seconds": elapsed,
        "peak_bytes": memory - before,
        "peak_models": (memory - before) / (4 * elements),
    }


def held_out_loss(trainee: Trainee, task: Task) -> float:
    """Each worker takes its part of the held-out stories."""
    with trainee.global_model() as model:
        totals = task.totals(model, part=dist.get_rank(), parts=dist.get_world_size())
    dist.all_reduce(totals)
    return task.score(totals)[0]


def pace(order: dict, task: Task) -> dict:
    """Seconds of each round after the first; beside them, of bare AdamW in the same processes.

    The bare steps are taken before and after, by all workers at the same time, so that they share
    the cores as the rounds do and a slow minute slows both.
    """
    worker, length, rounds = dist.get_rank(), order["round_steps"], order["rounds"]
    alone, trainee = Trainee(task), build(order, task)
    bare = time_steps(alone, worker, order["bare_steps"])
    seconds, gradients = [], []
    for number in range(rounds + 1):
        counted = trainee.gradient_steps
        if number == 1:
            dist.barrier()
            sent = bytes_sent()
        start = time.perf_counter()
        while trainee.clock < length * (number + 1):
            trainee.step(worker)
        if number:
            seconds.append(time.perf_counter() - start)
            gradients.append(trainee.gradient_steps - counted)
    dist.barrier()
    sent = bytes_sent() - sent
    while trainee.clock < task.steps:  # to the end, where nothing is under way any more
        trainee.step(worker)
    bare += time_steps(alone, worker, order["bare_steps"])
    trainee.close()
    return {
        "round_s": seconds,
        "gradient_steps": gradients,
        "bare_step_s": bare / (2 * order["bare_steps"]),
        "bytes_per_round": sent / rounds,
    }


def time_steps(trainee: Trainee, worker: int, steps: int) -> float:
    trainee.step(worker)
    dist.barrier()
    start = time.perf_counter()
    for _ in range(steps):
        trainee.step(worker)
    return time.perf_counter() - start


def bytes_sent() -> float:
    """By this worker, as the kernel counted; workers on loopback share one counter."""
    interface = os.environ["GLOO_SOCKET_IFNAME"]
    for line in Path("/proc/self/net/dev").read_text().splitlines():
        name, _, counts = line.partition(":")
        if name.strip() == interface:
            sent = int(counts.split()[8])
            return sent / dist.get_world_size() if interface == "lo" else sent
    raise ValueError(f"no interface {interface} in /proc/self/net/dev")


def peak_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def main() -> None:
    order = json.loads(sys.argv[1])
    sys.path.append(order["peers"])  # behind this environment's own packages
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    gc.disable()  # a collection in one worker would be waited for by all
    task = Task(SIZES[order["size"]], order["steps"], order.get("pause_s", 0.0))
    found = {"quality": quality, "pace": pace}[order["mode"]](order, task)
    Path(order["out"], f"{dist.get_rank()}.json").write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    try:
        main()
    except Exception as error:
        # the last words on stderr are what the table will say; peers' threads must not add to them
        print(f"{type(error).__name__}: {error}", file=sys.stderr, flush=True)
        os._exit(1)

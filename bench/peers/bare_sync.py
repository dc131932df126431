"""A bare sync of a model of about a million parameters, again and again."""

import json
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from task import SIZES, Task

import palsgd


def main() -> None:
    order = json.loads(sys.argv[1])
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    net = Task(SIZES[order["size"]], 0).model()
    opt = palsgd.LocalSGD(net, torch.optim.SGD(net.parameters(), lr=1e-3), sync_every=1,
                          same_data=True)  # fmt: skip
    for p in net.parameters():
        p.grad = torch.zeros_like(p)
    seconds = []
    for _ in range(order["syncs"] + 1):
        dist.barrier()
        start = time.perf_counter()
        opt.step()
        seconds.append(time.perf_counter() - start)
    found = {"sync_s": seconds[1:], "bytes": opt.ledger.history[-1]["bytes_sent"]}
    Path(order["out"], f"{dist.get_rank()}.json").write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

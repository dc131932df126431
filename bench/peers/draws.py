"""Waiting at syncs under balanced and under independent draws, in real processes.

A gradient step is a sleep of fixed length, so that eight workers on fewer cores wait for each
other's coins and for nothing else. What they waited is in the ledger.
"""

import json
import statistics
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from task import SEED
from torch import nn

import palsgd


def main() -> None:
    order = json.loads(sys.argv[1])
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    net = nn.Linear(4, 4)
    opt = palsgd.PALSGD(
        net,
        torch.optim.SGD(net.parameters(), lr=0.01),
        sync_every=order["sync_every"],
        mix_prob=order["mix_prob"],
        mix_rate=0.1,
        draws=order["draws"],
        seed=SEED,
        same_data=True,  # the gradients are all alike, and that is meant
    )
    steps, start = order["rounds"] * order["sync_every"], time.perf_counter()
    for _ in palsgd.until([None], opt, steps=steps):
        time.sleep(order["gradient_s"])
        net(torch.ones(1, 4)).sum().backward()
        opt.step()
        opt.zero_grad()
    elapsed = time.perf_counter() - start
    # the first round opens connections; the last sync's waiting is not known yet
    waited = [entry["waiting_s"] for entry in opt.ledger.history[1:-1]]
    found = {
        "round_s": elapsed / order["rounds"],
        "waiting_s": statistics.fmean(waited),
        "gradient_steps": opt.gradient_steps,
    }
    Path(order["out"], f"{dist.get_rank()}.json").write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

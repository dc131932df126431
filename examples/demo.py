"""Four methods, real processes, real data, one table: what `make demo` shows.

Each method trains the same small network on scikit-learn's handwritten digits with the same
seeds and the same number of steps, in worker processes of its own that talk over loopback.
"""

import argparse
import json
import os
import signal
import sys
import tempfile
import time
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import palsgd

METHODS = {
    "DDP": palsgd.DDP,
    "Local SGD": partial(palsgd.LocalSGD, sync_every=32, warmup_steps=40),
    "DiLoCo": partial(palsgd.DiLoCo, sync_every=32, warmup_steps=40, outer=palsgd.nesterov(lr=0.2)),
    "PALSGD": partial(
        palsgd.PALSGD,
        sync_every=32,
        warmup_steps=40,
        mix_prob=0.1,
        mix_rate=4.0,
        outer=palsgd.nesterov(lr=0.2),
        seed=2023,
    ),
}
COLUMNS = ("method", "test loss", "accuracy", "syncs", "gradients", "MB sent", "seconds")


def train_all(workers: int, steps: int, folder: str) -> None:
    """Run the worker processes to their end, or stop them all on Ctrl-C."""
    processes = mp.spawn(worker, (workers, steps, folder), nprocs=workers, join=False)
    try:
        while not processes.join():
            pass
    except KeyboardInterrupt:
        for process in processes.processes:
            process.terminate()
        sys.exit("demo: stopped; it keeps nothing, so start it again with make demo")


def worker(rank: int, workers: int, steps: int, folder: str) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent decides
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    store = dist.FileStore(f"{folder}/store", workers)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=workers)
    rows = [run(name, steps) for name in METHODS]
    if rank == 0:
        Path(folder, "rows.json").write_text(json.dumps(rows))
    dist.destroy_process_group()


def run(name: str, steps: int) -> list[str]:
    train, test = digits()
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))
    model = DistributedDataParallel(net)
    opt = METHODS[name](model, torch.optim.AdamW(model.parameters(), lr=2e-3))
    start = time.perf_counter()
    for batch, target in palsgd.until(batches(*train), opt, steps=steps):
        nn.functional.cross_entropy(model(batch), target).backward()
        opt.step()
        opt.zero_grad()
    seconds = time.perf_counter() - start
    with opt.anchor_weights(), torch.no_grad():
        logits = net(test[0])
        loss = nn.functional.cross_entropy(logits, test[1])
        accuracy = (logits.argmax(1) == test[1]).float().mean()
    ledger = opt.ledger
    figures = (f"{loss:.4f}", f"{accuracy:.1%}", ledger.syncs, opt.gradient_steps)
    return [name, *map(str, figures), f"{ledger.bytes_sent / 1e6:.1f}", f"{seconds:.1f}"]


def digits() -> tuple[tuple[torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]:
    images, labels = load_digits(return_X_y=True)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    x, y = torch.tensor(images, dtype=torch.float32)[order] / 16, torch.tensor(labels)[order]
    return (x[:1437], y[:1437]), (x[1437:], y[1437:])


def batches(x: torch.Tensor, y: torch.Tensor, size: int = 32) -> list:
    """This worker's shard, shuffled."""
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(1))
    shard = order[dist.get_rank() :: dist.get_world_size()]
    return [(x[part], y[part]) for part in shard.split(size)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--steps", type=int, default=600)
    args = parser.parse_args()
    if args.workers < 1 or args.steps < 1:
        parser.error(f"--workers {args.workers} --steps {args.steps}: both must be at least 1")
    print(f"Training on handwritten digits: {args.workers} processes, {args.steps} steps each ...")
    with tempfile.TemporaryDirectory() as folder:
        train_all(args.workers, args.steps, folder)
        rows = json.loads(Path(folder, "rows.json").read_text())
    widths = [max(len(row[i]) for row in [COLUMNS, *rows]) for i in range(len(COLUMNS))]
    for row in [COLUMNS, ["-" * w for w in widths], *rows]:
        print("  ".join(cell.rjust(w) for cell, w in zip(row, widths, strict=True)))
    print("Sent per worker. A sync is one exchange between all workers; PALSGD's mixing steps")
    print("are steps without a gradient, which is why it computes fewer of them.")


if __name__ == "__main__":
    sys.exit(main())

r"""Nodes with several processes each, under torchrun. Every node is one worker: its processes
average every gradient over the fast links inside, and PALSGD trains between the nodes. On every
node:

    torchrun --nnodes 2 --nproc-per-node 2 --rdzv-backend c10d --rdzv-endpoint node0:29400 \
        examples/several_nodes.py model

node0 is the first node's name or address. The folder `model` gets the trained model.
"""

import argparse
import os
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import palsgd
from palsgd import interrupts, process_groups


def clouds(count: int) -> tuple[Tensor, Tensor]:
    """Points around ten centres, and the centre of each: the same in all processes."""
    random = torch.Generator().manual_seed(0)
    centres, labels = torch.randn(10, 64, generator=random), torch.arange(count) % 10
    return centres[labels] + 1.5 * torch.randn(count, 64, generator=random), labels


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", nargs="?", type=Path, default="model")
    parser.add_argument("--steps", type=int, default=600)
    args = parser.parse_args()

    interrupts.end_with_parent()  # workers of a launcher that is killed would train on
    device, backend = process_groups.device_and_backend()
    process_groups.join(backend, timeout_s=300)
    groups = palsgd.worker_groups(int(os.environ["LOCAL_WORLD_SIZE"]))
    inputs, labels = clouds(2000)
    dataset = TensorDataset(inputs[400:], labels[400:])
    # Every process has its own part of the data.
    loader = DataLoader(dataset, batch_size=16, sampler=DistributedSampler(dataset))

    torch.manual_seed(0)  # every worker starts from the same weights
    net = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10)).to(device)
    model = DistributedDataParallel(net, process_group=groups["inside"].get_group())
    inner = torch.optim.AdamW(model.parameters(), lr=1e-3)
    opt = palsgd.PALSGD(model, inner, sync_every=32, group=groups["workers"].get_group())
    for batch, target in palsgd.until(loader, opt, steps=args.steps):
        nn.functional.cross_entropy(model(batch.to(device)), target.to(device)).backward()
        opt.step()
        opt.zero_grad()

    palsgd.checkpoint.save_model(args.folder, opt)  # on every node
    with opt.anchor_weights(), torch.no_grad():
        accuracy = (net(inputs[:400].to(device)).argmax(1).cpu() == labels[:400]).float().mean()
    if dist.get_rank() == 0:
        workers, processes = groups["workers"].size(), groups["inside"].size()
        print(f"{workers} x {processes} processes, accuracy {accuracy:.3f}")
        print(opt.ledger)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

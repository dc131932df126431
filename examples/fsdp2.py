r"""A model that is cut into shards inside each node (FSDP2), and PALSGD between the nodes. On every
node:

    torchrun --nnodes 2 --nproc-per-node 8 --rdzv-backend c10d --rdzv-endpoint node0:29400 \
        examples/fsdp2.py model

or on one machine, as two workers of two processes:

    torchrun --nproc-per-node 4 examples/fsdp2.py model --ranks-per-worker 2
"""

import argparse
import os
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import palsgd
from palsgd import interrupts, process_groups


def clouds(count: int) -> tuple[Tensor, Tensor]:
    """Points around ten centres, and the centre of each: the same in all processes."""
    random = torch.Generator().manual_seed(0)
    centres, labels = torch.randn(10, 64, generator=random), torch.arange(count) % 10
    return centres[labels] + 1.5 * torch.randn(count, 64, generator=random), labels


class Block(nn.Sequential):
    """Two layers and a shortcut."""

    def __init__(self) -> None:
        super().__init__(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 64))

    def forward(self, x: Tensor) -> Tensor:
        return x + super().forward(x)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", nargs="?", type=Path, default="model")
    parser.add_argument("--steps", type=int, default=600)
    local = int(os.environ["LOCAL_WORLD_SIZE"])
    parser.add_argument("--ranks-per-worker", type=int, default=local)  # a node is a worker
    args = parser.parse_args()

    interrupts.end_with_parent()  # workers of a launcher that is killed would train on
    process_groups.join(process_groups.device_and_backend()[1], timeout_s=300)
    groups = palsgd.worker_groups(args.ranks_per_worker)
    device = groups.device_type  # gloo gathers shards on the CPU only
    inputs, labels = clouds(2000)
    dataset = TensorDataset(inputs[400:], labels[400:])
    loader = DataLoader(dataset, batch_size=16, sampler=DistributedSampler(dataset))

    torch.manual_seed(0)  # every worker starts from the same weights
    model = nn.Sequential(Block(), Block(), nn.Linear(64, 10)).to(device)
    for layer in model:
        fully_shard(layer, mesh=groups["inside"])
    fully_shard(model, mesh=groups["inside"])
    inner = torch.optim.AdamW(model.parameters(), lr=1e-3)
    opt = palsgd.PALSGD(model, inner, sync_every=32, group=groups["workers"].get_group())
    for batch, target in palsgd.until(loader, opt, steps=args.steps):
        nn.functional.cross_entropy(model(batch.to(device)), target.to(device)).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        opt.step()
        opt.zero_grad()

    palsgd.checkpoint.save_model(args.folder, opt)  # whole, on every node
    with opt.anchor_weights(), torch.no_grad():
        accuracy = (model(inputs[:400].to(device)).argmax(1).cpu() == labels[:400]).float().mean()
    if dist.get_rank() == 0:
        workers, processes = groups["workers"].size(), groups["inside"].size()
        print(f"{workers} x {processes} processes, accuracy {accuracy:.3f}")
        print(opt.ledger)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

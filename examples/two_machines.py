"""Two machines, the network between them, and no launcher. On both machines:

    export MASTER_ADDR=10.0.0.1 MASTER_PORT=29500 WORLD_SIZE=2 GLOO_SOCKET_IFNAME=eth0

MASTER_ADDR is the first machine's address in that network. GLOO_SOCKET_IFNAME is the interface
through which a machine reaches it (`ip -brief address`). Then, on the first and on the second:

    RANK=0 python examples/two_machines.py
    RANK=1 python examples/two_machines.py

The first one waits for the second. At the end each prints what it did, sent and waited for.
"""

import argparse

import torch
import torch.distributed as dist
from torch import Tensor, nn

import palsgd
from palsgd import process_groups


def clouds(count: int, seed: int) -> tuple[Tensor, Tensor]:
    """Points around ten centres, and the centre of each. The seed is of the points."""
    centres = torch.randn(10, 64, generator=torch.Generator().manual_seed(0))
    random, labels = torch.Generator().manual_seed(seed), torch.arange(count) % 10
    return centres[labels] + 1.5 * torch.randn(count, 64, generator=random), labels


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=640)
    args = parser.parse_args()

    device, backend = process_groups.device_and_backend()
    process_groups.join(backend, timeout_s=300)  # a machine that is lost ends the run after 5 min
    rank = dist.get_rank()
    inputs, labels = clouds(1600, seed=1 + rank)  # each machine has data of its own
    order = torch.Generator().manual_seed(rank)

    def batches():
        while True:
            rows = torch.randint(1600, (32,), generator=order)
            yield inputs[rows].to(device), labels[rows].to(device)

    torch.manual_seed(0)  # both start from the same weights
    model = nn.Sequential(
        nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 10)
    ).to(device)
    inner = torch.optim.AdamW(model.parameters(), lr=1e-3)
    # One byte per parameter and round. It has 8 steps to arrive in, and the training goes on.
    opt = palsgd.PALSGD(model, inner, sync_every=32, compress="int8", delay=8)
    for batch, target in palsgd.until(batches(), opt, steps=args.steps):
        nn.functional.cross_entropy(model(batch), target).backward()
        opt.step()
        opt.zero_grad()

    inputs, labels = clouds(1000, seed=0)
    with opt.anchor_weights(), torch.no_grad():
        accuracy = (model(inputs.to(device)).argmax(1).cpu() == labels).float().mean()
    parameters = sum(p.numel() for p in model.parameters())
    print(opt.ledger)
    print(f"DDP would have sent {4 * parameters * args.steps / 1e6:.1f} MB")
    print(f"worker {rank} ends at clock {opt.clock}: accuracy {accuracy:.3f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

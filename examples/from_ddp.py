"""A run that began with DistributedDataParallel goes on with PALSGD from the file that it saved:

    torchrun --nproc-per-node 2 examples/from_ddp.py ddp run.pt
    torchrun --nproc-per-node 2 examples/from_ddp.py palsgd run.pt

The first command is plain torch and stands for your own script. All workers must see the file.
"""

import argparse
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import palsgd
from palsgd import interrupts, process_groups


def clouds(count: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Points around ten centres, and the centre of each: the same on all workers."""
    random = torch.Generator().manual_seed(0)
    centres, labels = torch.randn(10, 64, generator=random), torch.arange(count) % 10
    points = centres[labels] + 1.5 * torch.randn(count, 64, generator=random)
    return points.to(device), labels.to(device)


def with_ddp(net: nn.Module, loader: DataLoader, path: Path, steps: int) -> str:
    model = DistributedDataParallel(net)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    done = 0
    while done < steps:
        for inputs, labels in loader:
            nn.functional.cross_entropy(model(inputs), labels).backward()
            optimizer.step()
            optimizer.zero_grad()
            done += 1
    if dist.get_rank() == 0:
        torch.save({"model": net.state_dict(), "optimizer": optimizer.state_dict()}, path)
    return f"{done} steps of DDP"


def with_palsgd(net: nn.Module, loader: DataLoader, path: Path, steps: int) -> str:
    saved = torch.load(path, map_location="cpu", weights_only=True)
    net.load_state_dict(saved["model"])
    inner = torch.optim.AdamW(net.parameters(), lr=1e-3)
    opt = palsgd.PALSGD(net, inner, sync_every=16)
    opt.load_state_dict(saved["optimizer"])  # the moments of Adam; the clock begins at 0
    before = int(inner.state[net[0].weight]["step"])
    for inputs, labels in palsgd.until(loader, opt, steps=steps):
        nn.functional.cross_entropy(net(inputs), labels).backward()
        opt.step()
        opt.zero_grad()
    sent = opt.ledger.bytes_sent / opt.clock
    return f"{before} steps of DDP and {steps} of PALSGD, {sent:.0f} bytes sent in each of these"


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("method", choices=("ddp", "palsgd"))
    parser.add_argument("path", type=Path)
    parser.add_argument("--steps", type=int, default=200)
    args = parser.parse_args()

    interrupts.end_with_parent()  # workers of a launcher that is killed would train on
    device, backend = process_groups.device_and_backend()
    process_groups.join(backend, timeout_s=300)
    torch.manual_seed(0)  # every worker starts from the same weights
    net = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10)).to(device)
    inputs, labels = clouds(2000, device)
    dataset = TensorDataset(inputs[400:], labels[400:])
    loader = DataLoader(dataset, batch_size=32, sampler=DistributedSampler(dataset))
    train = {"ddp": with_ddp, "palsgd": with_palsgd}[args.method]
    done = train(net, loader, args.path, args.steps)
    with torch.no_grad():
        loss = nn.functional.cross_entropy(net(inputs[:400]), labels[:400])
    if dist.get_rank() == 0:
        print(f"loss {loss:.4f} after {done}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

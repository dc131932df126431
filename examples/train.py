"""A plain training loop with one line replaced, which goes on where it was stopped. Start it on
every machine:

    torchrun --nproc-per-node 2 --max-restarts 3 examples/train.py checkpoints

and across machines as any torchrun job (--nnodes, --rdzv-endpoint). After SIGTERM it saves at the
next sync and ends; the same command goes on from there.
"""

import argparse
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import palsgd
from palsgd import interrupts, process_groups

SAVE_EVERY = 4  # rounds


def clouds(count: int) -> tuple[Tensor, Tensor]:
    """Points around ten centres, and the centre of each: the same on all workers."""
    random = torch.Generator().manual_seed(0)
    centres, labels = torch.randn(10, 64, generator=random), torch.arange(count) % 10
    return centres[labels] + 1.5 * torch.randn(count, 64, generator=random), labels


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", nargs="?", type=Path, default="checkpoints")
    parser.add_argument("--steps", type=int, default=600)
    args = parser.parse_args()

    interrupts.end_with_parent()  # workers of a launcher that is killed would train on
    device, backend = process_groups.device_and_backend()
    # as dist.init_process_group, also in workers that torchrun has started again
    process_groups.join(backend, timeout_s=300)
    inputs, labels = clouds(2000)
    dataset = TensorDataset(inputs[400:], labels[400:])
    loader = DataLoader(dataset, batch_size=32, sampler=DistributedSampler(dataset))

    torch.manual_seed(0)  # every worker starts from the same weights
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10)).to(device)
    inner = torch.optim.AdamW(model.parameters(), lr=1e-3)
    opt = palsgd.PALSGD(model, inner, sync_every=32)
    if palsgd.checkpoint.find(args.folder):
        palsgd.checkpoint.load(args.folder, model, opt)
    palsgd.leave_on_sigterm(opt)

    def save(event: palsgd.events.Synced) -> None:  # all workers get here at the same clocks
        if event.completes and (opt.rounds % SAVE_EVERY == 0 or opt.leaving):
            palsgd.checkpoint.save(args.folder, model, opt)

    opt.on(palsgd.events.Synced, save)
    for batch, target in palsgd.until(loader, opt, steps=args.steps):
        nn.functional.cross_entropy(model(batch.to(device)), target.to(device)).backward()
        opt.step()
        opt.zero_grad()
    if opt.leaving:
        sys.exit(143)  # so that whoever started it knows that there is more to do

    with opt.anchor_weights(), torch.no_grad():
        found = model(inputs[:400].to(device)).argmax(1).cpu()
    if dist.get_rank() == 0:
        accuracy = (found == labels[:400]).float().mean()
        sent = opt.ledger.bytes_sent / opt.clock
        print(f"accuracy {accuracy:.3f}, {opt.rounds} syncs, {sent:.0f} bytes sent per step")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

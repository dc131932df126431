"""A plain training loop with one line replaced, which goes on where it was stopped. Start it on
every machine:

    torchrun --nproc-per-node 2 --max-restarts 3 examples/train.py

and across machines as any torchrun job (--nnodes, --rdzv-endpoint). After SIGTERM it saves at the
next sync and ends; the same command goes on from there.
"""

import sys
from pathlib import Path

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import palsgd
from palsgd import interrupts, process_groups

STEPS = 600
SAVE_EVERY = 4  # rounds
CHECKPOINTS = Path(sys.argv[1] if len(sys.argv) > 1 else "checkpoints")


def main() -> None:
    interrupts.end_with_parent()  # workers of a launcher that is killed would train on
    # as dist.init_process_group, also in workers that torchrun has started again
    process_groups.join("nccl" if torch.cuda.is_available() else "gloo", timeout_s=300)
    torch.manual_seed(0)  # every worker starts from the same weights
    images, labels = load_digits(return_X_y=True)
    images, labels = torch.tensor(images, dtype=torch.float32) / 16, torch.tensor(labels)
    train, test = torch.randperm(len(labels)).split([1437, 360])
    dataset = TensorDataset(images[train], labels[train])
    loader = DataLoader(dataset, batch_size=32, sampler=DistributedSampler(dataset))

    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
    inner = torch.optim.AdamW(model.parameters(), lr=1e-3)
    opt = palsgd.PALSGD(model, inner, sync_every=32)
    if palsgd.checkpoint.find(CHECKPOINTS):
        palsgd.checkpoint.load(CHECKPOINTS, model, opt)
    palsgd.leave_on_sigterm(opt)

    def save(event: palsgd.events.Synced) -> None:  # all workers get here at the same clocks
        if event.completes and (opt.rounds % SAVE_EVERY == 0 or opt.leaving):
            palsgd.checkpoint.save(CHECKPOINTS, model, opt)

    opt.on(palsgd.events.Synced, save)
    for batch, target in palsgd.until(loader, opt, steps=STEPS):
        nn.functional.cross_entropy(model(batch), target).backward()
        opt.step()
        opt.zero_grad()
    if opt.leaving:
        sys.exit(143)  # so that whoever started it knows that there is more to do

    with opt.anchor_weights(), torch.no_grad():
        accuracy = (model(images[test]).argmax(1) == labels[test]).float().mean()
    if dist.get_rank() == 0:
        sent = opt.ledger.bytes_sent / opt.clock
        print(f"accuracy {accuracy:.3f}, {opt.rounds} syncs, {sent:.0f} bytes sent per step")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

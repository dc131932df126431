"""A plain training loop with one line replaced. Start it on every machine:

    torchrun --nproc-per-node 2 examples/train.py

and across machines as any torchrun job (--nnodes, --rdzv-endpoint).
"""

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import palsgd

STEPS = 600


def main() -> None:
    dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    torch.manual_seed(0)  # every worker starts from the same weights
    images, labels = load_digits(return_X_y=True)
    images, labels = torch.tensor(images, dtype=torch.float32) / 16, torch.tensor(labels)
    train, test = torch.randperm(len(labels)).split([1437, 360])
    dataset = TensorDataset(images[train], labels[train])
    loader = DataLoader(dataset, batch_size=32, sampler=DistributedSampler(dataset))

    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
    inner = torch.optim.AdamW(model.parameters(), lr=1e-3)
    opt = palsgd.PALSGD(model, inner, sync_every=32)

    for batch, target in palsgd.until(loader, opt, steps=STEPS):
        nn.functional.cross_entropy(model(batch), target).backward()
        opt.step()
        opt.zero_grad()

    with opt.anchor_weights(), torch.no_grad():
        accuracy = (model(images[test]).argmax(1) == labels[test]).float().mean()
    if dist.get_rank() == 0:
        sent = opt.ledger.bytes_sent / opt.clock
        print(f"accuracy {accuracy:.3f}, {opt.rounds} syncs, {sent:.0f} bytes sent per step")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

"""Hugging Face accelerate with a palsgd optimizer. Start it on every machine:

    torchrun --nproc-per-node 2 examples/with_accelerate.py

After a kill the same command goes on from the last checkpoint.
"""

import sys
from pathlib import Path

import torch
from accelerate import Accelerator
from accelerate.utils import DataLoaderConfiguration, set_seed
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import palsgd
from palsgd.integrations.accelerate import prepare

STEPS = 600
SAVE_EVERY = 4  # rounds
FOLDER = Path(sys.argv[1] if len(sys.argv) > 1 else "accelerate-run")


def newest() -> Path | None:
    """The last folder that save_state() has written to its end."""
    return max(FOLDER.glob("clock-*"), key=lambda path: int(path.name.split("-")[1]), default=None)


def main() -> None:
    # The order of examples follows from the seed and the pass over the data.
    config = DataLoaderConfiguration(use_seedable_sampler=True)
    accelerator = Accelerator(
        cpu=not torch.cuda.is_available(), gradient_accumulation_steps=2, dataloader_config=config
    )
    set_seed(0)  # every worker starts from the same weights
    images, labels = load_digits(return_X_y=True)
    images, labels = torch.tensor(images, dtype=torch.float32) / 16, torch.tensor(labels)
    train, test = torch.randperm(len(labels)).split([1437, 360])
    loader = DataLoader(TensorDataset(images[train], labels[train]), batch_size=16, shuffle=True)

    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
    inner = torch.optim.AdamW(model.parameters(), lr=2e-3)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(inner, STEPS)
    model, opt, loader, schedule = prepare(
        accelerator, model, inner, loader, schedule, sync_every=32
    )
    local = opt.optimizer  # the palsgd optimizer
    if newest() is not None:
        accelerator.load_state(str(newest()))

    def save(event: palsgd.events.Synced) -> None:  # all workers get here at the same clocks
        if event.completes and local.rounds % SAVE_EVERY == 0:
            part = FOLDER / f"part-{local.clock}"
            accelerator.save_state(str(part))
            accelerator.wait_for_everyone()
            if accelerator.is_main_process:
                part.rename(FOLDER / f"clock-{local.clock}")

    local.on(palsgd.events.Synced, save)
    for batch, target in palsgd.until(loader, opt, steps=STEPS):
        with accelerator.accumulate(model):
            accelerator.backward(nn.functional.cross_entropy(model(batch), target))
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
            opt.step()
            schedule.step()
            opt.zero_grad()

    opt.eval()  # shows the global model
    with torch.no_grad():
        found = model(images[test].to(accelerator.device)).argmax(1).cpu()
    opt.train()
    accuracy, sent = (found == labels[test]).float().mean(), local.ledger.bytes_sent / local.clock
    accelerator.print(
        f"accuracy {accuracy:.3f}, {local.rounds} syncs, {sent:.0f} bytes sent per step"
    )
    accelerator.end_training()


if __name__ == "__main__":
    main()

"""Hugging Face accelerate with a palsgd optimizer. Start it on every machine:

    torchrun --nproc-per-node 2 examples/with_accelerate.py accelerate-run

After a kill the same command goes on from the last checkpoint.
"""

import argparse
from pathlib import Path

import torch
from accelerate import Accelerator
from accelerate.utils import DataLoaderConfiguration, set_seed
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import palsgd
from palsgd import process_groups
from palsgd.integrations.accelerate import prepare

SAVE_EVERY = 4  # rounds


def clouds(count: int) -> tuple[Tensor, Tensor]:
    """Points around ten centres, and the centre of each: the same on all workers."""
    random = torch.Generator().manual_seed(0)
    centres, labels = torch.randn(10, 64, generator=random), torch.arange(count) % 10
    return centres[labels] + 1.5 * torch.randn(count, 64, generator=random), labels


def newest(folder: Path) -> Path | None:
    """The last folder that save_state() has written to its end."""
    return max(folder.glob("clock-*"), key=lambda path: int(path.name.split("-")[1]), default=None)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", nargs="?", type=Path, default="accelerate-run")
    parser.add_argument("--steps", type=int, default=600)
    args = parser.parse_args()

    # The order of examples follows from the seed and the pass over the data.
    config = DataLoaderConfiguration(use_seedable_sampler=True)
    accelerator = Accelerator(
        cpu=process_groups.device_and_backend()[1] == "gloo",  # not a GPU for each process
        gradient_accumulation_steps=2,
        dataloader_config=config,
    )
    set_seed(0)  # every worker starts from the same weights
    inputs, labels = clouds(2000)
    loader = DataLoader(TensorDataset(inputs[400:], labels[400:]), batch_size=16, shuffle=True)

    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
    inner = torch.optim.AdamW(model.parameters(), lr=2e-3)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(inner, args.steps)
    model, opt, loader, schedule = prepare(
        accelerator, model, inner, loader, schedule, sync_every=32
    )
    local = opt.optimizer  # the palsgd optimizer
    if newest(args.folder) is not None:
        accelerator.load_state(str(newest(args.folder)))

    def save(event: palsgd.events.Synced) -> None:  # all workers get here at the same clocks
        if event.completes and local.rounds % SAVE_EVERY == 0:
            part = args.folder / f"part-{local.clock}"
            accelerator.save_state(str(part))
            accelerator.wait_for_everyone()
            if accelerator.is_main_process:
                part.rename(args.folder / f"clock-{local.clock}")

    local.on(palsgd.events.Synced, save)
    for batch, target in palsgd.until(loader, opt, steps=args.steps):
        with accelerator.accumulate(model):
            accelerator.backward(nn.functional.cross_entropy(model(batch), target))
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
            opt.step()
            schedule.step()
            opt.zero_grad()

    opt.eval()  # shows the global model
    with torch.no_grad():
        found = model(inputs[:400].to(accelerator.device)).argmax(1).cpu()
    opt.train()
    accuracy, sent = (found == labels[:400]).float().mean(), local.ledger.bytes_sent / local.clock
    accelerator.print(
        f"accuracy {accuracy:.3f}, {local.rounds} syncs, {sent:.0f} bytes sent per step"
    )
    accelerator.end_training()


if __name__ == "__main__":
    main()

"""A Lightning script with one line replaced: the strategy. Lightning starts the processes itself:

    python examples/with_lightning.py checkpoints

or start it as any Lightning script, with torchrun or Slurm across machines. It goes on from its
last checkpoint, and after SIGTERM it saves at the next sync and ends.
"""

import argparse
from pathlib import Path

import torch
from lightning.pytorch import LightningModule, Trainer, seed_everything
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from palsgd.integrations.lightning import LocalStrategy


def clouds(count: int) -> tuple[Tensor, Tensor]:
    """Points around ten centres, and the centre of each: the same on all workers."""
    random = torch.Generator().manual_seed(0)
    centres, labels = torch.randn(10, 64, generator=random), torch.arange(count) % 10
    return centres[labels] + 1.5 * torch.randn(count, 64, generator=random), labels


class Classifier(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))

    def training_step(self, batch: list[Tensor], number: int) -> Tensor:
        inputs, labels = batch
        return nn.functional.cross_entropy(self.layers(inputs), labels)

    def validation_step(self, batch: list[Tensor], number: int) -> None:
        inputs, labels = batch
        right = (self.layers(inputs).argmax(1) == labels).float().mean()
        self.log("accuracy", right, sync_dist=True)

    def configure_optimizers(self) -> dict[str, object]:
        inner = torch.optim.AdamW(self.parameters(), lr=2e-3)
        steps = int(self.trainer.estimated_stepping_batches)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(inner, steps)
        return {"optimizer": inner, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", nargs="?", type=Path, default="checkpoints")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--steps", type=int, default=600)  # of the clock: mixing steps count too
    args = parser.parse_args()

    seed_everything(0)
    inputs, labels = clouds(2000)
    train, test = (TensorDataset(inputs[i], labels[i]) for i in (slice(400, None), slice(400)))
    strategy = LocalStrategy(sync_every=32)
    trainer = Trainer(
        strategy=strategy,
        accelerator="gpu" if torch.cuda.device_count() >= args.workers else "cpu",
        devices=args.workers,
        max_steps=args.steps,
        logger=False,
        enable_progress_bar=False,
        callbacks=[ModelCheckpoint(args.folder, every_n_train_steps=50, save_on_exception=True)],
    )
    model, tests = Classifier(), DataLoader(test, batch_size=200)
    batches = DataLoader(train, batch_size=32, shuffle=True)
    saved = sorted(args.folder.glob("*.ckpt"), key=lambda path: path.stat().st_mtime_ns)
    trainer.fit(model, batches, tests, ckpt_path=saved[-1] if saved else None)
    (found,) = trainer.validate(model, tests, verbose=False)
    if trainer.is_global_zero:
        opt = strategy.opt
        sent = opt.ledger.bytes_sent / opt.clock
        print(f"accuracy {found['accuracy']:.3f}, {opt.rounds} syncs, {sent:.0f} bytes per step")


if __name__ == "__main__":
    main()

"""A Lightning script with one line replaced: the strategy. Lightning starts the processes itself:

    python examples/with_lightning.py

or start it as any Lightning script, with torchrun or Slurm across machines. It goes on from its
last checkpoint, and after SIGTERM it saves at the next sync and ends.
"""

import sys
from pathlib import Path

import torch
from lightning.pytorch import LightningModule, Trainer, seed_everything
from lightning.pytorch.callbacks import ModelCheckpoint
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from palsgd.integrations.lightning import LocalStrategy

STEPS = 600  # of the clock: gradient steps, and steps without data
CHECKPOINTS = Path(sys.argv[1] if len(sys.argv) > 1 else "checkpoints")


class Digits(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))

    def training_step(self, batch: list[torch.Tensor], number: int) -> torch.Tensor:
        images, labels = batch
        return nn.functional.cross_entropy(self.layers(images), labels)

    def validation_step(self, batch: list[torch.Tensor], number: int) -> None:
        images, labels = batch
        right = (self.layers(images).argmax(1) == labels).float().mean()
        self.log("accuracy", right, sync_dist=True)

    def configure_optimizers(self) -> dict[str, object]:
        inner = torch.optim.AdamW(self.parameters(), lr=2e-3)
        steps = int(self.trainer.estimated_stepping_batches)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(inner, steps)
        return {"optimizer": inner, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


def main() -> None:
    seed_everything(0)
    images, labels = load_digits(return_X_y=True)
    images, labels = torch.tensor(images, dtype=torch.float32) / 16, torch.tensor(labels)
    whole = TensorDataset(images, labels)
    train, test = torch.utils.data.random_split(whole, [1437, 360])
    strategy = LocalStrategy(sync_every=32)
    trainer = Trainer(
        strategy=strategy,
        accelerator="cpu",
        devices=2,
        max_steps=STEPS,
        logger=False,
        enable_progress_bar=False,
        callbacks=[ModelCheckpoint(CHECKPOINTS, every_n_train_steps=50, save_on_exception=True)],
    )
    model, tests = Digits(), DataLoader(test, batch_size=180)
    batches = DataLoader(train, batch_size=32, shuffle=True)
    saved = sorted(CHECKPOINTS.glob("*.ckpt"), key=lambda path: path.stat().st_mtime_ns)
    trainer.fit(model, batches, tests, ckpt_path=saved[-1] if saved else None)
    (found,) = trainer.validate(model, tests, verbose=False)
    if trainer.is_global_zero:
        opt = strategy.opt
        sent = opt.ledger.bytes_sent / opt.clock
        print(f"accuracy {found['accuracy']:.3f}, {opt.rounds} syncs, {sent:.0f} bytes per step")


if __name__ == "__main__":
    main()

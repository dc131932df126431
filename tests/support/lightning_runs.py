"""A module, batches and a trainer with which worker processes run Lightning. Import it where
Lightning is installed."""

import warnings
from contextlib import contextmanager
from pathlib import Path

import torch
import torch.distributed as dist
from lightning.fabric.plugins.environments import ClusterEnvironment
from lightning.fabric.utilities.warnings import PossibleUserWarning
from lightning.pytorch import LightningModule, Trainer
from torch import nn

from palsgd.integrations.lightning import LocalStrategy

RULES = dict(sync_every=6, mix_prob=0.3, mix_rate=2.0, seed=11)


class Processes(ClusterEnvironment):
    """The process group that the tests have made."""

    creates_processes_externally = True
    main_address, main_port = "", 0

    @staticmethod
    def detect():
        return False

    def world_size(self):
        return dist.get_world_size()

    def global_rank(self):
        return dist.get_rank()

    def local_rank(self):
        return dist.get_rank()

    def node_rank(self):
        return 0

    def set_world_size(self, size):
        assert size == dist.get_world_size()

    def set_global_rank(self, rank):
        assert rank == dist.get_rank()


class Batches:
    """The batches of one worker, from which a run can go on in the middle of an epoch."""

    def __init__(self, worker=None, count=5, width=4):
        self.worker = dist.get_rank() if worker is None else worker
        numbers = torch.Generator().manual_seed(self.worker)
        self.batches = [torch.randn(6, width, generator=numbers) for _ in range(count)]
        self.at = 0

    def __len__(self):
        return len(self.batches)

    def __iter__(self):
        self.at %= len(self.batches)
        while self.at < len(self.batches):
            self.at += 1
            yield self.batches[self.at - 1]

    def state_dict(self):
        return {"at": self.at}

    def load_state_dict(self, state):
        self.at = state["at"]


class Net(LightningModule):
    """Learns its input through dropout. `schedule` is a function of the inner optimizer."""

    def __init__(self, schedule=None, interval="step", width=4, seed=0, hook=None):
        super().__init__()
        torch.manual_seed(seed)
        self.layers = nn.Sequential(
            nn.Linear(width, width), nn.BatchNorm1d(width), nn.Dropout(0.1), nn.Linear(width, width)
        )
        self.schedule, self.interval, self.hook = schedule, interval, hook
        self.rates, self.seen = [], []

    def loss(self, batch):
        return (self.layers(batch) - batch).square().mean()

    def training_step(self, batch, number):
        if self.hook is not None:
            self.hook(self, number)
        self.rates.append(self.trainer.optimizers[0].param_groups[0]["lr"])
        return self.loss(batch)

    def validation_step(self, batch, number):
        self.seen.append(weights(self))

    def configure_optimizers(self):
        inner = torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9)
        if self.schedule is None:
            return inner
        return {
            "optimizer": inner,
            "lr_scheduler": {"scheduler": self.schedule(inner), "interval": self.interval},
        }


def falling(inner):
    """A schedule that goes by its own count of steps."""
    return torch.optim.lr_scheduler.LambdaLR(inner, lambda steps: 0.97**steps)


def weights(model):
    return nn.utils.parameters_to_vector(model.parameters()).detach().clone()


def trainer(strategy=None, folder=None, **given):
    """A trainer that prints and logs nothing."""
    quiet = dict(
        logger=False, enable_progress_bar=False, enable_model_summary=False,
        enable_checkpointing=False, num_sanity_val_steps=0,
    )  # fmt: skip
    processes = dict(accelerator="cpu", devices=dist.get_world_size(), plugins=[Processes()])
    strategy = LocalStrategy(**RULES) if strategy is None else strategy
    folder = Path.cwd() if folder is None else folder
    return Trainer(strategy=strategy, default_root_dir=folder, **(quiet | processes | given))


@contextmanager
def advice_ignored():
    """Lightning gives advice by warnings, and has those of newer releases of torch."""
    with warnings.catch_warnings():
        for kind in (PossibleUserWarning, FutureWarning, DeprecationWarning):
            warnings.simplefilter("ignore", kind)
        warnings.filterwarnings("ignore", ".*callbacks used to create the checkpoint.*")
        yield


def fit(model, *data, ckpt_path=None, **given):
    """Train, and return the trainer."""
    with advice_ignored():
        found = trainer(**given)
        found.fit(model, *(data or [Batches()]), ckpt_path=ckpt_path)
    return found

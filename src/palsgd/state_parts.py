"""What a saved state is read from and loaded into, and tensors of it that are like the model's."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from palsgd.flat import FlatModel
from palsgd.packing import ModelLike, like_shard
from palsgd.replica import Replica
from palsgd.sharding import local_tensor
from palsgd.sync import Syncer
from palsgd.transports.transport import Transport
from palsgd.worker import Worker


@dataclass(frozen=True)
class Parts:
    """The objects that a state is read from and loaded into."""

    worker: Worker
    transport: Transport
    config: dict[str, Any]

    @property
    def syncer(self) -> Syncer | None:
        """None for DDP."""
        return self.worker._syncer

    @property
    def replica(self) -> Replica:
        return self.worker.inner.replica


@dataclass
class Loading:
    """A load under way."""

    strict: bool
    saved: dict[str, Any]  # the settings under which the state was saved
    mine: dict[str, Any]  # the settings of the optimizer that loads it
    own: bool  # did this worker save the state?
    # If the number of workers may be another one: the workers that load another's state.
    joining: Collection[int] | None = None
    dropped: list[str] = field(default_factory=list)  # what the state has and this run cannot use
    leaves_rounds: bool = False  # does it lead from the local phase back into the warm-up?

    def differs(self, *names: str) -> str | None:
        """The first of these settings that differs, with both values."""
        for name in names:
            if self.saved.get(name) != self.mine.get(name):
                return f"{name}={self.mine.get(name)!r} (saved {self.saved.get(name)!r})"
        return None


def model_like(replica: Replica, kept: FlatModel) -> ModelLike:
    views = zip(replica.names, replica.params, kept.views, strict=True)
    return ModelLike({name: like_shard(view.clone(), param) for name, param, view in views})


def load_model_like(replica: Replica, kept: FlatModel, saved: Mapping[str, Tensor]) -> None:
    if set(saved) != set(replica.names):
        odd = sorted(set(saved) ^ set(replica.names))
        raise ValueError(f"the saved anchor is of another model: {odd[0]} is only on one side")
    for name, view in zip(replica.names, kept.views, strict=True):
        view.copy_(local_tensor(saved[name]))


def scratch(syncer: Syncer, dtype: torch.dtype) -> FlatModel:
    """Tensors of the model's shapes, cut into fragments as the anchor is."""
    layout, device = syncer.replica.layout, syncer.anchor.home.storage
    return FlatModel(layout, syncer.anchor.ranges, dtype=dtype, device=device)

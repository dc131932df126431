"""Hugging Face accelerate: what `accelerator.prepare` does, for a palsgd optimizer."""

import os
from collections.abc import Callable, Sequence
from copy import deepcopy
from pathlib import Path
from typing import Any

from accelerate.data_loader import DataLoaderDispatcher
from accelerate.utils import DistributedType, synchronize_rng_states
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import DataLoader

from palsgd import checkpoint
from palsgd.integrations.clocked_scheduler import follow_clock
from palsgd.local_optimizer import LocalOptimizer
from palsgd.optimizer import PALSGD
from palsgd.packing import numbers
from palsgd.replica import unwrapped
from palsgd.transports import Alone

FOLDER = "palsgd"  # of the workers' own files, in a folder of save_state()
GENERATOR = "generator"  # what accelerate calls a loader's own source of randomness

# Those that own the optimizer or shard the model, so that the workers are not one process each.
REFUSED = (
    DistributedType.DEEPSPEED,
    DistributedType.FSDP,
    DistributedType.MEGATRON_LM,
    DistributedType.XLA,
)


def prepare(
    accelerator: Any,
    model: nn.Module,
    inner: Optimizer | Sequence[Optimizer],
    *others: Any,
    optimizer: Callable[..., LocalOptimizer] = PALSGD,
    **settings: Any,
) -> tuple[Any, ...]:
    """Prepare a model, its inner optimizer and anything else for local training.

    It stands in the place of `accelerator.prepare(model, inner, *others)`. The prepared optimizer
    has the palsgd optimizer as its `optimizer`. `accelerator.save_state` writes the global model,
    and beside it the folder `palsgd` with every worker's own state, which `accelerator.load_state`
    reads. Schedulers among `others` follow the clock, and calling their `step()` does nothing.
    `opt.eval()` shows the global model, `opt.train()` goes back.

    Args:
        accelerator: an `accelerate.Accelerator`.
        model: the model, not prepared yet.
        inner: the torch optimizer of each worker, or a list of them.
        others: loaders, schedulers of `inner`, and whatever else `accelerator.prepare` takes.
        optimizer: which palsgd optimizer is built: `palsgd.PALSGD`, `palsgd.DiLoCo`,
            `palsgd.methods.FedProx`, or `palsgd.LocalOptimizer` with `method=`.
        settings: its settings, such as `sync_every`.

    Returns:
        The prepared model, the prepared optimizer, and the others in their order.

    Raises:
        ValueError: the accelerator shards the model, owns the optimizer or does not know of the
            other processes, or a loader sends every batch from process 0.

    Example:
        >>> import accelerate, torch, palsgd
        >>> from palsgd.integrations.accelerate import prepare
        >>> accelerator = accelerate.Accelerator(cpu=True)
        >>> model = torch.nn.Linear(2, 1)
        >>> inner = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> loader = torch.utils.data.DataLoader(torch.ones(8, 2), batch_size=4)
        >>> model, opt, loader = prepare(accelerator, model, inner, loader, sync_every=4)
        >>> for batch in palsgd.until(loader, opt, steps=6):
        ...     accelerator.backward(model(batch).sum())
        ...     opt.step()
        ...     opt.zero_grad()
        >>> opt.optimizer.clock, opt.optimizer.synced
        (6, True)
    """
    _check(accelerator)
    if accelerator.num_processes == 1:
        settings.setdefault("transport", Alone())
    model = accelerator.prepare(model)
    opt = optimizer(model, inner, **settings)
    prepared = accelerator.prepare(opt)
    _OwnFiles(opt).register(accelerator)
    return (model, prepared, *(_prepared(accelerator, opt, other) for other in others))


def _check(accelerator: Any) -> None:
    kind, started = accelerator.distributed_type, int(os.environ.get("WORLD_SIZE", 1))
    if kind in REFUSED:
        raise ValueError(
            f"the accelerator runs under {kind.value}, which shards the model or has an optimizer "
            "of its own; use data parallelism, as under torchrun without a plugin"
        )
    if started > 1 and accelerator.num_processes == 1:
        raise ValueError(
            f"WORLD_SIZE={started} processes were started, and the accelerator knows of one, so "
            "each would train alone; use Accelerator(cpu=True) where there is no GPU"
        )


def _prepared(accelerator: Any, opt: LocalOptimizer, other: Any) -> Any:
    if isinstance(other, LRScheduler):
        follow_clock(opt, other)
        return other
    found = accelerator.prepare(other)
    if isinstance(other, DataLoader):
        _keep_loader_local(found)
    return found


def _keep_loader_local(loader: Any) -> None:
    """Have the loader's processes agree on the order of examples now, instead of by a broadcast at
    the start of every pass. Workers may begin a pass on different sides of a sync."""
    if issubclass(type(loader), DataLoaderDispatcher):
        raise ValueError(
            "the loader reads all batches on process 0 and sends them to the others at every step; "
            "use Accelerator(dataloader_config=DataLoaderConfiguration(dispatch_batches=False))"
        )
    if GENERATOR in (loader.rng_types or ()):
        synchronize_rng_states([GENERATOR], loader.synchronized_generator)
        loader.rng_types = [each for each in loader.rng_types if each != GENERATOR]


class _OwnFiles:
    """The state of each worker, beside what `save_state` writes of process 0 alone."""

    def __init__(self, opt: LocalOptimizer):
        self._opt = opt
        self._folder: Path | None = None  # what load_state is about to load

    def register(self, accelerator: Any) -> None:
        accelerator.register_save_state_pre_hook(self._save)
        accelerator.register_load_state_pre_hook(self._find)
        self._opt.register_load_state_dict_pre_hook(self._load)

    def _place(self, models: list[nn.Module]) -> int:
        inside = unwrapped(self._opt.model)
        return next(i for i, model in enumerate(models) if unwrapped(model) is inside)

    def _path(self, models: list[nn.Module], folder: str) -> Path:
        """Numbered as accelerate numbers its own files of several models."""
        place = self._place(models)
        return Path(folder) / (FOLDER if place == 0 else f"{FOLDER}_{place}")

    def _save(self, models: list[nn.Module], weights: list[Any], folder: str) -> None:
        opt, place = self._opt, self._place(models)
        checkpoint.save(self._path(models, folder), opt.model, opt, keep=1)
        with opt.anchor_weights():
            weights[place] = deepcopy(models[place].state_dict())  # what is tied stays tied

    def _find(self, models: list[nn.Module], folder: str) -> None:
        self._folder = self._path(models, folder)

    def _load(self, opt: Any, state: dict[str, Any]) -> dict[str, Any] | None:
        """Load this worker's own files in place of process 0's state, after accelerate has loaded
        the model. The state of a plain optimizer goes into the inner one."""
        folder, self._folder = self._folder, None
        if folder is None or not _is_local(state):
            return None
        checkpoint.load(folder, opt.model, opt)
        found: dict[str, Any] = opt.state_dict()
        return found


def _is_local(state: dict[str, Any]) -> bool:
    """Is this the state of a palsgd optimizer?"""
    try:
        numbers(state)
    except ValueError:
        return False
    return True

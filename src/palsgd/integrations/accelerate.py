"""Hugging Face accelerate: what `accelerator.prepare` does, for a palsgd optimizer."""

import os
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from accelerate.data_loader import DataLoaderDispatcher
from accelerate.utils import DistributedType, synchronize_rng_states
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import DataLoader

from palsgd.integrations.accelerate_files import OwnFiles, ShardedFiles
from palsgd.integrations.clocked_scheduler import follow_clock
from palsgd.local_optimizer import LocalOptimizer
from palsgd.optimizer import PALSGD
from palsgd.transports import Alone

Inner = Optimizer | Sequence[Optimizer]
Build = Callable[[nn.Module, Inner], LocalOptimizer]
Prepared = tuple[nn.Module, LocalOptimizer, Any]  # the last is accelerate's proxy of the optimizer

GENERATOR = "generator"  # what accelerate calls a loader's own source of randomness

# Those that have an optimizer of their own, or cut the model in ways that palsgd cannot tell.
REFUSED = (DistributedType.DEEPSPEED, DistributedType.MEGATRON_LM, DistributedType.XLA)


def prepare(
    accelerator: Any,
    model: nn.Module,
    inner: Inner,
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

    Under accelerate's FSDP2 a worker is the processes that share its shards: with
    `ParallelismConfig(dp_replicate_size=2, dp_shard_size=4)` there are two workers of four.

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
        ValueError: the accelerator owns the optimizer, shards the model over all processes or in
            another way than FSDP2, or does not know of the other processes; or a loader sends every
            batch from process 0.

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
    sharded = accelerator.distributed_type == DistributedType.FSDP
    make = _in_shards if sharded else _in_copies
    model, opt, prepared = make(accelerator, model, inner, partial(optimizer, **settings))
    return (model, prepared, *(_prepared(accelerator, opt, other) for other in others))


def _in_copies(accelerator: Any, model: nn.Module, inner: Inner, build: Build) -> Prepared:
    model = accelerator.prepare(model)
    opt = build(model, inner)
    prepared = accelerator.prepare(opt)
    OwnFiles(opt).register(accelerator)
    return model, opt, prepared


def _in_shards(accelerator: Any, model: nn.Module, inner: Inner, build: Build) -> Prepared:
    """accelerate puts the shards into the inner optimizers, which come with the model therefore."""
    known = list(accelerator._optimizers)
    model = accelerator.prepare(model, *([inner] if isinstance(inner, Optimizer) else inner))[0]
    opt = build(model, inner)
    prepared = accelerator.prepare_optimizer(opt, device_placement=False)
    accelerator._optimizers[:] = known  # it would save the state of one worker for all
    ShardedFiles(opt).register(accelerator)
    return model, opt, prepared


def _check(accelerator: Any) -> None:
    kind, started = accelerator.distributed_type, int(os.environ.get("WORLD_SIZE", 1))
    if kind in REFUSED:
        raise ValueError(
            f"the accelerator runs under {kind.value}, which cuts the model or has an optimizer of "
            "its own; use data parallelism, as under torchrun without a plugin, or FSDP2"
        )
    if started > 1 and accelerator.num_processes == 1:
        raise ValueError(
            f"WORLD_SIZE={started} processes were started, and the accelerator knows of one, so "
            "each would train alone; use Accelerator(cpu=True) where there is no GPU"
        )
    if kind == DistributedType.FSDP:
        _check_sharding(accelerator)
    elif os.environ.get("ACCELERATE_USE_FSDP", "").lower() == "true":
        raise ValueError(
            f"accelerate was asked to shard the model, and does not under {kind.value}; leave out "
            "fsdp_plugin, or shard it yourself by fully_shard and palsgd.worker_groups"
        )


def _check_sharding(accelerator: Any) -> None:
    if not accelerator.is_fsdp2:
        raise ValueError(
            "accelerate shards the model by FSDP 1, which has no tensors of one parameter; use "
            "FullyShardedDataParallelPlugin(fsdp_version=2)"
        )
    shape = accelerator.parallelism_config
    if shape is None or shape.dp_replicate_size == 1 or shape.non_data_parallel_size > 1:
        raise ValueError(
            f"accelerate cuts one model over {accelerator.num_processes} processes, and palsgd "
            "trains copies of it, each in shards; use Accelerator(parallelism_config="
            "ParallelismConfig(dp_replicate_size=WORKERS, dp_shard_size=PROCESSES_OF_A_WORKER))"
        )
    if accelerator.scaler is not None:
        raise ValueError(
            "mixed_precision='fp16' with FSDP2 needs an optimizer that accelerate saves itself, "
            "which the workers' are not; use mixed_precision='bf16'"
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

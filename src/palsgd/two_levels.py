"""Two levels: the ranks of one worker average every gradient, the workers train locally."""

from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from palsgd.checks import check_int
from palsgd.process_groups import backends_of, take_timeout

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

# The ranks of this worker, for each group over the workers that `worker_groups` has made. A group
# is forgotten when torch.distributed forgets it.
_INSIDE: WeakKeyDictionary[ProcessGroup, ProcessGroup] = WeakKeyDictionary()


def worker_groups(ranks_per_worker: int) -> "DeviceMesh":
    """Divide all ranks into workers of `ranks_per_worker` ranks that follow one another.

    The ranks of a worker average every gradient over their fast links, by DistributedDataParallel
    or fully_shard over the axis "inside". The palsgd optimizer exchanges over the axis "workers",
    which has one rank of every worker. Every rank must call this.

    Args:
        ranks_per_worker: how many ranks are one worker. The number of ranks must be a multiple of
            it. With 1, every rank is a worker.

    Returns:
        A DeviceMesh with the axes ("workers", "inside").

    Raises:
        ValueError: the number of ranks is no multiple of `ranks_per_worker`, or torch.distributed
            is not initialised.

    Example:
        >>> import torch, palsgd
        >>> import torch.distributed as dist
        >>> from torch.nn.parallel import DistributedDataParallel
        >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        >>> m = palsgd.worker_groups(1)
        >>> net = torch.nn.Linear(2, 1)
        >>> model = DistributedDataParallel(net, process_group=m["inside"].get_group())
        >>> inner = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> opt = palsgd.DiLoCo(model, inner, sync_every=64, group=m["workers"].get_group())
        >>> opt.transport.workers
        1
        >>> dist.destroy_process_group()
    """
    ranks_per_worker = check_int("ranks_per_worker", ranks_per_worker, least=1)
    if not dist.is_available() or not dist.is_initialized():
        raise ValueError(
            "worker_groups divides the ranks of torch.distributed, which is not initialised; call "
            "torch.distributed.init_process_group() first and start the script with torchrun"
        )
    ranks = dist.get_world_size()
    if ranks % ranks_per_worker:
        raise ValueError(
            f"ranks_per_worker={ranks_per_worker} does not divide the {ranks} ranks; use one of "
            f"{', '.join(str(n) for n in range(1, ranks + 1) if ranks % n == 0)}, or start a "
            f"multiple of {ranks_per_worker} processes"
        )
    from torch.distributed.device_mesh import init_device_mesh  # takes a part of a second

    shape = (ranks // ranks_per_worker, ranks_per_worker)
    mesh = init_device_mesh(_device_type(), shape, mesh_dim_names=("workers", "inside"))
    workers, inside = (mesh[axis].get_group() for axis in ("workers", "inside"))
    for group in (workers, inside):
        take_timeout(group)
    _INSIDE[workers] = inside
    return mesh


def ranks_inside(group: ProcessGroup | None) -> ProcessGroup | None:
    """The ranks of this worker, if `group` is an axis of workers that `worker_groups` has made and
    a worker has several ranks."""
    found = None if group is None else _INSIDE.get(group)
    return found if found is not None and dist.get_world_size(found) > 1 else None


def is_inside(group: ProcessGroup | None) -> bool:
    """Does `group` have the ranks of one worker that `worker_groups` has made?"""
    several = group is not None and dist.get_world_size(group) > 1
    return several and any(group is found for found in _INSIDE.values())


def _device_type() -> str:
    """The accelerator, if the default group has a backend that is made for it; else the CPU."""
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    backends = backends_of(None)
    made_for_it = accelerator is not None and backends.get(accelerator.type) not in (None, "gloo")
    return accelerator.type if accelerator is not None and made_for_it else "cpu"

"""The transport of real runs: a torch.distributed process group (gloo, NCCL)."""

from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.tensor import DTensor

from palsgd.transport import check_agreement


class ProcessGroupTransport:
    """`group` has one rank of every worker; `inside` the ranks of this worker, if several."""

    def __init__(self, group: ProcessGroup | None = None, inside: ProcessGroup | None = None):
        self._group, self.inside = group, inside
        self.worker = dist.get_rank(group)
        self.workers = dist.get_world_size(group)
        self._divides = "nccl" in dist.get_backend_config(group)  # on the fly, for CUDA tensors

    def average(self, tensors: list[Tensor]) -> int:
        if self.workers == 1:
            return 0
        for tensor in tensors:
            if tensor.is_cuda and self._divides:
                dist.all_reduce(tensor, dist.ReduceOp.AVG, group=self._group)
            else:
                dist.all_reduce(tensor, group=self._group)
                tensor.div_(self.workers)
        return sum(tensor.nbytes for tensor in tensors)

    def combine(self, values: Tensor) -> None:
        if self.inside is not None:
            dist.all_reduce(values, group=self.inside)

    def agree(self, settings: dict[str, Any]) -> None:
        # Inside each worker first, then between them: so every rank sees every other's.
        inside = _gathered([(dist.get_rank(), settings)], self.inside) if self.inside else None
        everyone = _gathered(inside or [(dist.get_rank(), settings)], self._group)
        everyone.sort(key=lambda found: found[0])
        check_agreement([s for _, s in everyone], [f"rank {rank}" for rank, _ in everyone])


def _gathered(mine: list[Any], group: ProcessGroup | None) -> list[Any]:
    lists: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(lists, mine, group=group)
    return [item for found in lists for item in found]


def find_transport(params: list[Tensor], group: ProcessGroup | None) -> ProcessGroupTransport:
    """The process group to average over, from the parameters' device mesh where they have one."""
    if not dist.is_available() or not dist.is_initialized():
        raise ValueError(
            "torch.distributed is not initialised; call torch.distributed.init_process_group() "
            "first and start the script with torchrun, or pass transport=palsgd.Alone() to train "
            "with one worker"
        )
    sharded = next((p for p in params if isinstance(p, DTensor)), None)
    if sharded is None:
        return ProcessGroupTransport(group)
    mesh = sharded.device_mesh
    if any(isinstance(p, DTensor) and p.device_mesh != mesh for p in params):
        raise ValueError("the parameters lie on several device meshes; shard them over one mesh")
    replicas = [i for i, placement in enumerate(sharded.placements) if placement.is_replicate()]
    if group is not None and mesh.ndim == 1:
        return ProcessGroupTransport(group, inside=mesh.get_group())
    if group is None and mesh.ndim == 2 and len(replicas) == 1:
        return ProcessGroupTransport(mesh.get_group(replicas[0]), mesh.get_group(1 - replicas[0]))
    raise ValueError(
        f"the parameters are sharded over {mesh} as {sharded.placements}, which has no "
        "single replica axis to average over; use fully_shard with a 2-D mesh (replicas, shards), "
        "or a 1-D mesh of shards and group= for the replicas"
    )

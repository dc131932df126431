"""The transport of real runs: a torch.distributed process group (gloo, NCCL)."""

from concurrent.futures import Future
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.tensor import DTensor

from palsgd.background import Background
from palsgd.transport import Message, check_agreement, coded_mean


class ProcessGroupTransport:
    """`group` has one rank of every worker; `inside` the ranks of this worker, if several."""

    def __init__(self, group: ProcessGroup | None = None, inside: ProcessGroup | None = None):
        self._group, self.inside = group, inside
        self._behind: ProcessGroup | None = None  # for exchanges in the background
        self._background: Background | None = None
        self._flying: WeakKeyDictionary[Message, Future[int]] = WeakKeyDictionary()
        self.worker = dist.get_rank(group)
        self.workers = dist.get_world_size(group)
        self._divides = "nccl" in dist.get_backend_config(group)  # on the fly, for CUDA tensors

    def average(self, tensors: list[Tensor]) -> int:
        return sum(self._mean(tensor, self._group) for tensor in tensors)

    def exchange(self, message: Message) -> int:
        return self._exchange(message, self._group)

    def prepare(self, device: torch.device) -> None:
        """Make what exchanges in the background need: a thread, and a group of their own, as
        they would otherwise meet the main thread's exchanges in an order that differs from rank
        to rank. Every rank must call."""
        if self._behind is None:
            ranks = dist.get_process_group_ranks(self._group or dist.group.WORLD)
            some = len(ranks) < dist.get_world_size()
            group = dist.new_group(ranks, use_local_synchronization=some)
            assert isinstance(group, ProcessGroup)  # this rank is one of them
            self._behind = group
            self._background = Background(device)

    def begin(self, message: Message) -> None:
        assert self._background is not None
        group = self._behind
        self._flying[message] = self._background.submit(lambda: self._exchange(message, group))

    def finish(self, message: Message) -> int:
        return self._flying[message].result()

    def _exchange(self, message: Message, group: ProcessGroup | None) -> int:
        if message.codec is None or self.workers == 1:
            return self._mean(message.values, group)
        coded = coded_mean(message, self.workers)
        chunks = coded.chunks()
        received = torch.empty_like(chunks)
        dist.all_to_all_single(received, chunks, group=group)
        dist.all_gather_into_tensor(chunks.view(-1), coded.mean(received), group=group)
        coded.accept(chunks)
        message.left = coded.left
        return chunks.nbytes

    def _mean(self, tensor: Tensor, group: ProcessGroup | None) -> int:
        if self.workers == 1:
            return 0
        if tensor.is_cuda and self._divides:
            dist.all_reduce(tensor, dist.ReduceOp.AVG, group=group)
        else:
            dist.all_reduce(tensor, group=group)
            tensor.div_(self.workers)
        return tensor.nbytes

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

"""The transport of real runs: a torch.distributed process group (gloo, NCCL)."""

from concurrent.futures import Future
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from palsgd.sharding import is_sharded
from palsgd.transports.background import Background
from palsgd.transports.transport import Message, Transport, check_agreement


class ProcessGroupTransport(Transport):
    """`group` has one rank of every worker. `inside` has the ranks of this worker, if it has
    several."""

    def __init__(self, group: ProcessGroup | None = None, inside: ProcessGroup | None = None):
        self._group, self.inside = group, inside
        self.worker, self.workers = dist.get_rank(group), dist.get_world_size(group)
        self.rank_inside = 0 if inside is None else dist.get_rank(inside)
        # NCCL averages CUDA tensors itself
        self._divides = "nccl" in dist.get_backend_config(group)
        self._behind: ProcessGroupTransport | None = None  # for exchanges in the background
        self._background: Background | None = None
        self._flying: WeakKeyDictionary[Message, Future[int]] = WeakKeyDictionary()

    @property
    def channel(self) -> Any:
        return self._group or dist.group.WORLD

    def mean(self, message: Message) -> None:
        values = message.values
        if self.workers == 1:
            return
        if values.is_cuda and self._divides:
            dist.all_reduce(values, dist.ReduceOp.AVG, group=self._group)
        else:
            dist.all_reduce(values, group=self._group)
            message.divisor = self.workers
            if not message.takes_sum:
                message.divide()

    def scatter(self, rows: Tensor) -> Tensor:
        received = torch.empty_like(rows)
        dist.all_to_all_single(received, rows, group=self._group)
        return received

    def gather(self, row: Tensor) -> Tensor:
        rows = row.new_empty(self.workers, len(row))
        dist.all_gather_into_tensor(rows.view(-1), row.contiguous(), group=self._group)
        return rows

    def prepare(self, device: torch.device) -> None:
        """Make the thread and the process group of exchanges in the background. They need their own
        group, as the order of their exchanges and those of the main thread differs between ranks.
        Every rank must call this."""
        if self._behind is None:
            ranks = dist.get_process_group_ranks(self._group or dist.group.WORLD)
            some = len(ranks) < dist.get_world_size()
            group = dist.new_group(ranks, use_local_synchronization=some)
            assert isinstance(group, ProcessGroup)  # this rank is in the group
            self._behind = ProcessGroupTransport(group)
            self._background = Background(device)

    def start(self, message: Message) -> None:
        if self._behind is None or self._background is None:
            raise RuntimeError(
                "an exchange in the background has no process group; call prepare(device) on "
                "every rank before the first start()"
            )
        behind = self._behind
        self._flying[message] = self._background.submit(lambda: behind.exchange(message))

    def finish(self, message: Message) -> int:
        return self._flying[message].result()

    def combine(self, values: Tensor) -> None:
        if self.inside is not None:
            dist.all_reduce(values, group=self.inside)

    def sum_over_shards(self, values: Tensor) -> None:
        self.combine(values)

    def agree(self, settings: dict[str, Any]) -> None:
        # The ranks inside each worker gather first, then the workers, so every rank has the
        # settings of all.
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
    sharded = next((p for p in params if is_sharded(p)), None)
    if sharded is None:
        return ProcessGroupTransport(group)
    mesh = sharded.device_mesh
    if any(is_sharded(p) and p.device_mesh != mesh for p in params):
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

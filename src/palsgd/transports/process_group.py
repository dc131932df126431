"""The transport of real runs: a torch.distributed process group (gloo, NCCL)."""

from concurrent.futures import Future
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from palsgd.process_groups import backends_of, twin
from palsgd.sharding import is_sharded
from palsgd.transports.background import Background
from palsgd.transports.json_exchange import gathered
from palsgd.transports.levels import check_group, check_places, copies_inside
from palsgd.transports.transport import Message, Transport, check_agreement
from palsgd.transports.waiting import waiting_for, watch_of


class ProcessGroupTransport(Transport):
    """`group` has one rank of every worker. `inside` has the ranks of this worker, if it has
    several. Each of them holds a part of the model if `sharded`, else a copy of it."""

    def __init__(
        self,
        group: ProcessGroup | None = None,
        inside: ProcessGroup | None = None,
        *,
        sharded: bool = False,
    ):
        self.group, self.inside, self.sharded = group, inside, sharded
        self.worker, self.workers = dist.get_rank(group), dist.get_world_size(group)
        self.rank_inside = 0 if inside is None else dist.get_rank(inside)
        # NCCL averages CUDA tensors itself
        self._divides = "nccl" in backends_of(group).values()
        self._behind: ProcessGroupTransport | None = None  # for exchanges in the background
        self._background: Background | None = None
        self._flying: WeakKeyDictionary[Message, Future[int]] = WeakKeyDictionary()
        self._watch = watch_of(group)
        self._watch.names = [f"worker {worker}" for worker in range(self.workers)]
        self._waited_in = self._watch  # the last time that the training loop waited

    @property
    def channel(self) -> Any:
        return self.group or dist.group.WORLD

    def lost(self) -> list[str]:
        return self._waited_in.lost()

    def exchange(self, message: Message) -> int:
        self._waited_in = self._watch
        with self._watch.waiting():
            return self._exchange(message)

    def _exchange(self, message: Message) -> int:
        with self._watch.present(message.values):
            return super().exchange(message)

    def mean(self, message: Message) -> int | None:
        if self.workers == 1:
            return None
        if self.inside is not None and not self.sharded:
            return self._mean_in_parts(message, self.inside)
        self._reduce(message, message.values)
        if not message.takes_sum:
            message.divide()
        return None

    def _mean_in_parts(self, message: Message, inside: ProcessGroup) -> int:
        """The mean of a message of which every rank of this worker has a copy. Each rank exchanges
        one part of it with the other workers and gives the result to the ranks of its worker. So
        the worker sends the message once, and its ranks get the same bits, whatever order the
        exchanges add up in."""
        values, ranks = message.values, dist.get_world_size(inside)
        parts = values.tensor_split(ranks)
        own = parts[self.rank_inside]
        self._reduce(message, own)
        for source, part in enumerate(parts):
            if part.numel():
                dist.broadcast(part, group=inside, group_src=source)
        if not message.takes_sum:
            message.divide()
        return own.nbytes

    def _reduce(self, message: Message, values: Tensor) -> None:
        """Replace `values`, all of the message or a part of it, by their mean over the workers, or
        by the sum, to be divided by the message's divisor."""
        averages = values.is_cuda and self._divides
        message.divisor = 1 if averages else self.workers
        if values.numel():
            operation = dist.ReduceOp.AVG if averages else dist.ReduceOp.SUM
            dist.all_reduce(values, operation, group=self.group)

    def scatter(self, rows: Tensor) -> Tensor:
        received = torch.empty_like(rows)
        dist.all_to_all_single(received, rows, group=self.group)
        return received

    def gather(self, row: Tensor) -> Tensor:
        rows = row.new_empty(self.workers, len(row))
        dist.all_gather_into_tensor(rows.view(-1), row.contiguous(), group=self.group)
        return rows

    def prepare(self, device: torch.device) -> None:
        """Make the thread and the process group of exchanges in the background. They need their own
        group, as the order of their exchanges and those of the main thread differs between ranks.
        Every rank must call this."""
        if self._behind is None:
            inside = None if self.inside is None else twin(self.inside)
            self._behind = ProcessGroupTransport(twin(self.group), inside, sharded=self.sharded)
            self._background = Background(device)

    def start(self, message: Message) -> None:
        if self._behind is None or self._background is None:
            raise RuntimeError(
                "an exchange in the background has no process group; call prepare(device) on "
                "every rank before the first start()"
            )
        behind = self._behind
        self._flying[message] = self._background.submit(lambda: behind._exchange(message))

    def finish(self, message: Message) -> int:
        assert self._behind is not None
        self._waited_in = self._behind._watch
        with self._waited_in.waiting():
            return self._flying[message].result()

    def gather_inside(self, row: Tensor) -> Tensor:
        if self.inside is None:
            return row[None]
        rows = row.new_empty(dist.get_world_size(self.inside), len(row))
        with waiting_for(self.inside):
            dist.all_gather_into_tensor(rows.view(-1), row.contiguous(), group=self.inside)
        return rows

    def sum_over_shards(self, values: Tensor) -> None:
        if self.sharded:
            with waiting_for(self.inside):
                dist.all_reduce(values, group=self.inside)

    def agree(self, settings: dict[str, Any]) -> None:
        # The ranks inside each worker gather first, then the workers, so every rank has the
        # settings of all.
        mine = [(dist.get_rank(), settings)]
        inside = mine if self.inside is None else _end_to_end(gathered(mine, self.inside, _read))
        everyone = _end_to_end(gathered(inside, self.group, _read))
        everyone.sort(key=lambda found: found[0])
        check_agreement([s for _, s in everyone], [f"rank {rank}" for rank, _ in everyone])


def _read(found: Any) -> list[tuple[int, dict[str, Any]]]:
    """The settings of some ranks, as `agree` sends them."""
    return [(int(rank), dict(settings)) for rank, settings in found]


def _end_to_end(lists: list[list[Any]]) -> list[Any]:
    return [item for each in lists for item in each]


def find_transport(
    params: list[Tensor], group: ProcessGroup | None, wrapper: ProcessGroup | None = None
) -> ProcessGroupTransport:
    """The process group to average over, from the parameters' device mesh where they have one.
    `wrapper` is the group of the model's DistributedDataParallel, if it has one."""
    if not dist.is_available() or not dist.is_initialized():
        raise ValueError(
            "torch.distributed is not initialised; call torch.distributed.init_process_group() "
            "first and start the script with torchrun, or pass transport=palsgd.Alone() to train "
            "with one worker"
        )
    sharded = next((p for p in params if is_sharded(p)), None)
    if sharded is None:
        return ProcessGroupTransport(group, copies_inside(group, wrapper))
    mesh = sharded.device_mesh
    if any(is_sharded(p) and p.device_mesh != mesh for p in params):
        raise ValueError("the parameters lie on several device meshes; shard them over one mesh")
    replicas = [i for i, placement in enumerate(sharded.placements) if placement.is_replicate()]
    if group is not None and mesh.ndim == 1:
        inside = mesh.get_group()
        check_group(group)
        check_places(inside, group, "fully_shard")
        return ProcessGroupTransport(group, inside, sharded=True)
    if group is None and mesh.ndim == 2 and len(replicas) == 1:
        inside = mesh.get_group(1 - replicas[0])
        return ProcessGroupTransport(mesh.get_group(replicas[0]), inside, sharded=True)
    if group is not None:
        raise ValueError(
            f"the parameters are sharded over {mesh}, whose replica axis is averaged over, and "
            "group= is given too; leave out group=, or use fully_shard with the 1-D mesh "
            'palsgd.worker_groups(ranks_per_worker)["inside"]'
        )
    raise ValueError(
        f"the parameters are sharded over {mesh} as {sharded.placements}, which has no "
        "single replica axis to average over; use fully_shard with a 2-D mesh (replicas, shards), "
        "or a 1-D mesh of shards and group= for the replicas"
    )

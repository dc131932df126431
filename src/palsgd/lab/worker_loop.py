"""The model, the optimizer and the batches of this process, whose steps are trained or timed."""

import inspect
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.nn.parallel import DistributedDataParallel
from torch.utils import _pytree as pytree

import palsgd
from palsgd import references
from palsgd.lab.batch_order import BatchOrder
from palsgd.lab.data.sharding import Changes
from palsgd.lab.factory import build_optimizer, low_precision
from palsgd.lab.forecast import work_of
from palsgd.lab.settings import Settings
from palsgd.lab.workload import Workload
from palsgd.process_groups import twin
from palsgd.progress import ProgressBar, Whole


class WorkerLoop:
    """Every rank makes one. A worker has one rank or several, which share its batches and average
    every gradient. `settings` are in steps, not in epochs. Optimizers that share a process group
    compare before each exchange whose it is, which costs a message; programs that are timed beside
    each other have a group each. With a `transport` there is no process group, and every rank is a
    worker, whose number the transport knows when the optimizer is built."""

    def __init__(
        self,
        settings: Settings,
        workload: Workload,
        *,
        own_group: bool = False,
        transport: palsgd.Transport | None = None,
    ):
        self.settings, self.workload, self._transport = settings, workload, transport
        self._order = BatchOrder(settings)
        self.changes: Changes = ()  # of the number of workers, so far
        self.world = settings.workers if transport else dist.get_world_size()
        self.steps = settings.total_steps(workload.examples)
        torch.manual_seed(settings.seed)
        self.net = workload.new_model().to(workload.device)
        self._own_group: Any = twin(None) if own_group and self.world > 1 else None
        self.model, group = self._wrapped()
        self.opt: palsgd.LocalOptimizer = build_optimizer(
            settings, self.steps, self.model, group, transport
        )
        torch.manual_seed(settings.seed + self.rank)  # dropout differs between ranks
        self.autocast = low_precision(settings, workload.device)

    @property
    def rank(self) -> int:
        return dist.get_rank() if self._transport is None else self._transport.worker

    def _wrapped(self) -> tuple[nn.Module, ProcessGroup | None]:
        """The model that the loop calls, and the group of the optimizer."""
        if self.settings.ranks_per_worker > 1:
            mesh = palsgd.worker_groups(self.settings.ranks_per_worker)
            inside, workers = mesh["inside"].get_group(), mesh["workers"].get_group()
            return DistributedDataParallel(self.net, process_group=inside), workers
        if self.world == 1 or self._transport is not None:
            return self.net, None
        return DistributedDataParallel(self.net, process_group=self._own_group), self._own_group

    def progress(self, *, quiet: bool, whole: Whole | None) -> ProgressBar:
        """The bar of the steps that are left, as a part of the `whole` that the run belongs to."""
        settings, short = self.settings, references.short
        title = f"{short(settings.workload)} {short(settings.method)}"
        work = 1.0 if whole is None else work_of([settings])
        return ProgressBar(
            title, self.steps, start=self.opt.clock, quiet=quiet, whole=whole, work=work
        )

    def close(self) -> None:
        """End a program of which nothing is kept. One that is dropped unsynced would be warned
        about."""
        self.opt.finish()
        if self._own_group is not None:
            dist.destroy_process_group(self._own_group)

    def batches(self) -> Iterator[Any]:
        """This rank's parts of its worker's batches, by index, so that a resumed run continues with
        the next batch."""
        ranks = self.settings.ranks_per_worker
        dealt = {"changes": self.changes} if self.changes and self.deals_anew else {}
        while True:
            batch = self.workload.batch(
                worker=self.rank // ranks,
                workers=self.world // ranks,
                size=self.settings.batch_size,
                index=self._order(self.opt.gradient_steps),
                **dealt,
            )
            yield split_batch(batch, ranks)[self.rank % ranks]

    @property
    def deals_anew(self) -> bool:
        """Does the workload know what to deal out after a change of the number of workers? One of
        the user's own may not."""
        return "changes" in inspect.signature(self.workload.batch).parameters

    def gradient(self, batch: Any) -> Tensor:
        """The loss; the gradient is where the optimizer finds it."""
        parts = self.settings.micro_batches
        total = torch.zeros((), device=self.workload.device)
        for number, part in enumerate(split_batch(batch, parts)):
            with self._exchanging(last=number == parts - 1):
                with self.autocast():
                    loss = self.workload.loss(self.model, part) / parts
                loss.backward()
            total += loss.detach()
        return total

    def _exchanging(self, *, last: bool) -> AbstractContextManager[Any]:
        """Where DDP averages gradients, it does so once, with the last part of a batch."""
        if last or not isinstance(self.model, DistributedDataParallel):
            return nullcontext()
        return self.model.no_sync()


def split_batch(batch: Any, parts: int) -> list[Any]:
    if parts == 1:
        return [batch]
    leaves, shape = pytree.tree_flatten(batch)
    return [
        pytree.tree_unflatten(list(each), shape)
        for each in zip(*(leaf.chunk(parts) for leaf in leaves), strict=True)
    ]

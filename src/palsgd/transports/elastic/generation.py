"""The process group of the workers of one meeting. It is never changed: another list of workers
gets another group."""

from datetime import timedelta
from typing import Any

import torch
from torch import Tensor
from torch.distributed import (
    AllreduceOptions,
    BroadcastOptions,
    PrefixStore,
    ProcessGroupGloo,
    ReduceOp,
    Store,
)

from palsgd.transports.transport import Message, Transport


class Generation(Transport):
    """Exchanges of `workers` workers, of which this is the one at the place `worker`.

    torch can rebuild a registered group in place since 2.15. A plain gloo group in a part of the
    store of its own does the same with every torch, and needs nothing from the groups before it.
    """

    def __init__(self, store: Store, name: str, place: int, workers: int, timeout: float):
        self.worker, self.workers = place, workers
        # torch's stubs do not know what a group that is not registered can do
        self._group: Any = ProcessGroupGloo(
            PrefixStore(name, store), place, workers, timedelta(seconds=timeout)
        )

    def mean(self, message: Message) -> None:
        options = AllreduceOptions()
        options.reduceOp = ReduceOp.SUM
        message.divisor = self.workers
        if message.values.numel() and self.workers > 1:
            self._group.allreduce([message.values], options).wait()
        if not message.takes_sum:
            message.divide()

    def scatter(self, rows: Tensor) -> Tensor:
        received = torch.empty_like(rows)
        self._group.alltoall_base(received, rows, [], []).wait()
        return received

    def gather(self, row: Tensor) -> Tensor:
        rows = row.new_empty(self.workers, len(row))
        self._group._allgather_base(rows.view(-1), row.contiguous()).wait()
        return rows

    def broadcast(self, values: Tensor, source: int) -> None:
        """Replace `values` by those of the worker at the place `source`."""
        options = BroadcastOptions()
        options.rootRank = source
        if values.numel() and self.workers > 1:
            self._group.broadcast([values], options).wait()

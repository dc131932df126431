"""The memory of messages. It is kept between syncs, as new memory causes page faults, which on a
fast link take as long as the arithmetic."""

import torch
from torch import Tensor

from palsgd.flat import Bucket, Buckets
from palsgd.offload import Home
from palsgd.replica import Replica


class MessageMemory:
    def __init__(
        self, replica: Replica, home: Home, *, bucket_size: int, tail: int, keeps_all: bool
    ):
        self._layout, self.bucket_size = replica.layout, bucket_size
        self._tail = tail  # numbers that may be sent behind the first bucket
        self._keeps_all = keeps_all  # is memory larger than a bucket kept too?
        self.home = home
        self.template = torch.empty(0, dtype=replica.dtype, device=home.storage)
        self._storage: Tensor | None = None
        self._buckets: dict[tuple[range, int], Buckets] = {}
        self._when_sent: Tensor | None = None

    @property
    def model(self) -> range:
        """All elements of the model."""
        return range(self._layout.size)

    def buckets(self, part: range, *, whole: bool = False) -> Buckets:
        """The buckets of some elements. `whole=True`: one bucket, however large."""
        width = max(1, len(part) if whole else min(self.bucket_size, len(part)))
        if self._storage is None or len(self._storage) < width + self._tail:
            storage = self.home.empty(width + self._tail, self.template.dtype)
            if width > self.bucket_size and not self._keeps_all:
                return Buckets(self._layout, part, width, storage)
            self._storage = storage
            self._buckets.clear()
        if (part, width) not in self._buckets:
            self._buckets[part, width] = Buckets(self._layout, part, width, self._storage)
        return self._buckets[part, width]

    def renew(self) -> None:
        """Leave the present memory to an exchange that may still write into it."""
        self._storage = None
        self._buckets.clear()

    def with_tail(self, values: Tensor, tail: Tensor) -> Tensor:
        """`values` with `tail` behind them, in the memory of `values` if it has room, else in new
        memory."""
        base = values._base if values._base is not None else values
        room = base.numel() - values.numel()
        if base.dim() == 1 and values.storage_offset() == 0 and room >= len(tail):
            message = base[: len(values) + len(tail)]
            message[len(values) :] = tail
            return message
        return torch.cat([values, tail])

    def local_when_sent(self, part: range) -> Bucket:
        """The memory that keeps a fragment of the local model as it was sent."""
        if self._when_sent is None or len(self._when_sent) < len(part):
            self._when_sent = self.home.empty(len(part), self.template.dtype)
        return Bucket(self._layout, part.start, self._when_sent[: len(part)])

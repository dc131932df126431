"""The transport of a run that has one worker."""

from typing import Any

from torch import Tensor

from palsgd.transports.transport import Message, Transport


class Alone(Transport):
    """The transport of a single worker: every mean is the worker's own value, and no process group
    is needed.

    Example:
        >>> import torch, palsgd
        >>> model = torch.nn.Linear(2, 1)
        >>> inner = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> opt = palsgd.DiLoCo(model, inner, sync_every=4, transport=palsgd.Alone())
        >>> opt.transport.workers
        1
    """

    shares_code = True

    def mean(self, message: Message) -> int:
        return 0

    def scatter(self, rows: Tensor) -> Tensor:
        return rows.clone()

    def gather(self, row: Tensor) -> Tensor:
        return row.clone()[None]

    def agree(self, settings: dict[str, Any]) -> None:
        pass

"""The transport of a run that has one worker."""

from typing import Any

from torch import Tensor

from palsgd.transports.transport import Message, Transport


class Alone(Transport):
    """A single worker has nobody to exchange with, and needs no process group."""

    def mean(self, message: Message) -> int:
        return 0

    def scatter(self, rows: Tensor) -> Tensor:
        return rows.clone()

    def gather(self, row: Tensor) -> Tensor:
        return row.clone()[None]

    def agree(self, settings: dict[str, Any]) -> None:
        pass

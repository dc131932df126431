"""The exchange of workers in one process, whose messages a simulator collects."""

from collections.abc import Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor

from palsgd.transports.transport import Message, Transport, check_agreement


class SimulatedTransport(Transport):
    """The number of one of K simulated workers. The simulator exchanges the messages, so the
    methods that exchange refuse.

    All workers of a simulation share the list `settings`, in which `agree` compares their settings.
    """

    shares_code = True

    def __init__(self, worker: int, workers: int, settings: list[dict[str, Any]]):
        self.worker, self.workers, self._settings = worker, workers, settings

    def mean(self, message: Message) -> NoReturn:
        _refuse()

    def scatter(self, rows: Tensor) -> NoReturn:
        _refuse()

    def gather(self, row: Tensor) -> NoReturn:
        _refuse()

    def exchange(self, message: Message) -> NoReturn:
        _refuse()

    def finish(self, message: Message) -> int:
        """The simulator has exchanged the message when it was started."""
        return message.handed_over(self.workers)

    def agree(self, settings: dict[str, Any]) -> None:
        self._settings.append(settings)
        check_agreement(self._settings, [f"worker {k}" for k in range(len(self._settings))])


def _refuse() -> NoReturn:
    raise RuntimeError("a simulated worker is driven by palsgd.simulate, not by opt.step()")


def average_in_memory(messages: Sequence[Message]) -> int:
    """Exchange the messages of K workers, in the order of the workers, with the results of K
    transports bit for bit. Return the bytes that each worker would hand over."""
    first = messages[0]
    if first.gather:
        rows = torch.stack([message.values for message in messages])
        for message in messages:
            message.rows = rows
    elif len(messages) > 1:
        average = _plain_mean if first.codec is None else _coded_mean
        average(messages)
    return first.handed_over(len(messages))


def _plain_mean(messages: Sequence[Message]) -> None:
    total = messages[0].values.clone()
    for message in messages[1:]:
        total += message.values
    total /= len(messages)
    for message in messages:
        message.values.copy_(total)


def _coded_mean(messages: Sequence[Message]) -> None:
    coded = [message.segments(k, len(messages)) for k, message in enumerate(messages)]
    for segment in zip(*coded, strict=True):
        type(segment[0]).in_memory(segment)
    for message in messages:
        message.keep_residue()
    for message in messages[1:]:  # every worker would decode the same bytes
        message.values.copy_(messages[0].values)

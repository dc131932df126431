"""The contract of a transport: it averages tensors over the workers. Nothing else is sent."""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from palsgd.compression import Codec, CodedMean, Residue


@dataclass(eq=False)
class Message:
    """Values to be replaced by their mean over the workers, all of which bring one like it.

    With a `codec` the mean is that of coded values (see palsgd.compression), but for the last
    `exact` of them; whoever exchanged it leaves in `left` what was not sent.
    """

    values: Tensor
    exact: int = 0
    codec: Codec | None = None
    residue: Residue | None = None
    left: Residue | None = None


def coded_mean(message: Message, workers: int) -> CodedMean:
    assert message.codec is not None
    return CodedMean(message.values, message.exact, message.codec, message.residue, workers)


class Transport(Protocol):
    worker: int  # which worker this is, from 0
    workers: int  # how many there are

    def average(self, tensors: list[Tensor]) -> int:
        """Replace each tensor by its mean over all workers, in place; the same bits on every
        worker. Returns the bytes this worker handed over to be sent."""
        ...

    def exchange(self, message: Message) -> int:
        """`average` for a message, which may be coded."""
        ...

    def prepare(self, device: torch.device) -> None:
        """Be ready for exchanges that run while the training loop goes on. All workers call."""
        ...

    def begin(self, message: Message) -> None:
        """Start the exchange of `message` and return at once."""
        ...

    def finish(self, message: Message) -> int:
        """Wait for an exchange that was begun; may be called again."""
        ...

    def combine(self, values: Tensor) -> None:
        """Sum a small integer tensor over the ranks that together are this worker, in place.
        A worker of one rank has nothing to do."""
        ...

    def agree(self, settings: dict[str, Any]) -> None:
        """Raise a ValueError on every worker, naming worker, setting and both values, unless
        all workers call with equal settings."""
        ...


@dataclass(frozen=True)
class Begin:
    """A core's wish that the exchange of a message be started, to be finished later."""

    message: Message


@dataclass(frozen=True)
class Finish:
    """A core's wish to have the mean that it asked for with Begin."""

    message: Message


Request = Message | Begin | Finish  # what a core yields; a Message is to be exchanged at once


def fulfil(transport: Transport, request: Request) -> int:
    """Do what a core asks for; the bytes that were sent."""
    if isinstance(request, Begin):
        transport.begin(request.message)
        return 0
    if isinstance(request, Finish):
        return transport.finish(request.message)
    if request.codec is None:
        return transport.average([request.values])
    return transport.exchange(request)


class Alone:
    """The transport of a single worker: nobody to exchange with, no process group needed."""

    worker, workers = 0, 1

    def average(self, tensors: list[Tensor]) -> int:
        return 0

    def exchange(self, message: Message) -> int:
        return 0

    def prepare(self, device: torch.device) -> None:
        pass

    def begin(self, message: Message) -> None:
        pass

    def finish(self, message: Message) -> int:
        return 0

    def combine(self, values: Tensor) -> None:
        pass

    def agree(self, settings: dict[str, Any]) -> None:
        pass


_ambient: ContextVar["Transport | None"] = ContextVar("ambient transport", default=None)


@contextmanager
def ambient(transport: Transport) -> Iterator[None]:
    """Optimizers built inside use `transport` unless told otherwise."""
    token = _ambient.set(transport)
    try:
        yield
    finally:
        _ambient.reset(token)


def ambient_transport() -> Transport | None:
    return _ambient.get()


def check_agreement(settings: list[dict[str, Any]], names: list[str]) -> None:
    """The first setting in which a worker differs from the first one, as a ValueError."""
    for name, theirs in zip(names, settings, strict=True):
        for setting, value in settings[0].items():
            if theirs.get(setting) != value:
                raise ValueError(
                    f"{setting} differs between workers: {name} has {theirs.get(setting)!r}, "
                    f"{names[0]} has {value!r}; give every worker the same"
                )

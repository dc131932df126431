"""The requests that a worker's generator yields to its caller, a training process or a
simulator."""

from collections.abc import Generator
from dataclasses import dataclass

from palsgd.transports.transport import Message, Transport


@dataclass(frozen=True)
class Start:
    """Request: start the exchange of a message, which a later `Finish` ends."""

    message: Message


@dataclass(frozen=True)
class Finish:
    """Request: wait for the result of an exchange that `Start` began."""

    message: Message


@dataclass(frozen=True)
class Meet:
    """Request: find out who takes part in the next exchange. An elastic transport answers with
    `LeftOutError` if the others have gone on without this worker."""

    position: str  # what this worker is about to exchange
    patient: bool = False  # is there no deadline?


@dataclass(frozen=True)
class Settle:
    """Request: agree that all workers have all of an exchange. An elastic transport answers with
    `RepeatError` if one of them has not."""


@dataclass(frozen=True)
class Admit:
    """Request: let newcomers in, with the state as it is now."""


@dataclass(frozen=True)
class Join:
    """Request: wait until the others let this worker in, and take their state."""

    fresh: bool  # has this worker no inner state of its own?


class RepeatError(Exception):
    """A worker was lost in an exchange, which those who are left repeat. It is no RuntimeError, as
    nothing has gone wrong for this worker."""


class LeftOutError(Exception):
    """The others have gone on without this worker."""


# what a worker yields; a Message is exchanged at once
Request = Message | Start | Finish | Meet | Settle | Admit | Join
Exchange = Generator[Request, int, None]


def fulfil(transport: Transport, request: Request) -> int:
    """Do what a request asks for. Returns the bytes that were handed over."""
    if isinstance(request, Start):
        transport.start(request.message)
        return 0
    if isinstance(request, Finish):
        return transport.finish(request.message)
    if isinstance(request, Meet):
        transport.meet(request.position, patient=request.patient)
        return 0
    if isinstance(request, Settle):
        transport.settle()
        return 0
    assert isinstance(request, Message)  # the optimizer itself lets workers in
    return transport.exchange(request)

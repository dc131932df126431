"""The requests that a worker's generator yields to its caller, a training process or a
simulator."""

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


Request = Message | Start | Finish  # what a worker yields; a Message is exchanged at once


def fulfil(transport: Transport, request: Request) -> int:
    """Do what a request asks for. Returns the bytes that were handed over."""
    if isinstance(request, Start):
        transport.start(request.message)
        return 0
    if isinstance(request, Finish):
        return transport.finish(request.message)
    return transport.exchange(request)

"""What a core asks of whoever drives it: a training process, or a simulator of many workers."""

from dataclasses import dataclass

from palsgd.transports.transport import Message, Transport


@dataclass(frozen=True)
class Start:
    """A core's wish that the exchange of a message be started, to be finished later."""

    message: Message


@dataclass(frozen=True)
class Finish:
    """A core's wish to have the result that it asked for with Start."""

    message: Message


Request = Message | Start | Finish  # what a core yields; a Message is to be exchanged at once


def fulfil(transport: Transport, request: Request) -> int:
    """Do what a core asks for; the bytes that were handed over."""
    if isinstance(request, Start):
        transport.start(request.message)
        return 0
    if isinstance(request, Finish):
        return transport.finish(request.message)
    return transport.exchange(request)

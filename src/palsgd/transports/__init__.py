"""Transports: how the messages of the workers are exchanged."""

from palsgd.transports.elastic import ElasticTransport
from palsgd.transports.in_memory import SimulatedTransport, average_in_memory
from palsgd.transports.process_group import ProcessGroupTransport, find_transport
from palsgd.transports.requests import Finish, Request, Start, fulfil
from palsgd.transports.single import Alone
from palsgd.transports.transport import (
    Message,
    Transport,
    UnsupportedError,
    ambient,
    ambient_transport,
    check_agreement,
)

__all__ = [
    "Alone",
    "ElasticTransport",
    "Finish",
    "Message",
    "ProcessGroupTransport",
    "Request",
    "SimulatedTransport",
    "Start",
    "Transport",
    "UnsupportedError",
    "ambient",
    "ambient_transport",
    "average_in_memory",
    "check_agreement",
    "find_transport",
    "fulfil",
]

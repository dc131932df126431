"""Data-parallel training over links too slow for an all-reduce at every step.

A name of this package is imported when it is first used. The command line is in this package too:
its help texts need no torch, and importing torch takes a second.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from palsgd import checkpoint, events, methods
    from palsgd.auto_interval import Auto
    from palsgd.cluster import Cluster
    from palsgd.codecs import Codec
    from palsgd.errors import ConsensusError, NonFiniteError, SyncError
    from palsgd.leaving import leave_on_sigterm
    from palsgd.ledger import Ledger
    from palsgd.loop import until
    from palsgd.method import Facts, Method, Part, Payload, Scalar
    from palsgd.optimizer import DDP, PALSGD, DiLoCo, LocalOptimizer, LocalSGD
    from palsgd.outer import nesterov
    from palsgd.schedule import round_plan
    from palsgd.simulator.simulate import simulate, simulate_many
    from palsgd.transports import Alone, ElasticTransport, Message, Transport
    from palsgd.two_levels import worker_groups

__version__ = "0.2.0"

__all__ = [
    "DDP",
    "PALSGD",
    "Alone",
    "Auto",
    "Cluster",
    "Codec",
    "ConsensusError",
    "DiLoCo",
    "ElasticTransport",
    "Facts",
    "Ledger",
    "LocalOptimizer",
    "LocalSGD",
    "Message",
    "Method",
    "NonFiniteError",
    "Part",
    "Payload",
    "Scalar",
    "SyncError",
    "Transport",
    "checkpoint",
    "events",
    "leave_on_sigterm",
    "methods",
    "nesterov",
    "round_plan",
    "simulate",
    "simulate_many",
    "until",
    "worker_groups",
]

# The module that defines each name. A name that is not in this table is the name of a module.
_MODULES = {
    "DDP": "optimizer",
    "PALSGD": "optimizer",
    "Alone": "transports",
    "Auto": "auto_interval",
    "Cluster": "cluster",
    "Codec": "codecs",
    "ConsensusError": "errors",
    "DiLoCo": "optimizer",
    "ElasticTransport": "transports",
    "Facts": "method",
    "Ledger": "ledger",
    "LocalOptimizer": "optimizer",
    "LocalSGD": "optimizer",
    "Message": "transports",
    "Method": "method",
    "NonFiniteError": "errors",
    "Part": "method",
    "Payload": "method",
    "Scalar": "method",
    "SyncError": "errors",
    "Transport": "transports",
    "leave_on_sigterm": "leaving",
    "nesterov": "outer",
    "round_plan": "schedule",
    "simulate": "simulator",
    "simulate_many": "simulator",
    "until": "loop",
    "worker_groups": "two_levels",
}


if not TYPE_CHECKING:  # mypy would otherwise give a misspelt name the type Any

    def __getattr__(name: str) -> Any:
        if name in _MODULES:
            found = getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)
            globals()[name] = found
            return found
        try:
            return import_module(f"{__name__}.{name}")
        except ModuleNotFoundError as error:
            # the module exists, but it imports one that does not
            if error.name != f"{__name__}.{name}":
                raise
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}") from None


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})

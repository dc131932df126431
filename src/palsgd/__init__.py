"""Data-parallel training over links too slow for an all-reduce at every step."""

import importlib
from typing import TYPE_CHECKING, Any

from palsgd import events
from palsgd.auto_interval import Auto
from palsgd.codecs import Codec
from palsgd.errors import ConsensusError, NonFiniteError, SyncError
from palsgd.ledger import Ledger
from palsgd.loop import until
from palsgd.method import Facts, Method, Part, Payload, Scalar
from palsgd.optimizer import DDP, PALSGD, DiLoCo, LocalOptimizer, LocalSGD
from palsgd.outer import nesterov
from palsgd.schedule import round_plan
from palsgd.transports.single import Alone
from palsgd.transports.transport import Message, Transport

if TYPE_CHECKING:
    from palsgd import checkpoint, methods
    from palsgd.cluster import Cluster
    from palsgd.simulator import simulate, simulate_many

__version__ = "0.1.0"

# Loaded when they are first used: a training loop needs none of them.
_LAZY = {
    "Cluster": "palsgd.cluster",
    "checkpoint": "palsgd.checkpoint",
    "methods": "palsgd.methods",
    "simulate": "palsgd.simulator",
    "simulate_many": "palsgd.simulator",
}


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module 'palsgd' has no attribute {name!r}")
    module = importlib.import_module(_LAZY[name])
    found = module if _LAZY[name] == f"palsgd.{name}" else getattr(module, name)
    globals()[name] = found
    return found


def __dir__() -> list[str]:
    return sorted({*globals(), *_LAZY})


__all__ = [
    "DDP",
    "PALSGD",
    "Alone",
    "Auto",
    "Cluster",
    "Codec",
    "ConsensusError",
    "DiLoCo",
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
    "methods",
    "nesterov",
    "round_plan",
    "simulate",
    "simulate_many",
    "until",
]

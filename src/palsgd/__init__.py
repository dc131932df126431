"""Data-parallel training over links too slow for an all-reduce at every step.

The names of this package are imported when they are first used: the help texts of the command line
live in it too and need no torch, which takes a second to import.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from palsgd import checkpoint
    from palsgd.cluster import Cluster
    from palsgd.draws import round_plan
    from palsgd.errors import ConsensusError, NonFiniteError, SyncError
    from palsgd.interval import Auto
    from palsgd.ledger import Ledger
    from palsgd.loop import until
    from palsgd.method import Method
    from palsgd.optimizer import DDP, PALSGD, DiLoCo, LocalOptimizer, LocalSGD
    from palsgd.outer import nesterov
    from palsgd.simulator.simulate import simulate, simulate_many
    from palsgd.transport import Alone, Transport

__version__ = "0.1.0"

__all__ = [
    "DDP",
    "PALSGD",
    "Alone",
    "Auto",
    "Cluster",
    "ConsensusError",
    "DiLoCo",
    "Ledger",
    "LocalOptimizer",
    "LocalSGD",
    "Method",
    "NonFiniteError",
    "SyncError",
    "Transport",
    "checkpoint",
    "nesterov",
    "round_plan",
    "simulate",
    "simulate_many",
    "until",
]

# Where each name is defined; a name that is not here is a module's.
_MODULES = {
    "DDP": "optimizer",
    "PALSGD": "optimizer",
    "Alone": "transport",
    "Auto": "interval",
    "Cluster": "cluster",
    "ConsensusError": "errors",
    "DiLoCo": "optimizer",
    "Ledger": "ledger",
    "LocalOptimizer": "optimizer",
    "LocalSGD": "optimizer",
    "Method": "method",
    "NonFiniteError": "errors",
    "SyncError": "errors",
    "Transport": "transport",
    "nesterov": "outer",
    "round_plan": "draws",
    "simulate": "simulator",
    "simulate_many": "simulator",
    "until": "loop",
}


if not TYPE_CHECKING:  # else a misspelt name would be of type Any

    def __getattr__(name: str) -> Any:
        if name in _MODULES:
            found = getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)
            globals()[name] = found
            return found
        try:
            return import_module(f"{__name__}.{name}")
        except ModuleNotFoundError as error:
            if error.name != f"{__name__}.{name}":  # the module is there, and misses another
                raise
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}") from None


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})

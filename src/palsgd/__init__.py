"""Data-parallel training over links too slow for an all-reduce at every step."""

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
from palsgd.simulator import simulate, simulate_many
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

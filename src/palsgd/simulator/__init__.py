"""The simulator: K workers in one process on one device."""

from palsgd.simulator.checkpoints import Checkpoints
from palsgd.simulator.program import Program
from palsgd.simulator.result import Result
from palsgd.simulator.simulate import programs, simulate, simulate_many
from palsgd.simulator.warm_start import SharedWarmUp

__all__ = [
    "Checkpoints",
    "Program",
    "Result",
    "SharedWarmUp",
    "programs",
    "simulate",
    "simulate_many",
]

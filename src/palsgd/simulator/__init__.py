"""The simulator: K workers in one process on one device."""

from palsgd.simulator.checkpoints import Checkpoints
from palsgd.simulator.program import Program
from palsgd.simulator.result import Result
from palsgd.simulator.simulate import programs, simulate, simulate_many

__all__ = ["Checkpoints", "Program", "Result", "programs", "simulate", "simulate_many"]

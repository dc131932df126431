"""The simulator: K workers in one process on one device."""

from palsgd.simulator.result import Result
from palsgd.simulator.simulate import simulate, simulate_many

__all__ = ["Result", "simulate", "simulate_many"]

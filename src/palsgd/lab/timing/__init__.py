"""Seconds: what a step takes, measured in interleaved blocks or projected by `palsgd.Cluster`.

Training says how many steps a quality takes, this package how many seconds a step takes. A `Pace`
turns the first into the second; nothing else does.
"""

from palsgd.lab.timing.pace import PARTS, Pace
from palsgd.lab.timing.paces import paces
from palsgd.lab.timing.shares import shares

__all__ = ["PARTS", "Pace", "paces", "shares"]

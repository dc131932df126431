"""A model of time: workers, links, and the wall-clock time of a method on them."""

from palsgd.cluster.cluster import Cluster
from palsgd.cluster.events import Projection, TimeSimulation
from palsgd.cluster.wall_clock import WallClock
from palsgd.cluster.work import Work

__all__ = ["Cluster", "Projection", "TimeSimulation", "WallClock", "Work"]

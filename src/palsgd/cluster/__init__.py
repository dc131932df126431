"""A model of time: workers, links, and the wall-clock time of a method on them."""

from palsgd.cluster.attached import WallClock
from palsgd.cluster.cluster import Cluster
from palsgd.cluster.events import Clockwork, Projection
from palsgd.cluster.work import Work

__all__ = ["Clockwork", "Cluster", "Projection", "WallClock", "Work"]

"""Workers in network namespaces of their own, behind links as slow as wanted (Linux, root)."""

from palsgd.lab.links.kernel import unavailable
from palsgd.lab.links.link import Link
from palsgd.lab.links.network import Network
from palsgd.lab.links.processes import Finished

__all__ = ["Finished", "Link", "Network", "unavailable"]

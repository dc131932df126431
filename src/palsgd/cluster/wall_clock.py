"""A cluster attached to a simulation: when its exchanges would have been there."""

from collections.abc import Callable
from typing import TYPE_CHECKING

from torch import nn

from palsgd.cluster.cluster import Cluster
from palsgd.cluster.events import TimeSimulation
from palsgd.cluster.gradient_counts import Planned
from palsgd.cluster.work import Work
from palsgd.method import Method

if TYPE_CHECKING:
    from palsgd.optimizer import LocalOptimizer


class WallClock:
    """Follows one run: the work is what its optimizers are built to do, the gradients those of
    their plans."""

    def __init__(self, cluster: Cluster, *, steps: int, seed: int):
        self._cluster, self._steps, self._seed = cluster, steps, seed
        self._found: tuple[Work, Method] | None = None
        self._clockwork: TimeSimulation | None = None

    def watching(
        self, build: Callable[[nn.Module], "LocalOptimizer"]
    ) -> Callable[[nn.Module], "LocalOptimizer"]:
        """`build`, whose optimizers this looks at."""

        def built(model: nn.Module) -> "LocalOptimizer":
            optimizer = build(model)
            if hasattr(optimizer, "method"):  # else the engine will say what is wrong with it
                self._found = Work.of(optimizer), optimizer.method
            return optimizer

        return built

    def seconds(self, clock: int) -> float:
        """When the last worker is past this step and what is due there; never for an earlier step
        than asked for before."""
        if self._clockwork is None:
            assert self._found is not None
            work, method = self._found
            counts = Planned(method, self._cluster.workers, work.stops)
            self._clockwork = TimeSimulation(
                self._cluster, work, end=self._steps, counts=counts, seed=self._seed
            )
        return self._clockwork.run_until(clock)

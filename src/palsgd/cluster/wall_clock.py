"""A cluster attached to a simulation: when its exchanges would have been there."""

from collections.abc import Callable
from typing import TYPE_CHECKING

from torch import nn

from palsgd.cluster.cluster import Cluster
from palsgd.cluster.events import TimeSimulation
from palsgd.cluster.gradient_counts import Planned
from palsgd.cluster.work import Work

if TYPE_CHECKING:
    from palsgd.optimizer import LocalOptimizer


class WallClock:
    """Follows one run: the work is what its optimizers are built to do, the gradients those of
    their plans."""

    def __init__(self, cluster: Cluster, *, steps: int, seed: int):
        self._cluster, self._steps, self._seed = cluster, steps, seed
        self._optimizer: LocalOptimizer | None = None  # the one that was built last
        self._clockwork: TimeSimulation | None = None

    def watching(
        self, build: Callable[[nn.Module], "LocalOptimizer"]
    ) -> Callable[[nn.Module], "LocalOptimizer"]:
        """`build`, whose optimizers this looks at."""

        def built(model: nn.Module) -> "LocalOptimizer":
            optimizer = build(model)
            if hasattr(optimizer, "method"):  # else the engine will say what is wrong with it
                self._optimizer = optimizer
            return optimizer

        return built

    def seconds(self, clock: int) -> float:
        """When the last worker is past this step and what is due there; never for an earlier step
        than asked for before."""
        optimizer = self._optimizer
        assert optimizer is not None
        if self._clockwork is None:
            self._clockwork = TimeSimulation(
                self._cluster,
                Work.of(optimizer),
                end=self._steps,
                counts=Planned(optimizer.method, optimizer.facts),
                seed=self._seed,
            )
        return self._clockwork.run_until(clock, optimizer.schedule.with_end(self._steps))

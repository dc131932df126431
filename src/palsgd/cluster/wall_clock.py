"""The wall-clock times that the exchanges of a simulation would have on a cluster."""

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
    """Follows one run. The work is that of the run's optimizer, and the numbers of gradients are
    those of its plans."""

    def __init__(self, cluster: Cluster, *, steps: int, seed: int):
        self._cluster, self._steps, self._seed = cluster, steps, seed
        self._optimizer: LocalOptimizer | None = None  # the one that was built last
        self._clockwork: TimeSimulation | None = None

    def watching(
        self, build: Callable[[nn.Module], "LocalOptimizer"]
    ) -> Callable[[nn.Module], "LocalOptimizer"]:
        """A function that calls `build` and keeps the optimizer that it returns."""

        def built(model: nn.Module) -> "LocalOptimizer":
            optimizer = build(model)
            if hasattr(optimizer, "method"):  # the engine raises an error for any other object
                self._optimizer = optimizer
            return optimizer

        return built

    def seconds(self, clock: int) -> float:
        """The instant at which the last worker has done everything that is due at `clock`. Calls
        must be in the order of the clock."""
        optimizer = self._optimizer
        assert optimizer is not None
        if self._clockwork is None:
            self._clockwork = TimeSimulation(
                self._cluster,
                Work.of(optimizer),
                end=self._steps,
                counts=Planned(
                    optimizer.method, optimizer.facts, optimizer._worker.course.speeds_in
                ),
                seed=self._seed,
            )
        return self._clockwork.run_until(clock, optimizer.schedule.with_end(self._steps))

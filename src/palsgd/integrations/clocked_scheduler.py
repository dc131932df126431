"""A framework's scheduler of the learning rate, stepped with the clock and not by the framework."""

from typing import Any

from palsgd.local_optimizer import LocalOptimizer


class ClockedScheduler:
    """Steps a scheduler once per step of the clock, steps without data included.

    The framework, or a loop written for it, calls `scheduler.step()` once per gradient step. From
    now on that does nothing. The scheduler itself stays, as the framework reports its learning
    rates and saves it.

    Args:
        scheduler: the scheduler, bound to the palsgd optimizer or the inner one.
        steps: how many steps the scheduler was made for, if they are not those of the clock.
        ticks: the clock at which it has taken them.
    """

    def __init__(self, scheduler: Any, *, steps: int = 0, ticks: int = 0):
        self._kind = type(scheduler)
        # Not an attribute of the scheduler, as those are saved with it.
        scheduler.__class__ = type(self._kind.__name__, (self._kind,), {"step": _leave})
        self._schedulers = [scheduler]  # as torch's schedulers call those inside them
        self._steps, self._ticks = steps, ticks
        self._ticked = self._taken = 0

    @property
    def optimizer(self) -> Any:
        return self._schedulers[0].optimizer

    def step(self) -> None:
        self._ticked += 1
        due = self._ticked
        if self._ticks:
            due = min(self._ticked * self._steps // self._ticks, self._steps)
        if self._taken < due:
            self._taken += 1
            self._kind.step(self._schedulers[0])

    def state_dict(self) -> dict[str, Any]:
        inside = self._schedulers[0].state_dict()
        return {"ticked": self._ticked, "taken": self._taken, "scheduler": inside}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._ticked, self._taken = state["ticked"], state["taken"]
        self._schedulers[0].load_state_dict(state["scheduler"])


def _leave(scheduler: Any, *args: Any, **kwargs: Any) -> None:
    """The step() of a scheduler that the optimizer steps."""


def follow_clock(opt: LocalOptimizer, scheduler: Any, *, steps: int = 0, ticks: int = 0) -> None:
    """Have `opt` step a scheduler that a framework or its user has made."""
    opt.set_scheduler(ClockedScheduler(scheduler, steps=steps, ticks=ticks))  # type: ignore[arg-type]

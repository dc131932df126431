"""The contract of a method: what a round looks like, what happens between gradient steps,
what a sync does with the mean."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch.optim import Optimizer

if TYPE_CHECKING:
    from palsgd.replica import Replica


@dataclass(frozen=True, kw_only=True)
class Method:
    """As it stands, the plainest answers: H gradient steps, nothing between, one outer step.

    A new method overrides what it does differently, in a file of its own, and gets a row in
    the table of tests/library/test_every_method.py. It never sees a message or a process.
    """

    sync_every: int
    warmup_steps: float = 0  # steps of plain DDP before the first round; math.inf: never a round

    @property
    def gradient_share(self) -> float:
        """The share of a round's steps that use a gradient; their lr is divided by it."""
        return 1.0

    def plan(self, *, worker: int, round: int, stops: Sequence[int] = ()) -> list[bool]:
        """The steps of a round: True where a step needs no data, False for a gradient step.
        `stops` are those inside the round after which the workers meet, with delay or fragments."""
        return [False] * self.sync_every

    def check(self, replica: "Replica") -> None:
        """Refuse, with a ValueError, learning rates this method cannot work with."""

    def local_rule(
        self, replica: "Replica", rates: list[list[float]]
    ) -> tuple[float, float] | None:
        """Change the local model after a gradient step and the data-free steps that follow it.

        `rates[i][g]` is the learning rate of parameter group g at the i-th of those steps; the
        list is empty when another gradient step follows at once. Returns the range of the
        mixing weights used, for the ledger, or None.
        """
        return None

    def global_rule(self, outer: Optimizer) -> None:
        """Update the anchor, whose tensors are `outer`'s parameters and carry the mean outer
        gradient as their `.grad`."""
        outer.step()

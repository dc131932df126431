"""Changes of the number of workers in a run, as config.yaml and checkpoints record them."""

from collections.abc import Iterable, Mapping
from itertools import pairwise
from operator import mul
from typing import Any, NamedTuple

import numpy as np


class Change(NamedTuple):
    """Other workers, or other batches of theirs, from a step on. Pairs are before and after."""

    step: int  # the clock of the checkpoint from which the run went on
    workers: tuple[int, int]
    batch_size: tuple[int, int]  # of a worker
    taken: tuple[int, ...]  # gradients of each worker before, since the run began
    begins: tuple[int, ...]  # where that count of each worker after begins

    @property
    def is_one(self) -> bool:
        """Is anything other than before? A worker that has lost its disk begins where another
        stands."""
        same = self.workers[0] == self.workers[1] and self.batch_size[0] == self.batch_size[1]
        return not (same and self.taken == self.begins)

    def as_dict(self) -> dict[str, Any]:
        return {
            name: list(value) if isinstance(value, tuple) else value
            for name, value in self._asdict().items()
        }

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> "Change":
        """What `as_dict` made."""
        lists = {name: tuple(map(int, values[name])) for name in cls._fields if name != "step"}
        found = cls(step=int(values["step"]), **lists)  # type: ignore[arg-type]
        if (len(found.taken), len(found.begins)) != found.workers or len(found.batch_size) != 2:
            raise ValueError(f"workers={found.workers} have no such lists")
        return found


def changes_in(record: Mapping[str, Any]) -> tuple[Change, ...]:
    """Those of a run, from its config.yaml or from what a checkpoint holds of it."""
    try:
        return tuple(Change.from_dict(each) for each in record.get("changes") or ())
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise ValueError(
            f"`changes` are not changes of the number of workers ({error!r})"
        ) from None


def changes_of(lines: Iterable[Mapping[str, Any]], batch_size: int) -> tuple[Change, ...]:
    """Those of a run whose workers left and came at syncs, from its lines.

    Example:
        >>> lines = [{"step": step, "gradient_steps": step, "workers": k}
        ...          for step, k in ((0, 2), (8, 2), (16, 1))]
        >>> [(change.step, change.workers) for change in changes_of(lines, batch_size=4)]
        [(8, (2, 1))]
    """
    found: list[Change] = []
    for before, line in pairwise(lines):
        pair = (int(before["workers"]), int(line["workers"]))
        if pair[0] != pair[1]:
            taken, begins = ((int(before["gradient_steps"]),) * count for count in pair)
            found.append(Change(int(before["step"]), pair, (batch_size,) * 2, taken, begins))
    return tuple(found)


def said_of(change: Change, *, dealt: bool) -> str:
    """In words. `dealt`: are the examples of the epoch under way dealt out anew?"""
    own = _went(*change.batch_size)
    both = _went(*map(mul, change.workers, change.batch_size))
    said = (
        f"{change.workers[0]} workers until step {change.step}, then {change.workers[1]}: the "
        f"batch of a worker {own}, that of all {both}"
    )
    if dealt:
        return said
    return (
        f"{said}; this workload does not take `changes`, so that some examples of the epoch under "
        "way may come twice, and some not at all"
    )


def _went(before: int, now: int) -> str:
    return f"stays {now}" if before == now else f"goes from {before} to {now}"


def examples_seen(config: Mapping[str, Any], gradients: np.ndarray) -> np.ndarray:
    """By all workers of a run together, after so many gradients of worker 0."""
    sizes, starts = [], [0]
    now = int(config.get("workers") or 1), int(config.get("batch_size") or 1)
    for change in changes_in(config):
        sizes.append(change.workers[0] * change.batch_size[0])
        starts.append(change.taken[0])
        now = change.workers[1], change.batch_size[1]
    sizes.append(now[0] * now[1])
    ends = [*starts[1:], np.inf]
    return sum(
        (size * np.clip(gradients - start, 0, end - start)
         for size, start, end in zip(sizes, starts, ends, strict=True)),
        start=np.zeros(len(gradients)),
    )  # fmt: skip

"""Changes of the number of workers in a run, as config.yaml and checkpoints record them."""

from collections.abc import Mapping
from typing import Any, NamedTuple


class Change(NamedTuple):
    """Other workers, or other batches of theirs, from a step on. Pairs are before and after."""

    step: int  # the clock of the checkpoint from which the run went on
    workers: tuple[int, int]
    batch_size: tuple[int, int]  # of a worker
    taken: tuple[int, ...]  # gradients of each worker before, since the run began
    begins: tuple[int, ...]  # where that count of each worker after begins

    def as_dict(self) -> dict[str, Any]:
        return {
            name: list(value) if isinstance(value, tuple) else value
            for name, value in self._asdict().items()
        }

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> "Change":
        """What `as_dict` made."""
        pairs = {name: tuple(values[name]) for name in cls._fields if name != "step"}
        return cls(step=values["step"], **pairs)


def changes_in(record: Mapping[str, Any]) -> tuple[Change, ...]:
    """Those of a run, from its config.yaml or from what a checkpoint holds of it."""
    return tuple(Change.from_dict(each) for each in record.get("changes") or ())

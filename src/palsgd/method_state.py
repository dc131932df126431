"""The states of a method: tensors of the model's shapes, and numbers."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from palsgd.anchor import Anchor
from palsgd.digest import chained, digest
from palsgd.flat import FlatModel
from palsgd.method import Method, state_names, state_scalars
from palsgd.replica import Replica
from palsgd.tensors import RESERVED, WorkerTensors

WHOLE = "the averaged inner state is whole"  # 1 once every fragment of it is known, else 0


def averaged_name(name: str) -> str:
    """The name under which the mean of an inner optimizer's tensors is sent and kept."""
    return f"mean of the inner {name}"


class MethodState:
    """The states that differ between workers (`local`) and the states that are equal on all
    (`common`). `averaged` are the names of the inner optimizer's tensors whose means are kept among
    the common states."""

    def __init__(
        self, method: Method, replica: Replica, anchor: Anchor, averaged: Sequence[str] = ()
    ):
        check_names(method)

        def new() -> FlatModel:
            return FlatModel(
                replica.layout,
                anchor.ranges,
                dtype=replica.dtype,
                device=anchor.home.storage,
                pinned=anchor.home.pinned,
            )

        self.local = {name: new() for name in state_names(method.local_state)}
        self.common = {name: new() for name in state_names(method.global_state)}
        self.local_scalars = state_scalars(method.local_state)
        self.common_scalars = state_scalars(method.global_state)
        self.common |= {averaged_name(name): new() for name in averaged}
        self.common_scalars |= {WHOLE: 0.0} if averaged else {}
        self.initial_scalars = dict(self.local_scalars)
        self._initial_common = dict(self.common_scalars)

    def sources(self, fragment: int | None) -> dict[str, Callable[[], Any]]:
        """The tensors by name, of the whole model or of a fragment."""
        return {
            name: partial(_tensors, kept, fragment)
            for name, kept in (self.local | self.common).items()
        }

    @property
    def scalars(self) -> dict[str, float]:
        return self.local_scalars | self.common_scalars

    def keep_scalars(self, w: WorkerTensors) -> None:
        """Keep the numbers that a rule has assigned to `w`."""
        for kept in (self.local_scalars, self.common_scalars):
            for name in kept:
                kept[name] = float(getattr(w, name))

    @torch.no_grad()
    def reset_local(self) -> None:
        for kept in self.local.values():
            kept.flat.zero_()
        self.local_scalars.update(self.initial_scalars)

    @torch.no_grad()
    def reset(self) -> None:
        """Set all states to their values before the first sync."""
        self.reset_local()
        for kept in self.common.values():
            kept.flat.zero_()
        self.common_scalars.update(self._initial_common)

    def digest(self, fragment: int | None) -> int:
        """The digest of the states that must be equal on all workers."""
        kept, numbers = self.common.values(), list(self.common_scalars.values())
        found = [digest(k.flat if fragment is None else k.part(fragment)) for k in kept]
        return chained([*found, digest(torch.tensor(numbers, dtype=torch.float64))])


def _tensors(kept: FlatModel, fragment: int | None) -> list[Tensor]:
    return kept.views if fragment is None else kept.pieces(fragment)


def check_names(method: Method) -> None:
    """Raise for a state whose name is that of another attribute of `w`."""
    for entry in (*method.local_state, *method.global_state):
        name = entry if isinstance(entry, str) else entry.name
        if hasattr(WorkerTensors, name) or name in RESERVED:
            raise ValueError(
                f"{method} has a state {name!r}, which w.{name} already means something else for; "
                "give it another name"
            )

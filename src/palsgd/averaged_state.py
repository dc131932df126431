"""Tensors of the inner optimizer that are averaged at a sync, as the option average_state names
them."""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from palsgd.flat import FlatModel
from palsgd.method import Part
from palsgd.method_state import WHOLE, MethodState, averaged_name
from palsgd.replica import Replica
from palsgd.sharding import local_tensor
from palsgd.tensors import WorkerTensors, mix_


class AveragedState:
    """Sends the named tensors with each sync, and sets them to the mean that comes back.

    The means of the last sync are kept beside the anchor, among the states that all workers share.
    They are compared, saved and resumed with these.
    """

    def __init__(
        self, names: Sequence[str], inner: Optimizer, replica: Replica, states: MethodState
    ):
        self.names, self._inner, self._replica, self._states = names, inner, replica, states

    def _kept(self, name: str) -> FlatModel:
        return self._states.common[averaged_name(name)]

    def _found(self, name: str) -> Iterator[tuple[int, dict[str, Any], Tensor]]:
        """Each parameter's number, its inner state, and its tensor of this name, where it has
        one."""
        state = self._inner.state
        for number, param in enumerate(self._replica.params):
            own = state.get(param, {})
            if isinstance(own.get(name), Tensor):
                yield number, own, local_tensor(own[name])

    # -- a sync --------------------------------------------------------------------------------

    def parts(self, w: WorkerTensors) -> list[Part]:
        """What is sent beside the method's own parts, without a codec."""
        return [Part(averaged_name(name), self._sent(name, w), coded=False) for name in self.names]

    def _sent(self, name: str, w: WorkerTensors) -> list[Tensor]:
        self._check(name)
        # a worker that has taken no gradient step yet has no such tensors
        return w.inner[name] or getattr(w, averaged_name(name))

    def _check(self, name: str) -> None:
        params = self._replica.params
        for number, _, tensor in self._found(name):
            if tensor.shape != local_tensor(params[number]).shape:
                raise ValueError(
                    f"average_state={self.names}: the inner optimizer's {name!r} has the shape "
                    f"{tuple(tensor.shape)} where its parameter has {tuple(params[number].shape)}; "
                    "name tensors of the parameters' shapes"
                )
        kinds = {key for state in self._inner.state.values() for key in state}
        if kinds and name not in kinds:
            raise ValueError(
                f"average_state={self.names}: the inner optimizer has no {name!r}; its state has "
                f"{', '.join(sorted(map(str, kinds)))}"
            )

    def take(self, parts: dict[str, list[Tensor]]) -> dict[str, list[Tensor]]:
        """The means by name, removed from the reduced parts."""
        return {name: parts.pop(averaged_name(name)) for name in self.names}

    def apply(
        self, fragment: int, means: dict[str, list[Tensor]], w: WorkerTensors, blend: float | None
    ) -> None:
        """Keep the means of a fragment, and set the inner optimizer's tensors to them. With `blend`
        a tensor keeps that share of itself, as the local model does."""
        for name, mean in means.items():
            kept = self._kept(name).pieces(fragment)
            torch._foreach_copy_(kept, mean)
            if w.inner[name]:
                mix_(w.inner[name], kept, 1.0 - (blend or 0.0))
        w.inner.put_back()

    def round_ended(self) -> None:
        """All fragments have been synced, so that the kept means are whole."""
        self._states.common_scalars[WHOLE] = 1.0

    # -- the global model ----------------------------------------------------------------------

    @torch.no_grad()
    def open(self) -> None:
        """Keep the tensors with which the local phase begins. After a warm-up they are equal on all
        workers; without one there are none yet."""
        for name in self.names:
            for number, _, tensor in self._found(name):
                self._kept(name).views[number].copy_(tensor)
                self._states.common_scalars[WHOLE] = 1.0

    def held(self) -> list[Tensor]:
        """The inner optimizer's tensors of these names."""
        return [tensor for name in self.names for _, _, tensor in self._found(name)]

    @torch.no_grad()
    def copy_to_local(self) -> None:
        """Set the inner optimizer's tensors to the kept means."""
        for name in self.names:
            for number, _, tensor in self._found(name):
                tensor.copy_(self._kept(name).views[number])

    def hide_unknown(self) -> list[tuple[dict[str, Any], str, Tensor]]:
        """Take the tensors away from the inner optimizer where there is no mean of them yet: then
        the global model is the one with which the local phase began, and had none. Returns them
        with their places."""
        if self._states.common_scalars[WHOLE]:
            return []
        found = [(own, name, own[name]) for name in self.names for _, own, _ in self._found(name)]
        for own, name, _ in found:
            del own[name]
        return found

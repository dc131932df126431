"""The bytes of the tensors that are alive, counted from one operation to the next."""

import weakref
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class Allocations(TorchDispatchMode):
    """Inside, `alive` is the bytes of the storages that operations have made and that a tensor
    still has, and `peak` the most there were."""

    def __init__(self) -> None:
        super().__init__()
        self.alive = self.peak = 0
        self._tensors: dict[int, int] = {}  # by storage

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = {_storage(t) for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)}
        found = func(*args, **kwargs or {})
        for tensor in tree_leaves(found):
            if isinstance(tensor, torch.Tensor):
                self._saw(tensor, new=_storage(tensor) not in given)
        return found

    def _saw(self, tensor: torch.Tensor, *, new: bool) -> None:
        key = _storage(tensor)
        if key not in self._tensors:
            if not new:
                return  # made before the counting began
            self._tensors[key] = 0
            self.alive += tensor.untyped_storage().nbytes()
            self.peak = max(self.peak, self.alive)
        self._tensors[key] += 1
        weakref.finalize(tensor, self._gone, key, tensor.untyped_storage().nbytes())

    def _gone(self, key: int, nbytes: int) -> None:
        self._tensors[key] -= 1
        if not self._tensors[key]:
            del self._tensors[key]
            self.alive -= nbytes


def _storage(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()

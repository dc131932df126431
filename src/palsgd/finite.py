"""Whether tensors have inf or nan."""

from collections.abc import Iterable

import torch
from torch import Tensor


def all_finite(tensors: Iterable[Tensor]) -> bool:
    # A norm reads each tensor once, and it is inf or nan if any element is. It may also overflow on
    # finite elements, so every element is checked if some norm is not finite.
    found = [t._values() if t.is_sparse else t for t in tensors]
    found = [t.float() if t.itemsize == 1 else t for t in found if t.numel()]  # float8 has no norm
    if not found or bool(
        torch.stack([n.float() for n in torch._foreach_norm(found)]).isfinite().all()
    ):
        return True
    return all(bool(t.isfinite().all()) for t in found)

"""Recognises tensors of which every rank holds a shard, without importing their class.

Importing torch.distributed.tensor takes a noticeable part of a second, and a program that has not
imported it holds no DTensor.
"""

import sys
from typing import TYPE_CHECKING, Any, TypeGuard

from torch import Tensor

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor


def is_sharded(tensor: Any) -> TypeGuard["DTensor"]:
    """Whether `tensor` is a DTensor."""
    kind = getattr(sys.modules.get("torch.distributed.tensor"), "DTensor", None)
    return kind is not None and isinstance(tensor, kind)


def local_tensor(tensor: Tensor) -> Tensor:
    """This rank's part of `tensor`: all of it, unless it is sharded."""
    return tensor._local_tensor if is_sharded(tensor) else tensor

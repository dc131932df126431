"""Fewer passes over memory in a sync on CPUs, with the bits of the plain operations.

A sync over a fast link takes about as long as its passes over memory: each operation on a whole
model reads it from memory anew, as no cache of a core holds it.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim import SGD, Optimizer
from torch.optim import optimizer as torch_hooks

from palsgd.anchor import folded, words
from palsgd.flat import Bucket, FlatModel

PIECE = 1 << 17  # elements; three of such pieces, 1.5 MiB in fp32, lie in the L2 cache of a core


class Displaced(NamedTuple):
    """What was found while a bucket was filled."""

    squares: Tensor  # the squared norm of the displacement
    digest: int | None  # of the anchor in the range of the bucket, if asked for


def displaced(
    bucket: Bucket, anchor: FlatModel, local: list[Tensor], *, with_digest: bool
) -> Displaced:
    """Fill a bucket with the anchor minus the local model.

    On a CPU the norm reads each piece of the displacement, and the digest each piece of the anchor,
    while the subtraction has left it in the cache, which saves two passes.
    """
    if bucket.flat.device.type != "cpu":
        bucket.subtract(anchor.flat, anchor.views, local)
        return Displaced(torch.linalg.vector_norm(bucket.flat).square(), None)
    minuend, norms, total = bucket.part_of(anchor.flat), [], 0
    for piece in _pieces(bucket, bucket.subtract_in_order(anchor.flat, anchor.views, local, PIECE)):
        norms.append(torch.linalg.vector_norm(bucket.flat[piece]))
        if with_digest:
            total += words(minuend[piece])
    return Displaced(torch.stack(norms).square().sum(), folded(total) if with_digest else None)


def _pieces(bucket: Bucket, filled: Iterator[int]) -> Iterator[slice]:
    """Pieces of at least PIECE elements but for the last, each as soon as it is filled. All begin
    at an even element, and so at an 8-byte word, which the digest needs."""
    start, size = 0, bucket.flat.numel()
    for stop in filled:
        if stop - start >= PIECE and stop < size:
            yield slice(start, stop - stop % 2)
            start = stop - stop % 2
    yield slice(start, size)


# -- the division of the sum -----------------------------------------------------------------------


def can_divide(outer: Optimizer) -> bool:
    """Can the step of this outer optimizer divide gradients on its way, with the same bits?

    The optimizers that `nesterov` and `plain_average` make can. One of another kind cannot; and
    what else reads the gradients, such as a hook, must find the mean there and not the sum.
    """
    if type(outer) is not SGD or {"step", "grad_scale", "found_inf"} & vars(outer).keys():
        return False
    return not _has_hooks(outer) and all(_is_plain(group) for group in outer.param_groups)


def _has_hooks(outer: Optimizer) -> bool:
    own = (outer._optimizer_step_pre_hooks, outer._optimizer_step_post_hooks)
    common = (torch_hooks._global_optimizer_pre_hooks, torch_hooks._global_optimizer_post_hooks)
    return any(own) or any(common)


def _is_plain(group: dict[str, Any]) -> bool:
    odd = group["weight_decay"] or group["dampening"] or group["maximize"]
    return bool(group["fused"]) and not odd and not group["differentiable"]


@contextmanager
def divided_step(outer: Optimizer, divisor: int) -> Iterator[None]:
    """Steps of `outer` inside divide its gradients first.

    The kernel of the fused step divides each element when it has read it, which saves the pass of
    a division. torch has this for gradients that were scaled against underflow.
    """
    if divisor == 1:
        yield
        return
    scaled: Any = outer
    scaled.grad_scale = torch.tensor(float(divisor))
    try:
        yield
    finally:
        del scaled.grad_scale

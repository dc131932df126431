"""Operations of a sync on CPUs with fewer passes over memory and bit-equal results.

A sync over a fast link takes about as long as its passes over memory. Each operation on a whole
model reads the model from memory again, as the model is larger than a core's cache.
"""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim import SGD, Optimizer
from torch.optim import optimizer as torch_hooks

from palsgd.digest import Digest, block_of, folded, sum_of_words, total
from palsgd.flat import Bucket, FlatModel
from palsgd.offload import Window

PIECE = 1 << 17  # elements; three such pieces, 1.5 MiB in fp32, fit into the L2 cache of a core


class Displaced(NamedTuple):
    """What `displaced` computes while it fills a bucket."""

    squares: Tensor  # the squared norm of the displacement
    digest: int | None  # of the anchor in the bucket's range; None unless asked for
    moved: int | None  # 32 bits of the displacement, 0 if it is 0; None unless asked for


def displaced(
    bucket: Bucket,
    anchor: FlatModel,
    local: list[Tensor],
    *,
    with_digest: bool,
    with_moved: bool = False,
) -> Displaced:
    """Fill a bucket with the anchor minus the local model.

    On a CPU the norm reads each piece of the displacement, and the digests each piece of the anchor
    and of the displacement, right after the subtraction of that piece. The piece is then still in
    the cache, which saves three passes.
    """
    if bucket.flat.device.type != "cpu":
        bucket.subtract(anchor.flat, anchor.views, local)
        squares = torch.linalg.vector_norm(bucket.flat).square()
        whole = total(bucket.part_of(anchor.flat)) if with_digest else None
        return _displaced(squares, whole, sum_of_words(bucket.flat) if with_moved else None)
    minuend, norms, found, moved = bucket.part_of(anchor.flat), [], Digest(), []
    for piece in _pieces(bucket, bucket.subtract_in_order(anchor.flat, anchor.views, local, PIECE)):
        norms.append(torch.linalg.vector_norm(bucket.flat[piece]))
        if with_digest:
            found.add(minuend[piece])
        if with_moved:
            moved.append(sum_of_words(bucket.flat[piece]))
    return _displaced(
        torch.stack(norms).square().sum(),
        found.total() if with_digest else None,
        torch.stack(moved).sum() if with_moved else None,
    )


def _displaced(squares: Tensor, digest: Tensor | None, moved: Tensor | None) -> Displaced:
    """The digests as numbers, both read from the device at once."""
    totals = [total for total in (digest, moved) if total is not None]
    numbers = iter(torch.stack(totals).tolist() if totals else [])
    found = [None if total is None else folded(next(numbers)) for total in (digest, moved)]
    return Displaced(squares, *found)


def displaced_in_windows(
    bucket: Bucket,
    anchor: FlatModel,
    local: list[Tensor],
    cut: Iterable[Window],
    *,
    with_digest: bool,
    with_moved: bool = False,
) -> Displaced:
    """The same for an anchor and a bucket in host memory. The subtraction is done on the device of
    the local model."""
    squares = []
    for window in cut:
        here = window.copy(anchor.flat)
        here.flat.sub_(window.read(local, here.flat.dtype).flat)
        squares.append(torch.linalg.vector_norm(here.flat).square())
        bucket.part(window.place).copy_(here.flat)
    whole = total(bucket.part_of(anchor.flat)) if with_digest else None
    moved = sum_of_words(bucket.flat) if with_moved else None
    return _displaced(torch.stack(squares).sum().to(bucket.flat.device), whole, moved)


def _pieces(bucket: Bucket, filled: Iterator[int]) -> Iterator[slice]:
    """Pieces of whole blocks, as the digest needs, each as soon as it is filled; the last may be
    shorter."""
    start, size, block = 0, bucket.flat.numel(), block_of(bucket.flat)
    for stop in filled:
        if stop - start >= block and stop < size:
            end = stop - (stop - start) % block
            yield slice(start, end)
            start = end
    yield slice(start, size)


# -- the division of the sum -----------------------------------------------------------------------


def can_divide(outer: Optimizer) -> bool:
    """Can the step of this outer optimizer divide its gradients itself, with bit-equal results?

    The optimizers that `nesterov` and `plain_average` make can. Other optimizers cannot. An
    optimizer with hooks cannot either, as a hook must find the mean in the gradients and not the
    sum.
    """
    if type(outer) is not SGD or {"grad_scale", "found_inf"} & vars(outer).keys():
        return False
    # a scheduler wraps the step of its optimizer in a function that only notes the call
    if "step" in vars(outer) and not hasattr(outer.step, "_wrapped_by_lr_sched"):
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
    """Inside, a step of `outer` divides the gradients by `divisor` first.

    The kernel of the fused step divides each element after reading it, which saves one pass. torch
    has this division for gradients that a GradScaler has scaled.
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

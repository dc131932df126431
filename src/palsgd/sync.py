"""One synchronization: Delta = mean_k(x - x_k), x <- OuterOPT(x, Delta), x_k <- x."""

import time
from collections.abc import Generator
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.optim import Optimizer

from palsgd.layout import Buckets
from palsgd.roll_call import Attendance

if TYPE_CHECKING:
    from palsgd.core import Core

Exchange = Generator[list[Tensor], int, None]


def synchronize(core: "Core") -> Exchange:
    """First every message, then every change, so a lost peer cannot leave half a sync behind.

    A worker that lost a peer after the second of five messages, had it applied them one by
    one, would hold two fifths of the new global model and three of the old. So the means are
    only collected while messages are still to come. They need a place: one bucket if the model
    fits into one, else the local model, which the sync is about to overwrite anyway; should the
    exchange fail then, the local model goes back to the anchor and the round is lost, never
    the global model. A low-precision model cannot hold the means and gets one large bucket.
    """
    replica, anchor = core.replica, core.anchor
    replica.check_unchanged()
    local = replica.local()
    whole = any(t.dtype != replica.dtype for t in local)
    buckets = core.buckets(whole=whole)
    several, parked = len(buckets.ranges) > 1, False
    start, bytes_before = core.watch.now(), core.ledger.bytes_sent
    squares, contributors = anchor.flat.new_zeros(()), core.workers
    try:
        for number, bucket in enumerate(buckets.ranges):
            bucket.subtract(anchor.flat, anchor.views, local)
            squares += torch.linalg.vector_norm(bucket.flat).square()
            if number == 0:
                seen_all = not several and bool(squares.isfinite())
                finite = (seen_all or _all_finite(local)) and core.buffers.finite()
                mine = core.attendance(finite=finite)
            if not mine.finite:  # some rank of this worker has seen inf or nan
                bucket.flat.zero_()
            if number == 0:
                extras = yield from _exchange_first(core, buckets, mine)
                contributors = core.judge(extras)
            else:
                core.count_message((yield [bucket.flat]))
            if contributors < core.workers:
                bucket.flat.mul_(core.workers / contributors)
            if several:
                parked = True
                bucket.write(local)
    except BaseException:
        if parked:
            anchor.give()
        raise
    if parked:
        means = [replica.layout.dense(i, t.detach()) for i, t in enumerate(local)]
    else:
        means = replica.layout.views(buckets.ranges[0].flat)
    _outer_step(core, means)
    core.buffers.settle(extras[core.roll_call.size :], core.workers, contributors)
    if not mine.finite:
        forget_nonfinite(core.inner)
    core.watch.add("sync_s", start, core.watch.now())
    core.record_sync(float(squares.sqrt()), core.ledger.bytes_sent - bytes_before)


def _exchange_first(
    core: "Core", buckets: Buckets, mine: Attendance
) -> Generator[list[Tensor], int, Tensor]:
    """The first bucket, with what all must know before anything is applied behind it: the roll
    call and the buffers. Returns the mean of those."""
    extras = core.roll_call.encode(core.worker, mine, core.like)
    if core.buffers.averaged:
        sent = core.buffers.encode(core.worker, core.like, finite=mine.finite)
        extras = torch.cat([extras, sent])
    message, place = buckets.first_message(extras)
    began = time.perf_counter()
    core.count_message((yield [message]))
    extras.copy_(place)
    core.exchange_s = time.perf_counter() - began
    return extras


def _outer_step(core: "Core", means: list[Tensor]) -> None:
    for param, mean in zip(core.anchor.params, means, strict=True):
        param.grad = mean
    try:
        core.method.global_rule(core.outer)
    finally:
        for param in core.anchor.params:
            param.grad = None
    core.anchor.give()


def _all_finite(tensors: list[Tensor]) -> bool:
    # A norm reads each tensor once and is inf or nan if any element is. It may also overflow on
    # finite ones; only then is every element looked at.
    norms = torch._foreach_norm([t for t in tensors if t.numel()])
    if not norms or bool(torch.stack([n.float() for n in norms]).isfinite().all()):
        return True
    return all(bool(t.isfinite().all()) for t in tensors)


def forget_nonfinite(inner: Optimizer) -> None:
    """Drop inner state that holds inf or nan: it would spoil the next round as well."""
    for state in inner.state.values():
        tensors = [v for v in state.values() if isinstance(v, Tensor) and v.is_floating_point()]
        if not all(bool(t.isfinite().all()) for t in tensors):
            state.clear()

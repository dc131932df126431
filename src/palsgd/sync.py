"""One synchronization: Delta = mean_k(x - x_k), x <- OuterOPT(x, Delta), x_k <- x."""

import time
from collections.abc import Generator
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.optim import Optimizer

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
    replica, anchor, layout = core.replica, core.anchor, core.replica.layout
    replica.check_unchanged()
    local = replica.local()
    fits = layout.size <= core.bucket_size or any(t.dtype != replica.dtype for t in local)
    width = layout.size if fits else core.bucket_size
    start = core.watch.now()
    mine = core.attendance(finite=_all_finite(local) and core.buffers.finite())
    tail = torch.cat(
        [
            core.roll_call.encode(core.worker, mine, anchor.flat),
            core.buffers.encode(core.worker, anchor.flat) * mine.finite,
        ]
    )
    bucket = anchor.flat.new_empty(width + tail.numel())
    squares = anchor.flat.new_zeros(())
    contributors, bytes_before = core.workers, core.ledger.bytes_sent
    try:
        for low in range(0, max(layout.size, 1), max(width, 1)):
            mean = bucket[: min(width, layout.size - low)]
            if mine.finite:
                layout.subtract(anchor.flat, local, low, mean)
                squares += torch.linalg.vector_norm(mean).square()
            else:
                mean.zero_()
            if low > 0:
                core.count_message((yield [mean]))
            else:
                yield from _exchange_first(core, bucket[: mean.numel() + tail.numel()], tail)
                contributors = core.judge(tail)
            if contributors < core.workers:
                mean.mul_(core.workers / contributors)
            if not fits:
                layout.write(local, low, mean)
    except BaseException:
        if not fits:
            anchor.give()
        raise
    means = layout.views(bucket[: layout.size]) if fits else [t.detach() for t in local]
    _outer_step(core, means)
    core.buffers.decode(tail[core.roll_call.size :], core.workers, contributors)
    if not mine.finite:
        forget_nonfinite(core.inner)
    core.watch.add("sync_s", start, core.watch.now())
    core.record_sync(float(squares.sqrt()), core.ledger.bytes_sent - bytes_before)


def _exchange_first(core: "Core", message: Tensor, tail: Tensor) -> Exchange:
    """The message that carries the roll call; `tail` gets its mean."""
    place = message[message.numel() - tail.numel() :]
    place.copy_(tail)
    began = time.perf_counter()
    core.count_message((yield [message]))
    tail.copy_(place)
    core.exchange_s = time.perf_counter() - began


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

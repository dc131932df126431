"""One synchronization: Delta = mean_k(x - x_k), x <- OuterOPT(x, Delta), x_k <- x.

Of the whole model, or of one fragment of it. `synchronize` does it at one point of the clock;
`launch` sends, and `land` applies what came back some steps later: x_k <- x + what the local
model has gained since it was sent.
"""

import time
from collections.abc import Generator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.optim import Optimizer

from palsgd.layout import Bucket, Buckets
from palsgd.roll_call import Attendance
from palsgd.transport import Begin, Finish, Message, Request

if TYPE_CHECKING:
    from palsgd.core import Core

Exchange = Generator[Request, int, None]


@dataclass
class Flight:
    """A fragment that has been sent and not yet applied."""

    fragment: int
    message: Message
    extras: int  # elements at the end of the message that are not of the model
    departure: Tensor  # the local fragment as it was when it was sent
    due: int  # the clock at which it is applied
    where: str
    distance: float
    finite: bool
    sent: int = 0
    arrived: bool = False


def synchronize(core: "Core", fragment: int) -> Exchange:
    """First every message, then every change, so a lost peer cannot leave half a sync behind.

    A worker that lost a peer after the second of five messages, had it applied them one by
    one, would hold two fifths of the new global model and three of the old. So the means are
    only collected while messages are still to come. They need a place: one bucket if the model
    fits into one, else the local model, which the sync is about to overwrite anyway; should the
    exchange fail then, the local model goes back to the anchor and the round is lost, never
    the global model. A low-precision model cannot hold the means and gets one large bucket; so
    does an overlapped one, which has it anyway.
    """
    replica, anchor = core.replica, core.anchor
    replica.check_unchanged()
    local = replica.local()
    whole = core.overlapped or any(t.dtype != replica.dtype for t in local)
    buckets = core.buckets(fragment, whole=whole)
    several, parked = len(buckets.ranges) > 1, False
    start, bytes_before = core.watch.now(), core.ledger.bytes_sent
    squares, contributors = anchor.flat.new_zeros(()), core.workers
    messages: list[Message] = []
    try:
        for number, bucket in enumerate(buckets.ranges):
            bucket.subtract(anchor.flat, anchor.views, local)
            squares += torch.linalg.vector_norm(bucket.flat).square()
            if number == 0:
                seen_all = not several and len(anchor.ranges) == 1 and bool(squares.isfinite())
                mine = _attend(core, fragment, seen_all)
            if not mine.finite:  # some rank of this worker has seen inf or nan
                bucket.flat.zero_()
            if number == 0:
                extras, message = yield from _exchange_first(core, fragment, buckets, mine)
                contributors = core.judge(extras, core.where())
            else:
                message = core.message(bucket.flat, 0, fragment, number)
                core.count_message((yield message))
            messages.append(message)
            if contributors < core.workers:
                bucket.flat.mul_(core.workers / contributors)
            if several:
                parked = True
                bucket.write(local)
    except BaseException:
        if parked:
            anchor.give_fragment(fragment)
        raise
    _outer_step(
        core,
        fragment,
        anchor.parts(fragment, local) if parked else buckets.ranges[0].parts(),
    )
    anchor.give_fragment(fragment)
    if not mine.finite:
        _start_over(core)
    core.keep_residues(fragment, messages)
    _settle_buffers(core, fragment, extras, contributors)
    core.watch.add("sync_s", start, core.watch.now())
    core.record_sync(fragment, float(squares.sqrt()), core.ledger.bytes_sent - bytes_before)


def launch(core: "Core", fragment: int) -> Exchange:
    """Send a fragment; the answer is waited for in `land`. Its one message has a buffer of its
    own, as the local model goes on meanwhile."""
    core.replica.check_unchanged()
    local, start = core.replica.local(), core.watch.now()
    buckets = core.buckets(fragment, whole=True)
    bucket = buckets.ranges[0]
    bucket.subtract(core.anchor.flat, core.anchor.views, local)
    distance = float(torch.linalg.vector_norm(bucket.flat))
    mine = _attend(core, fragment, seen_all=False)
    if not mine.finite:
        bucket.flat.zero_()
    extras = _extras(core, fragment, mine)
    values, _ = buckets.first_message(extras)
    message = core.message(values, len(extras), fragment, 0)
    departure = core.departure(fragment)
    departure.read(local)
    yield Begin(message)
    core.flight = Flight(
        fragment=fragment,
        message=message,
        extras=len(extras),
        departure=departure.flat,
        due=core.clock + core.delay,
        where=core.where(),
        distance=distance,
        finite=mine.finite,
    )
    core.watch.add("sync_s", start, core.watch.now())


def land(core: "Core") -> Exchange:
    """Apply the mean that has come back: the new global fragment, and on top of it all that the
    local one has gained since it was sent."""
    flight = core.flight
    assert flight is not None
    start, began = core.watch.now(), time.perf_counter()
    if not flight.arrived:
        flight.sent = yield Finish(flight.message)
        flight.arrived = True
    core.exchange_s = time.perf_counter() - began  # only what the steps since did not hide
    values, fragment = flight.message.values, flight.fragment
    elements = len(values) - flight.extras
    mean, extras = values[:elements], values[elements:]
    contributors = core.judge(extras, flight.where)
    if contributors < core.workers:
        mean.mul_(core.workers / contributors)
    low = core.anchor.ranges[fragment].start
    _outer_step(core, fragment, Bucket(core.replica.layout, low, mean).parts())
    _move_along(core, flight)
    core.flight = None
    core.count_message(flight.sent)
    core.keep_residues(fragment, [flight.message])
    _settle_buffers(core, fragment, extras, contributors)
    core.watch.add("sync_s", start, core.watch.now())
    core.record_sync(fragment, flight.distance, flight.sent)


def _move_along(core: "Core", flight: Flight) -> None:
    """x_k <- x + (x_k - x_k when it was sent)."""
    if not flight.finite:
        _start_over(core)
        return
    part = core.anchor.ranges[flight.fragment]
    shift = torch.sub(
        core.anchor.flat[part.start : part.stop], flight.departure, out=flight.departure
    )
    Bucket(core.replica.layout, part.start, shift).add(core.replica.local())


def _start_over(core: "Core") -> None:
    """A worker whose model was not finite goes on from the global one, all fragments of it."""
    core.anchor.give()
    forget_nonfinite(core.inner)


def _attend(core: "Core", fragment: int, seen_all: bool) -> Attendance:
    finite = (seen_all or _all_finite(core.replica.local())) and core.buffers.finite()
    return core.attendance(finite=finite, fragment=fragment)


def _extras(core: "Core", fragment: int, mine: Attendance) -> Tensor:
    """What all must know before anything is applied: the roll call; and the buffers, which
    travel with the last fragment."""
    extras = core.roll_call.encode(core.worker, mine, core.like)
    if core.buffers.averaged and core.is_last(fragment):
        extras = torch.cat(
            [extras, core.buffers.encode(core.worker, core.like, finite=mine.finite)]
        )
    return extras


def _exchange_first(
    core: "Core", fragment: int, buckets: Buckets, mine: Attendance
) -> Generator[Request, int, tuple[Tensor, Message]]:
    """The first bucket with its extras. Returns the mean of those, and the message."""
    extras = _extras(core, fragment, mine)
    values, place = buckets.first_message(extras)
    message = core.message(values, len(extras), fragment, 0)
    began = time.perf_counter()
    core.count_message((yield message))
    extras.copy_(place)
    core.exchange_s = time.perf_counter() - began
    return extras, message


def _outer_step(core: "Core", fragment: int, means: list[Tensor]) -> None:
    """Only this fragment's pieces have a gradient, and so only they move."""
    pieces = core.anchor.pieces[fragment]
    for param, mean in zip(pieces, means, strict=True):
        param.grad = mean
    try:
        core.method.global_rule(core.outer)
    finally:
        for param in pieces:
            param.grad = None


def _settle_buffers(core: "Core", fragment: int, extras: Tensor, contributors: int) -> None:
    if core.is_last(fragment):
        core.buffers.settle(extras[core.roll_call.size :], core.workers, contributors)


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

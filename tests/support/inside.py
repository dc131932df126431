"""What the golden tests need to see inside an optimizer. They read no private attribute elsewhere,
so that a new core changes this file and leaves the tests as they are."""

import hashlib
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from palsgd.compression import BLOCK


@dataclass(frozen=True)
class Exchange:
    """One exchange with the other workers, as it looks right after it was applied."""

    kind: str  # "warm-up": gradients; "opening": the local phase begins; "sync"
    clock: int
    fragment: int | None  # of a sync
    payload: int  # bytes that the values of the model take in the messages, coded or not
    header: int  # bytes of everything else: roll call, buffers, presence flags
    sha256: str  # of `anchor_bytes`
    norm: float  # of the same values
    buffers: str | None  # sha256 of the global model's buffers, if it has some


def watch_exchanges(opt: Any, listener: Callable[[Exchange], None]) -> None:
    """Have `listener` called after every exchange of `opt`, whoever drives it."""
    core = opt._core
    _watch_generator(opt, "_warmup_step", "warm-up", listener)
    _watch_generator(opt, "_open_local_phase", "opening", listener)
    record_sync = core.record_sync

    def watched(fragment: int, distance: float, sent: int) -> None:
        record_sync(fragment, distance, sent)
        listener(_exchange(opt, "sync", fragment, sent))

    core.record_sync = watched


def anchor_bytes(opt: Any) -> bytes:
    """Of the global model, tensor by tensor in the order of the inner optimizer: the anchor in its
    own precision; in the warm-up, which has no anchor, the model."""
    return _bytes(_global_tensors(opt))


def header_and_payload(opt: Any, kind: str, fragment: int | None, sent: int) -> tuple[int, int]:
    """The `sent` bytes of an exchange, apart."""
    payload = _payload(opt, kind, fragment)
    return sent - payload, payload


def under_way(opt: Any) -> bool:
    """Has a sync been sent that is still to be applied?"""
    return opt._core.flight is not None


def unsent(opt: Any) -> int:
    """How many messages have left a residue behind."""
    return len(opt._core.residues)


def _watch_generator(opt: Any, name: str, kind: str, listener: Callable[[Exchange], None]) -> None:
    core = opt._core
    original = getattr(core, name)

    def watched() -> Any:
        before = core.ledger.bytes_sent
        yield from original()
        listener(_exchange(opt, kind, None, core.ledger.bytes_sent - before))

    setattr(core, name, watched)


def _exchange(opt: Any, kind: str, fragment: int | None, sent: int) -> Exchange:
    header, payload = header_and_payload(opt, kind, fragment, sent)
    buffers = opt._core.buffers._global
    values = torch.cat([t.detach().double().reshape(-1) for t in _global_tensors(opt)])
    return Exchange(
        kind=kind,
        clock=opt.clock,
        fragment=fragment,
        payload=payload,
        header=header,
        sha256=hashlib.sha256(anchor_bytes(opt)).hexdigest(),
        norm=float(torch.linalg.vector_norm(values)),
        buffers=hashlib.sha256(_bytes(buffers)).hexdigest() if buffers else None,
    )


def _global_tensors(opt: Any) -> list[Tensor]:
    core = opt._core
    return core.anchor.views if core.opened else core.replica.local()


def _payload(opt: Any, kind: str, fragment: int | None) -> int:
    core = opt._core
    if kind == "opening":
        return 0
    if kind == "warm-up":
        return core.replica.layout.size * core.replica.dtype.itemsize
    part = core.anchor.ranges[fragment]
    low_precision = any(t.dtype != core.replica.dtype for t in core.replica.local())
    # Such models, and syncs that overlap with steps, travel in one message of any size.
    width = len(part) if core.overlapped or low_precision else core.bucket_size
    sizes = [min(width, part.stop - low) for low in range(part.start, part.stop, width)]
    return sum(_sync_bytes(opt, size) for size in sizes)


def _sync_bytes(opt: Any, elements: int) -> int:
    core = opt._core
    if core._codec is None:
        return elements * core.replica.dtype.itemsize
    blocks = max(1, math.ceil(elements / (core.workers * BLOCK)))
    return core.workers * blocks * core._codec.width


def _bytes(tensors: Iterable[Tensor]) -> bytes:
    parts = [t.detach().contiguous().reshape(-1).view(torch.uint8) for t in tensors]
    return torch.cat(parts).numpy().tobytes()

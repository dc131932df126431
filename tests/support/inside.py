"""What the golden tests need to see inside an optimizer. They read no private attribute elsewhere,
so that a new core changes this file and leaves the tests as they are."""

import hashlib
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from palsgd.codecs.codec import BLOCK


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
    worker = opt._worker
    _watch_generator(opt, "_warmup_step", "warm-up", listener)
    _watch_generator(opt, "open_local_phase", "opening", listener)
    record = worker.books.record

    def watched(outcome: Any) -> None:
        record(outcome)
        listener(_exchange(opt, "sync", outcome.at.fragment, outcome.sent))

    worker.books.record = watched


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
    return opt._worker.syncer.pending is not None


def unsent(opt: Any) -> int:
    """How many messages have left a residue behind."""
    return len(opt._worker.syncer.residues.kept)


def _watch_generator(opt: Any, name: str, kind: str, listener: Callable[[Exchange], None]) -> None:
    core = opt._worker
    original = getattr(core, name)

    def watched() -> Any:
        before = core.ledger.bytes_sent
        yield from original()
        listener(_exchange(opt, kind, None, core.ledger.bytes_sent - before))

    setattr(core, name, watched)


def _exchange(opt: Any, kind: str, fragment: int | None, sent: int) -> Exchange:
    header, payload = header_and_payload(opt, kind, fragment, sent)
    buffers = opt._worker.warmup.buffers._global
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
    worker = opt._worker
    return worker.syncer.anchor.views if worker.at.has_anchor else worker.inner.replica.local()


def _payload(opt: Any, kind: str, fragment: int | None) -> int:
    replica = opt._worker.inner.replica
    if kind == "opening":
        return 0
    if kind == "warm-up":
        return replica.layout.size * replica.dtype.itemsize
    syncer = opt._worker.syncer
    part = syncer.anchor.ranges[fragment]
    # Models of low precision, and syncs that overlap with steps, travel in one message of any size.
    width = len(part) if syncer.outgoing.whole else syncer.memory.bucket_size
    sizes = [min(width, part.stop - low) for low in range(part.start, part.stop, width)]
    return sum(_sync_bytes(opt, size) for size in sizes)


def _sync_bytes(opt: Any, elements: int) -> int:
    codec, workers = opt._worker.syncer.outgoing.codec, opt.transport.workers
    if codec is None:
        return elements * opt._worker.inner.replica.dtype.itemsize
    blocks = max(1, math.ceil(elements / (workers * BLOCK)))
    return workers * blocks * codec.width


def _bytes(tensors: Iterable[Tensor]) -> bytes:
    parts = [t.detach().contiguous().reshape(-1).view(torch.uint8) for t in tensors]
    return torch.cat(parts).numpy().tobytes()

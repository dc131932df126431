"""The line about an exchange that failed since another worker is lost."""

import re
from collections.abc import Sequence

import torch

from palsgd.errors import SyncError

AGAIN = "start all workers again from a checkpoint"


def is_lost_peer(error: RuntimeError) -> bool:
    """Does an error of an exchange mean that somebody is lost? One that says what it is, or that
    this rank has no memory left, does not."""
    return not isinstance(error, (torch.OutOfMemoryError, SyncError))


def lost_peer(
    error: RuntimeError,
    *,
    who: str,
    at: str = "",
    missing: Sequence[str],
    seconds: float,
    fix: str = f"{AGAIN[0].upper()}{AGAIN[1:]}",
) -> SyncError:
    """What is raised in place of an error of gloo or NCCL.

    Args:
        error: theirs.
        who: this worker or rank.
        at: in what, such as a save.
        missing: those who were not there; empty if nobody knows.
        seconds: how long this one waited.
        fix: what the user can do.

    Example:
        >>> closed = RuntimeError("[gloo/pair.cc:537] Connection closed by peer. Look at its log.")
        >>> lost_peer(closed, who="worker 0", at="in a save", missing=["worker 2"], seconds=0.21)
        SyncError('worker 0 could not exchange with worker 2 in a save, and gave up after 0.2 s: \
it left early, stalled or lost its link. Start all workers again from a checkpoint (Connection \
closed by peer)')
    """
    whom = ", ".join(missing) or "the others"
    place = f" {at}" if at else ""
    culprit = {0: "a worker", 1: "it"}.get(len(missing), "each")
    failure = SyncError(
        f"{who} could not exchange with {whom}{place}, and gave up after {seconds:.1f} s: "
        f"{culprit} left early, stalled or lost its link. {fix} ({_first_sentence(str(error))})"
    )
    failure.__cause__ = error
    return failure


def _first_sentence(text: str) -> str:
    """What gloo says begins with a place in its source, and ends in pictures and advice."""
    first = text.strip().splitlines()[0] if text.strip() else "no reason given"
    first = re.sub(r"^\[[^]]*:\d+\] *", "", first)
    return re.split(r"(?<=[^.])[.!] (?=[A-Z])", first)[0].rstrip(".!")

"""The parts of a method's payload: which of them travel in a round, what they must be, and their
tensors end to end."""

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from palsgd.checks import check_choice, check_int
from palsgd.method import REDUCTIONS, Method, Part, Payload
from palsgd.tensors import WorkerTensors


def due_parts(method: Method, payload: Payload, round: int, w: WorkerTensors) -> list[Part]:
    """The parts that are sent in this round, checked."""
    for part in payload.parts:
        _check_part(part, w)
    _check_once("parts called", [repr(part.name) for part in payload.parts])
    _check_once("parts that are", ["the displacement" for p in payload.parts if p.tensors is None])
    found = [part for part in payload.parts if (round + 1) % part.every == 0]
    if not found:
        raise ValueError(
            f"no part of the payload travels with round {round}; give one of "
            f"{', '.join(part.name for part in payload.parts)} every=1"
        )
    moves = any(part.name == "model" and part.reduction != "gather" for part in found)
    if not moves and not method.overrides("apply"):
        raise ValueError(
            f"{method}.payload has no mean called 'model' in round {round}, and the apply() that "
            "every method has moves the anchor by it; add Part('model'), or write an apply()"
        )
    return found


def _check_part(part: Part, w: WorkerTensors) -> None:
    check_choice(f"the reduction of {part.name!r}", part.reduction, REDUCTIONS)
    check_int(f"every of the part {part.name!r}", part.every, least=1)
    if part.tensors is not None and len(part.tensors) != len(w.anchor):
        raise ValueError(
            f"the part {part.name!r} has {len(part.tensors)} tensors, where the model has "
            f"{len(w.anchor)} at this sync; give one for each, in the order of w.local"
        )


def _check_once(what: str, found: list[str]) -> None:
    twice = next((each for each in found if found.count(each) > 1), None)
    if twice is not None:
        raise ValueError(f"a payload has two {what} {twice}; leave one of them out")


def check_weights(method: Method, weights: Any, workers: int, where: str) -> Mapping[int, float]:
    """What a method's `weights` gave, or a ValueError that says what it must be."""
    sound = isinstance(weights, Mapping) and len(weights) > 0
    if sound and all(peer in range(workers) and math.isfinite(w) for peer, w in weights.items()):
        return weights
    raise ValueError(
        f"{type(method).__name__}.weights gives {weights!r} {where}; it must give a finite weight "
        f"for at least one of the workers 0 to {workers - 1}, as {{worker: weight}}, or None for "
        "the mean over all"
    )


def weighted_sum(rows: Tensor, weights: Mapping[int, float]) -> Tensor:
    """The rows of some workers, each times its weight, in the order of the workers."""
    total = torch.zeros_like(rows[0])
    for peer, weight in sorted(weights.items()):
        total.add_(rows[peer], alpha=weight)
    return total


def flattened(tensors: Any, like: Tensor) -> Tensor:
    """Tensors end to end in a new flat buffer."""
    return torch.cat([like, *(t.detach().reshape(-1).to(like.dtype) for t in tensors)])


def unflattened(values: Tensor, like: list[Tensor]) -> list[Tensor]:
    """The inverse of `flattened`; axes before the last one are kept."""
    chunks = values.split([t.numel() for t in like], dim=-1)
    return [c.reshape((*values.shape[:-1], *t.shape)) for c, t in zip(chunks, like, strict=True)]

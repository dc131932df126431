"""What the coded messages of a sync have left unsent, kept flat, whatever messages it was cut into.

The residue of this worker's own messages has one number for each number of a part. The residue of
the means has those numbers whose means this worker codes. Which ones these are depends on how the
part is cut into messages. If a run goes on with another `bucket_mb`, another worker codes the mean
of some number from then on, and so if it goes on with other workers. The residue of that mean, m,
is then added to this worker's own residue as K m. The next mean over the K workers contains m once,
as it would have without the change.
"""

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from palsgd.codecs.codec import Codec
from palsgd.codecs.coded_mean import Residue, owned

KeptResidues = dict[tuple[int, str], dict[str, Any]]  # by fragment and part


class Residues:
    """What this worker's coded messages have left unsent, by fragment and part."""

    def __init__(self, like: Tensor):
        self._like = like  # a tensor on the device of the messages
        self.kept: dict[tuple[int, str], PartResidue] = {}

    def of(
        self, fragment: int, part: str, messages: Sequence[range], codec: Codec, **place: int
    ) -> list[Residue]:
        """The residue of each message into which a part is cut. `place` has the numbers of this
        `worker` and of all `workers`."""
        kept = self.kept.get((fragment, part))
        if kept is None:
            kept = PartResidue.of(messages, codec, like=self._like, **place)
            self.kept[fragment, part] = kept
        return kept.cut(messages, codec, **place)

    def copied(self, fragment: int) -> KeptResidues:
        """A copy of the residues of a fragment."""
        return {
            key: kept.saved()
            for key, kept in self.kept.items()
            if key[0] == fragment and not kept.fresh
        }

    def put_back(self, fragment: int, copied: KeptResidues) -> None:
        """Set the residues of a fragment, in new memory, to what they were."""
        others = {key: each for key, each in self.kept.items() if key[0] != fragment}
        found = {key: PartResidue.loaded(each, self._like) for key, each in copied.items()}
        self.kept = others | found


class PartResidue:
    """The residue of one part of a fragment: the displacement, or a method's own tensors."""

    def __init__(self, own: Tensor, mean: Tensor, ranges: list[range], *, fresh: bool):
        self.own, self.mean, self.ranges = own, mean, ranges
        self._fresh = fresh
        self._messages: dict[range, Residue] = {}

    @classmethod
    def of(
        cls, messages: Sequence[range], codec: Codec, *, worker: int, workers: int, like: Tensor
    ) -> "PartResidue":
        """The residue of a part that has not been sent yet, on the device of `like`."""
        ranges = _owned(messages, codec, worker, workers)
        own = _zeros(messages[-1].stop, like)
        return cls(own, _zeros(sum(map(len, ranges)), like), ranges, fresh=True)

    def cut(
        self, messages: Sequence[range], codec: Codec, *, worker: int, workers: int
    ) -> list[Residue]:
        """The residue of each message. They are views, which an exchange changes in place."""
        ranges = _owned(messages, codec, worker, workers)
        if list(self._messages) != list(messages) or ranges != self.ranges:
            self._fresh = self.fresh  # as the messages so far know it
            if ranges != self.ranges:
                self._own_the_means(ranges, workers)
            sizes = [sum(map(len, _owned([m], codec, worker, workers))) for m in messages]
            bounds = [sum(sizes[:i]) for i in range(len(sizes) + 1)]
            self._messages = {
                message: Residue(
                    self.own[message.start : message.stop], self.mean[low:high], self._fresh
                )
                for message, (low, high) in zip(messages, pairwise(bounds), strict=True)
            }
        return list(self._messages.values())

    def _own_the_means(self, ranges: list[range], workers: int) -> None:
        """Add the residue of the means to this worker's own, as the means are now cut otherwise."""
        low = 0
        for each in self.ranges:
            self.own[each.start : each.stop] += workers * self.mean[low : low + len(each)]
            low += len(each)
        self.ranges, self.mean = ranges, _zeros(sum(map(len, ranges)), self.own)

    @property
    def fresh(self) -> bool:
        """Has no message been sent?"""
        if not self._messages:
            return self._fresh
        return all(residue.fresh for residue in self._messages.values())

    def saved(self) -> dict[str, Any]:
        ranges = [(each.start, each.stop) for each in self.ranges]
        return {"own": self.own.clone(), "mean": self.mean.clone(), "ranges": ranges}

    @classmethod
    def loaded(cls, saved: dict[str, Any], like: Tensor) -> "PartResidue":
        ranges = [range(*each) for each in saved["ranges"]]
        own, mean = (saved[name].to(like.device, copy=True) for name in ("own", "mean"))
        return cls(own, mean, ranges, fresh=False)


def _owned(messages: Sequence[range], codec: Codec, worker: int, workers: int) -> list[range]:
    """The numbers of a part whose means this worker codes."""
    return [
        range(message.start + found.start, message.start + found.stop)
        for message in messages
        for found in owned(len(message), codec, worker, workers)
    ]


def _zeros(size: int, like: Tensor) -> Tensor:
    return torch.zeros(size, dtype=torch.float32, device=like.device)


def from_messages(
    entries: Sequence[dict[str, Any]],
    messages: Sequence[range],
    codec: Codec,
    *,
    worker: int,
    workers: int,
    like: Tensor,
) -> PartResidue | None:
    """The residue of a part from a state that kept one for each message, with zeros up to whole
    blocks. None if the state's messages are not these."""
    if [entry["message"] for entry in entries] != list(range(len(messages))):
        return None
    found = PartResidue.of(messages, codec, worker=worker, workers=workers, like=like)
    for entry, residue in zip(
        entries, found.cut(messages, codec, worker=worker, workers=workers), strict=True
    ):
        if len(entry["own"]) < len(residue.own) or len(entry["mean"]) < len(residue.mean):
            return None
        residue.own.copy_(entry["own"][: len(residue.own)])
        residue.mean.copy_(entry["mean"][: len(residue.mean)])
        residue.fresh = False
    return found

"""The model's buffers (normalization statistics, counters), and what a sync does to them."""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from palsgd.checks import check_choice
from palsgd.replica import unwrapped
from palsgd.transports.transport import Transport

POLICIES = ("average", "local", "recompute")
_PIECE = 1 << 16  # integers are sent as 16-bit pieces, which a float32 mean keeps exact


class Buffers:
    """The persistent buffers of a model: floats are averaged, integers follow worker 0.

    A sync does not change buffers that are not saved with the model (masks, position tables), as
    the model's code derives them. It does not change complex buffers either.
    """

    def __init__(self, model: nn.Module, policy: str, transport: Transport | None = None):
        check_choice("buffers", policy, POLICIES)
        self.policy = policy
        self.averaged = policy == "average"
        self._slots = persistent_buffers(unwrapped(model))
        several = transport is not None and transport.inside is not None and bool(self._slots)
        self._ranks = transport if several else None  # the ranks of this worker, if it has several
        pieces = sum(len(_split(b)) * b.numel() for b in self._integers)
        self.encoded_size = sum(b.numel() for b in self._floats) + pieces
        self._global = [b.clone() for b in self.all()]
        # Are `_global` the buffers of the present global model? Under "recompute" they are from a
        # call of recompute_buffers() up to the next sync.
        self.current = policy != "recompute"

    def _now(self) -> list[Tensor]:
        """The buffers are looked up at each call, as a module may replace a buffer by a new
        tensor."""
        return [getattr(module, name) for module, name in self._slots]

    @property
    def _floats(self) -> list[Tensor]:
        return [b for b in self._now() if b.is_floating_point()]

    @property
    def _integers(self) -> list[Tensor]:
        return [b for b in self._now() if not b.is_floating_point()]

    def all(self) -> list[Tensor]:
        return self._floats + self._integers

    def describe(self) -> str:
        return ", ".join(f"{str(b.dtype)[6:]}{list(b.shape)}" for b in self.all())

    def encode(self, worker: int, like: Tensor, *, finite: bool = True) -> Tensor:
        """The flat values that this worker sends. Unless `finite`, zeros replace its floats."""
        self._unite_ranks(like)
        parts = [like.new_empty(0)]
        for buffer in self._floats:
            flat = buffer.reshape(-1).to(like.dtype)
            parts.append(flat if finite else torch.zeros_like(flat))
        for buffer in self._integers:
            parts += [p.to(like.dtype) * (worker == 0) for p in _split(buffer)]
        return torch.cat(parts)

    def _unite_ranks(self, like: Tensor) -> None:
        """Give all ranks of this worker the same buffers: the mean of their floats, and the
        integers of the first rank. Between syncs each rank's own batches change them."""
        if self._ranks is not None:
            for kind, dtype in ((self._floats, like.dtype), (self._integers, torch.int64)):
                flat = [like.new_empty(0, dtype=dtype), *(b.reshape(-1).to(dtype) for b in kind)]
                rows = self._ranks.gather_inside(torch.cat(flat))
                found = rows.mean(0) if dtype.is_floating_point else rows[0]
                for buffer, part in zip(kind, found.split([b.numel() for b in kind]), strict=True):
                    buffer.copy_(part.view(buffer.shape))

    def decode(self, mean: Tensor, workers: int, contributors: int) -> None:
        """Set the local and the global buffers from the mean over `workers`, of which
        `contributors` sent floats that are not replaced by zeros."""
        for buffer in self._floats:
            part, mean = mean[: buffer.numel()], mean[buffer.numel() :]
            buffer.copy_((part * (workers / contributors)).view(buffer.shape))
        for buffer in self._integers:
            pieces = len(_split(buffer)) * buffer.numel()
            part, mean = mean[:pieces], mean[pieces:]
            _join(buffer, (part * workers).round().long().view(-1, *buffer.shape))
        self.set_from_local()

    def after_sync(self, mean: Tensor, workers: int, contributors: int) -> None:
        """Set the buffers if the policy is to average them; mark them as old if it is to recompute
        them."""
        if self.averaged:
            self.decode(mean, workers, contributors)
        elif self.policy == "recompute":
            self.current = False

    def finite(self) -> bool:
        return not self.averaged or all(bool(b.isfinite().all()) for b in self._floats)

    def set_from_local(self) -> None:
        """Copy the local buffers into the global model's buffers."""
        for kept, buffer in zip(self._global, self.all(), strict=True):
            kept.copy_(buffer)

        self.current = True

    def copy_to_local(self) -> None:
        """Copy the global model's buffers into the local ones, unless the policy is local or the
        global model's buffers are old."""
        if self.policy != "local" and self.current:
            for kept, buffer in zip(self._global, self.all(), strict=True):
                buffer.copy_(kept)

    def recompute(
        self, model: nn.Module, batches: Iterable[Any], forward: Callable[[nn.Module, Any], Any]
    ) -> None:
        """Re-estimate batch-norm statistics over `batches`."""
        norms = [m for m in model.modules() if isinstance(m, nn.modules.batchnorm._NormBase)]
        momenta, training = [norm.momentum for norm in norms], model.training
        for norm in norms:
            norm.reset_running_stats()
            norm.momentum = None  # None makes torch take the plain mean over all batches
        model.train()
        try:
            for batch in batches:
                forward(model, batch)
        finally:
            model.train(training)
            for norm, momentum in zip(norms, momenta, strict=True):
                norm.momentum = momentum

    def state(self) -> dict[str, Any]:
        return {"global": [kept.clone() for kept in self._global], "current": self.current}

    def load(self, state: dict[str, Any]) -> None:
        for kept, saved in zip(self._global, state["global"], strict=True):
            kept.copy_(saved)
        self.current = state["current"]


def persistent_buffers(model: nn.Module) -> list[tuple[nn.Module, str]]:
    return [
        (module, name)
        for module in model.modules()
        for name, buffer in module.named_buffers(recurse=False)
        if name not in module._non_persistent_buffers_set and not buffer.is_complex()
    ]


def _split(buffer: Tensor) -> list[Tensor]:
    """The 16-bit pieces of an integer or bool tensor, lowest first, flat."""
    value = buffer.reshape(-1).long()
    return [(value >> shift) & (_PIECE - 1) for shift in range(0, 8 * buffer.itemsize, 16)]


def _join(buffer: Tensor, pieces: Tensor) -> None:
    value = torch.zeros_like(pieces[0])
    for i, piece in enumerate(pieces):
        value |= piece << (16 * i)
    buffer.copy_(value)  # copy_ wraps around, so the top bit of a signed type is its sign again

"""The model's buffers (normalization statistics, counters), and what a sync does to them."""

import warnings
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

from palsgd.checks import check_choice
from palsgd.finite import all_finite
from palsgd.replica import unwrapped
from palsgd.transports.transport import Transport

POLICIES = ("average", "local", "recompute")
# What torch can copy many of at once; it has no such kernel for uint16 and its like.
_TOGETHER = (torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64, torch.int32)
_PIECE = 1 << 16  # integers are sent as 16-bit pieces, which a float32 mean keeps exact


class Buffers:
    """The persistent buffers of a model: floats are averaged, integers follow the lowest worker
    that takes part.

    A sync does not change buffers that are not saved with the model (masks, position tables), as
    the model's code derives them. It does not change complex buffers either. A buffer that has inf
    or nan when the optimizer is built is a mask and no statistic: a sync neither sends nor checks
    it.
    """

    def __init__(self, model: nn.Module, policy: str, transport: Transport | None = None):
        check_choice("buffers", policy, POLICIES)
        self.policy = policy
        self.averaged = policy == "average"
        model = unwrapped(model)
        self._slots = persistent_buffers(model)
        several = transport is not None and transport.inside is not None and bool(self._slots)
        self._ranks = transport if several else None  # the ranks of this worker, if it has several
        self._masks = {slot for slot in self._slots if _is_mask(getattr(*slot))}
        prefixes = {module: f"{name}." if name else "" for name, module in model.named_modules()}
        self._names = {slot: prefixes[slot[0]] + slot[1] for slot in self._slots}
        self._warned = False  # of a mask that changes
        pieces = sum(_pieces_of(b.dtype) * b.numel() for b in self._integers)
        self.encoded_size = sum(b.numel() for b in self._floats) + pieces
        self._global = [b.clone() for b in self.all()]
        # Are `_global` the buffers of the present global model? Under "recompute" they are from a
        # call of recompute_buffers() up to the next sync.
        self.current = policy != "recompute"

    def _now(self) -> dict[tuple[nn.Module, str], Tensor]:
        """The buffers are looked up at each call, as a module may replace a buffer by a new
        tensor."""
        return {slot: getattr(*slot) for slot in self._slots}

    @property
    def statistics(self) -> dict[str, Tensor]:
        """The floating-point buffers that are averaged, by their names."""
        now = self._now().items()
        kept = {slot: b for slot, b in now if b.is_floating_point() and slot not in self._masks}
        return {self._names[slot]: b for slot, b in kept.items()}

    @property
    def masks(self) -> set[str]:
        """The names of the buffers that had inf or nan when the optimizer was built."""
        return {self._names[slot] for slot in self._masks}

    @property
    def _floats(self) -> list[Tensor]:
        return list(self.statistics.values())

    @property
    def _integers(self) -> list[Tensor]:
        return [b for b in self._now().values() if not b.is_floating_point()]

    def all(self) -> list[Tensor]:
        """All buffers, floats first."""
        return [b for b in self._now().values() if b.is_floating_point()] + self._integers

    def describe(self) -> str:
        kinds = [f"{str(b.dtype)[6:]}{list(b.shape)}" for b in self.all()]
        return ", ".join(kinds + [f"mask {name}" for name in sorted(self.masks)])

    def encode(self, place: int, like: Tensor, *, finite: bool = True) -> Tensor:
        """The flat values that this worker sends, whose place among the workers this is. Unless
        `finite`, zeros replace its floats."""
        self._unite_ranks(like)
        flat = _joined(self._floats, like)  # which is elsewhere if the anchor is offloaded
        parts = [flat if finite else torch.zeros_like(flat)]
        for dtype, buffers in _by_type(self._integers).items():
            values = torch.cat([b.reshape(-1).to(like.device) for b in buffers]).long()
            shifts = 16 * torch.arange(_pieces_of(dtype), device=values.device)[:, None]
            pieces = (values >> shifts) & (_PIECE - 1)
            parts.append(pieces.reshape(-1).to(like) * (place == 0))
        return torch.cat(parts)

    def _unite_ranks(self, like: Tensor) -> None:
        """Give all ranks of this worker the same buffers: the mean of their floats, and the
        integers of the first rank. Between syncs each rank's own batches change them."""
        if self._ranks is not None:
            for kind, dtype in ((self._floats, like.dtype), (self._integers, torch.int64)):
                if not kind:
                    continue
                rows = self._ranks.gather_inside(torch.cat([b.reshape(-1).to(dtype) for b in kind]))
                found = rows.mean(0) if dtype.is_floating_point else rows[0]
                for buffer, part in zip(kind, found.split([b.numel() for b in kind]), strict=True):
                    buffer.copy_(part.view(buffer.shape))

    def decode(self, mean: Tensor, workers: int, contributors: int) -> None:
        """Set the local and the global buffers from the mean over `workers`, of which
        `contributors` sent floats that are not replaced by zeros."""
        floats = self._floats
        size = sum(b.numel() for b in floats)
        _copy(_parted(mean[:size] * (workers / contributors), floats), floats)
        mean = mean[size:]
        for dtype, buffers in _by_type(self._integers).items():
            count, each = _pieces_of(dtype), sum(b.numel() for b in buffers)
            pieces = (mean[: count * each] * workers).round().long().view(count, each)
            mean = mean[count * each :]
            shifts = 16 * torch.arange(count, device=pieces.device)[:, None]
            # They have no bit in common, so that their sum wraps around as it should; and copying
            # wraps around too, so that the top bit of a signed type is its sign again.
            _copy(_parted((pieces << shifts).sum(0), buffers), buffers)
        self.set_from_local()

    def after_sync(self, mean: Tensor, workers: int, contributors: int) -> None:
        """Set the buffers if the policy is to average them; mark them as old if it is to recompute
        them."""
        if self.averaged:
            self.decode(mean, workers, contributors)
        elif self.policy == "recompute":
            self.current = False

    def nonfinite(self) -> int:
        """The number, from 1, of the first statistic that has inf or nan and would be sent; 0 if
        there is none."""
        if not self.averaged:
            return 0
        self._warn_of_changed_masks()
        floats = self._floats
        if all_finite(floats):
            return 0
        return next(n for n, b in enumerate(floats, 1) if not bool(b.isfinite().all()))

    def _warn_of_changed_masks(self) -> None:
        if not self._masks or self._warned:
            return
        kept = dict(zip(map(id, self.all()), self._global, strict=True))
        for slot in self._masks:
            now = getattr(*slot)
            if not torch.equal(now.nan_to_num(nan=0.0), kept[id(now)].nan_to_num(nan=0.0)):
                self._warned = True
                warnings.warn(
                    f"buffer {self._names[slot]!r} had inf or nan when the optimizer was built, so "
                    "it is taken for a mask and not averaged, but it has changed; give it finite "
                    "values before the optimizer is built, or make it persistent=False",
                    stacklevel=2,
                )

    def set_from_local(self) -> None:
        """Copy the local buffers into the global model's buffers."""
        _copy(self.all(), self._global)
        self.current = True

    def copy_to_local(self) -> None:
        """Copy the global model's buffers into the local ones, unless the policy is local or the
        global model's buffers are old."""
        if self.policy != "local" and self.current:
            _copy(self._global, self.all())

    def recompute(
        self, model: nn.Module, batches: Iterable[Any], forward: Callable[[nn.Module, Any], Any]
    ) -> None:
        """Re-estimate batch-norm statistics over `batches`. A norm that is in eval mode inside a
        model in training mode is frozen: it keeps its statistics. Every module keeps its mode."""
        modes = {module: module.training for module in model.modules()}
        if not unwrapped(model).training:
            _train_all_but_frozen(model)
        norms = [m for m in modes if isinstance(m, _NormBase) and m.training]
        momenta = [norm.momentum for norm in norms]
        for norm in norms:
            norm.reset_running_stats()
            norm.momentum = None  # None makes torch take the plain mean over all batches
        try:
            for batch in batches:
                forward(model, batch)
        finally:
            for module, training in modes.items():
                module.training = training
            for norm, momentum in zip(norms, momenta, strict=True):
                norm.momentum = momentum

    def state(self) -> dict[str, Any]:
        return {"global": [kept.clone() for kept in self._global], "current": self.current}

    def load(self, state: dict[str, Any]) -> None:
        for kept, saved in zip(self._global, state["global"], strict=True):
            kept.copy_(saved)
        self.current = state["current"]


def _train_all_but_frozen(model: nn.Module) -> None:
    """Put a model that is in eval mode as a whole into training mode. Its norms are all in eval
    mode, so the frozen ones are known by their parameters."""
    model.train()
    for norm in model.modules():
        if isinstance(norm, _NormBase):
            own = list(norm.parameters(recurse=False))
            norm.train(not own or any(p.requires_grad for p in own))


def _is_mask(buffer: Tensor) -> bool:
    if buffer.device.type == "meta" or not buffer.is_floating_point():
        return False
    return not all_finite([buffer])


def persistent_buffers(model: nn.Module) -> list[tuple[nn.Module, str]]:
    return [
        (module, name)
        for module in model.modules()
        for name, buffer in module.named_buffers(recurse=False)
        if name not in module._non_persistent_buffers_set and not buffer.is_complex()
    ]


def _joined(buffers: list[Tensor], like: Tensor) -> Tensor:
    """All values as one flat tensor. A model has hundreds of buffers of a few values each: a call
    for each would take longer than a training step does."""
    if not buffers:
        return like.new_empty(0)
    alike = {(b.dtype, b.device) for b in buffers} == {(like.dtype, like.device)}
    return torch.cat([b.reshape(-1) if alike else b.reshape(-1).to(like) for b in buffers])


def _parted(flat: Tensor, like: list[Tensor]) -> list[Tensor]:
    parts = flat.split([b.numel() for b in like])
    return [part.view(b.shape) for part, b in zip(parts, like, strict=True)]


def _copy(sources: list[Tensor], targets: list[Tensor]) -> None:
    """All of one type at once: one kernel on a GPU. Types that are mixed would be copied one by one
    there, and some not at all."""
    alike: dict[Any, tuple[list[Tensor], list[Tensor]]] = {}
    for source, target in zip(sources, targets, strict=True):
        if target.dtype in _TOGETHER and not (source.is_neg() or target.is_neg()):
            key = source.dtype, source.device, target.dtype, target.device
            own = alike.setdefault(key, ([], []))
            own[0].append(source)
            own[1].append(target)
        else:
            target.copy_(source)
    for own in alike.values():
        torch._foreach_copy_(own[1], own[0])


def _by_type(buffers: list[Tensor]) -> dict[torch.dtype, list[Tensor]]:
    """In the order in which the types first appear, which is that of the model."""
    found: dict[torch.dtype, list[Tensor]] = {}
    for buffer in buffers:
        found.setdefault(buffer.dtype, []).append(buffer)
    return found


def _pieces_of(dtype: torch.dtype) -> int:
    """How many 16-bit pieces a value of an integer type has, or of a bool."""
    return max(1, dtype.itemsize // 2)

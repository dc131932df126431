"""The tensors that no optimizer trains: frozen parameters and persistent buffers. They are never
sent, so the workers compare them once, with their first message."""

from collections import Counter
from collections.abc import Iterable, Iterator

import torch
from torch import Tensor, nn

from palsgd.digest import chained, digest
from palsgd.errors import ConsensusError
from palsgd.guard import named_workers
from palsgd.payload import UNTRAINED
from palsgd.replica import Replica, unwrapped
from palsgd.rows import halves, joined, own_row, rows_of_all
from palsgd.sharding import local_tensor
from palsgd.transports.transport import Transport


class Untrained:
    """Each worker sends three digests: of its frozen parameters, of its buffers when the optimizer
    was built, and of its buffers now.

    Statistics differ between workers after the first forward pass, and random buffers differ before
    a checkpoint is loaded. Both are right, so the buffers are wrong only if both of their digests
    differ.
    """

    def __init__(self, model: nn.Module, replica: Replica, transport: Transport):
        trained, model = set(replica.params), unwrapped(model)
        self._frozen = [p for p in model.parameters() if p not in trained]
        self._slots = list(_buffer_slots(model))
        self._transport, self._device = transport, replica.device
        self._built = self._buffers()

    @property
    def size(self) -> int:
        return UNTRAINED * self._transport.workers

    def _buffers(self) -> int:
        return contents_digest(getattr(module, name) for module, name in self._slots)

    def frozen_digest(self) -> int:
        return contents_digest(self._frozen)

    def encode(self, like: Tensor) -> Tensor:
        """This worker's digests in its own place, as 16-bit halves, and zeros in all others."""
        digests = [self.frozen_digest(), self._built, self._buffers()]
        rows = self._transport.gather_inside(torch.tensor(digests, device=self._device))
        whole = [chained(column) for column in rows.T.tolist()]  # of all ranks of this worker
        numbers = [half for digest in whole for half in halves(digest)]
        return own_row(self._transport.place, self._transport.workers, numbers, like)

    def check(self, mean: Tensor, where: str) -> None:
        """Raise the same error on every worker if the digests differ."""
        members = self._transport.members
        lines = dict(zip(members, rows_of_all(mean, len(members)), strict=True))
        frozen, built, now = (
            _odd({worker: joined(*line[i : i + 2]) for worker, line in lines.items()})
            for i in (0, 2, 4)
        )
        for odd, what in ((frozen, "frozen parameters"), (built and now, "buffers")):
            if odd:
                raise ConsensusError(
                    f"{named_workers(odd)} of {len(members)} ha{'s' if len(odd) == 1 else 've'} "
                    f"other {what} than the rest at {where}; nothing was averaged, and {what} "
                    "never are at the start. Give every worker the same (same seed, or load the "
                    "same file on all)"
                )


def _odd(digests: dict[int, int]) -> list[int]:
    """The workers whose digest is not the most common one."""
    common = Counter(digests.values()).most_common(1)[0][0]
    return [worker for worker, digest in digests.items() if digest != common]


def _buffer_slots(model: nn.Module) -> Iterator[tuple[nn.Module, str]]:
    """All persistent buffers. They are looked up by name, as a module may replace a buffer."""
    for module in model.modules():
        for name in module._buffers:
            if name not in module._non_persistent_buffers_set:
                yield module, name


def contents_digest(tensors: Iterable[Tensor | None]) -> int:
    """32 bits of tensors of any types, in their order."""
    return chained(digest(_bytes(part)) for tensor in tensors for part in _parts(tensor))


def _parts(tensor: Tensor | None) -> Iterator[Tensor]:
    """The plain tensors that a tensor consists of: a quantized one has several."""
    if tensor is None or tensor.device.type == "meta":
        return
    tensor = local_tensor(tensor.detach())
    if hasattr(tensor, "__tensor_flatten__"):
        for name in tensor.__tensor_flatten__()[0]:
            yield from _parts(getattr(tensor, name))
    elif tensor.layout is torch.strided:
        yield torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.contiguous().reshape(-1).view(torch.uint8)

"""The anchor: the last global model."""

import torch
from torch import nn

from palsgd.digest import digest
from palsgd.flat import FlatModel, split_evenly
from palsgd.offload import Home, fill
from palsgd.replica import Replica


class Anchor(FlatModel):
    """The last global model in full precision, cut into fragments. Each fragment has its own
    sync."""

    def __init__(self, replica: Replica, fragments: int = 1, *, offload: bool = False):
        layout, self.home = replica.layout, Home(replica.device, offload)
        ranges = split_evenly(layout.size, fragments)
        super().__init__(
            layout,
            ranges,
            dtype=replica.dtype,
            device=self.home.storage,
            pinned=self.home.pinned,
        )
        self._replica = replica
        # The tensors that the outer optimizer moves: for each fragment its tensors, or pieces of
        # them.
        self.outer_params = [
            [nn.Parameter(piece) for piece in self.pieces(f)] for f in range(fragments)
        ]

    @property
    def params(self) -> list[nn.Parameter]:
        return [param for params in self.outer_params for param in params]

    @torch.no_grad()
    def set_from_local(self) -> None:
        """The local model becomes the global one."""
        local = self._replica.local()
        if self.home.offloaded:
            fill(self.flat, self._replica.layout, range(len(self.flat)), local, self.home)
        else:
            torch._foreach_copy_(self.views, local)

    @torch.no_grad()
    def copy_to_local(self, fragment: int | None = None) -> None:
        """The global model, or a fragment of it, becomes the local one."""
        if fragment is None:
            torch._foreach_copy_(self._replica.local(), self.views)
        else:
            self.write(fragment, self._replica.local())

    def digest(self, fragment: int | None = None) -> int:
        """32 bits that are equal on two workers whose anchors are equal, bit for bit."""
        return digest(self.flat if fragment is None else self.part(fragment))

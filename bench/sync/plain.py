"""A sync of DiLoCo as one would write it by hand, for the one case at hand.

It has no guard against a worker that is lost or whose numbers are not finite, takes no norm,
compares no digest, sends one message of any size, and knows only fp32 and Nesterov's momentum.
What palsgd's sync takes beyond it is the price of those.
"""

import torch
import torch.distributed as dist
from torch import Tensor


class PlainDiLoCo:
    def __init__(self, params: list[Tensor], lr: float, momentum: float):
        self.params, self.lr, self.momentum = params, lr, momentum
        size = sum(p.numel() for p in params)
        self.anchor, self.delta, self.velocity = (torch.zeros(size) for _ in range(3))
        self.anchor_views, self.delta_views = self._views(self.anchor), self._views(self.delta)
        torch._foreach_copy_(self.anchor_views, params)

    def _views(self, flat: Tensor) -> list[Tensor]:
        parts = flat.split([p.numel() for p in self.params])
        return [part.view(p.shape) for part, p in zip(parts, self.params, strict=True)]

    def sync(self) -> None:
        """anchor <- Nesterov(anchor, mean of anchor - x_k); x_k <- anchor."""
        torch._foreach_copy_(self.delta_views, self.params)
        torch.sub(self.anchor, self.delta, out=self.delta)
        dist.all_reduce(self.delta)
        self.delta.div_(dist.get_world_size())
        self.velocity.mul_(self.momentum).add_(self.delta)
        self.delta.add_(self.velocity, alpha=self.momentum)
        self.anchor.sub_(self.delta, alpha=self.lr)
        torch._foreach_copy_(self.params, self.anchor_views)

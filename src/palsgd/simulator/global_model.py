"""The global model of simulated workers, for methods whose local models differ from it."""

import copy
from collections.abc import Sequence

import torch
from torch import Tensor

from palsgd.buffers import Buffers
from palsgd.optimizer import LocalOptimizer
from palsgd.replica import unwrapped


def global_part(opt: LocalOptimizer) -> list[Tensor] | None:
    """This worker's present part of the global model, which is the mean of the parts of all
    workers. None: the anchor is the global model."""
    worker = opt._worker
    if not (worker.at.has_anchor and worker.method.overrides("global_model")):
        return None
    with torch.no_grad():
        part = worker.method.global_model(worker.syncer.view.whole())
        dtype = worker.syncer.anchor.flat.dtype
        return None if part is None else [x.detach().to(dtype, copy=True) for x in part]


class GlobalModel:
    """A copy of a worker's model whose weights and buffers are set to the global ones."""

    def __init__(self, opt: LocalOptimizer):
        self.model = copy.deepcopy(opt.model)
        named = dict(unwrapped(self.model).named_parameters())
        self._params = [named[name] for name in opt._worker.inner.replica.names]
        self._buffers = Buffers(self.model, opt.config["buffers"])

    @torch.no_grad()
    def set_weights(self, opt: LocalOptimizer, parts: Sequence[list[Tensor] | None]) -> None:
        """Set the weights from the parts of all workers. Without parts, set them from the anchor of
        the first worker or, in the warm-up, from its model."""
        worker = opt._worker
        found = [part for part in parts if part is not None]
        if found:
            tensors = [sum(each) / len(found) for each in zip(*found, strict=True)]
        elif worker.at.has_anchor:
            tensors = worker.syncer.anchor.views
        else:
            tensors = worker.inner.replica.local()
        for param, x in zip(self._params, tensors, strict=True):
            param.copy_(x)

    @torch.no_grad()
    def set_buffers(self, opt: LocalOptimizer) -> None:
        """Set the buffers to the global model's if the policy has global buffers, else to this
        worker's."""
        theirs = opt._worker.warmup.buffers
        for mine, own in zip(self._buffers.all(), theirs.all(), strict=True):
            mine.copy_(own)
        self._buffers.load(theirs.state())
        self._buffers.copy_to_local()

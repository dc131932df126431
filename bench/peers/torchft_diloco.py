"""torchft's DiLoCo: every worker is a replica group of one process, with a manager of its own."""

import logging
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torchft_manager import own_address, start_manager
from trainee import Trainee


class TorchftDiLoCo(Trainee):
    def __init__(
        self,
        *args: Any,
        sync_every: int,
        outer: list[float],
        fragments: int = 1,
        delay: int = 0,
        alpha: float = 0.0,
    ):
        self.sync_every, (self.outer_lr, self.momentum) = sync_every, outer
        self.fragments, self.delay, self.alpha = fragments, delay, alpha
        super().__init__(*args)

    def prepare(self) -> None:
        from torchft.local_sgd import DiLoCo

        logging.getLogger("torchft").setLevel(logging.ERROR)
        super().prepare()
        address = own_address()
        # torchft tells the others this machine's name. Here one machine plays several, and what
        # reaches this one of them is its address.
        socket.gethostname = lambda: address
        self.manager, self.beside = start_manager(address)
        parts = split(self.net, self.fragments)
        self.diloco = DiLoCo(
            self.manager,
            parts,
            self.inner,
            [
                torch.optim.SGD(
                    part.parameters(), lr=self.outer_lr, momentum=self.momentum, nesterov=True
                )
                for part in parts
            ],
            sync_every=self.sync_every,
            fragment_sync_delay=self.delay,
            fragment_update_alpha=self.alpha,
        )
        self.diloco.__enter__()

    @contextmanager
    def global_model(self) -> Iterator[nn.Module]:
        """What the fragments hold as the last agreed weights."""
        local = [p.detach().clone() for p in self.net.parameters()]
        self.diloco._restore_parameters()
        try:
            yield self.net
        finally:
            with torch.no_grad():
                torch._foreach_copy_(list(self.net.parameters()), local)

    def close(self) -> None:
        self.diloco.__exit__(None, None, None)
        dist.barrier()
        self.manager.shutdown(wait=False)
        self.beside.close()


def split(net: nn.Module, fragments: int) -> list[nn.Module]:
    """The model's layers in order, in parts of about equal size; the head is the embedding's."""
    inner = net.transformer
    layers = [inner.wte, inner.wpe, *inner.h, inner.ln_f]
    total = sum(p.numel() for p in net.parameters())
    parts: list[list[nn.Module]] = [[] for _ in range(fragments)]
    before = 0
    for layer in layers:
        size = sum(p.numel() for p in layer.parameters())
        parts[min(fragments - 1, int(fragments * (before + size / 2) / total))].append(layer)
        before += size
    return [nn.ModuleList(part) for part in parts]

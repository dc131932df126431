"""torchft's DiLoCo: every worker is a replica group of one process, with a manager of its own.

Worker 0 runs the lighthouse, so that its small messages travel over the same link.
"""

import logging
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from trainee import Trainee

TIMEOUT = timedelta(seconds=300)


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
        from torchft import Manager, ProcessGroupGloo
        from torchft.local_sgd import DiLoCo

        logging.getLogger("torchft").setLevel(logging.ERROR)
        super().prepare()
        address = own_address()
        # torchft tells the others this machine's name. Here one machine plays several, and what
        # reaches this one of them is its address.
        socket.gethostname = lambda: address
        self.lighthouse, lighthouse_address = meet_at_lighthouse(address)
        self.store = dist.TCPStore(address, 0, is_master=True, wait_for_workers=False)
        self.manager = Manager(
            pg=ProcessGroupGloo(timeout=TIMEOUT),
            load_state_dict=lambda state: None,
            state_dict=lambda: {},
            min_replica_size=dist.get_world_size(),
            use_async_quorum=False,
            timeout=TIMEOUT,
            quorum_timeout=TIMEOUT,
            rank=0,
            world_size=1,
            store_addr=address,
            store_port=self.store.port,
            lighthouse_addr=lighthouse_address,
            replica_id=f"worker_{dist.get_rank()}",
            hostname=address,
            init_sync=False,  # the first weights are equal
        )
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
        if self.lighthouse is not None:
            self.lighthouse.shutdown()


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


def own_address() -> str:
    """The address of the interface that the others are reached through."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((os.environ["MASTER_ADDR"], 9))
        return probe.getsockname()[0]


def meet_at_lighthouse(address: str) -> tuple[Any, str]:
    from torchft.coordination import LighthouseServer

    lighthouse, found = None, [""]
    if dist.get_rank() == 0:
        lighthouse = LighthouseServer(bind="[::]:0", min_replicas=dist.get_world_size())
        found = [f"http://{address}:{lighthouse.address().rsplit(':', 1)[1]}"]
    dist.broadcast_object_list(found)
    return lighthouse, found[0]

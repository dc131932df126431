"""Who syncs: each has a model of its own, with the same first weights, and a call that syncs it.

No parameter has a gradient, so that an inner step moves nothing and takes next to no time: what is
timed is the sync. The two families come to the same weights, each among themselves: those that
average the models, and those that take a Nesterov step by the mean change.
"""

import logging
import os
import socket
from typing import Any

import torch
import torch.distributed as dist
from common import gpt_neo_tensors
from plain import PlainDiLoCo
from torch import nn
from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager

import palsgd

LR, MOMENTUM = 0.7, 0.9  # of the outer step


class Contender:
    """The bare all-reduce of one flat tensor as large as the model: what no sync can do without."""

    label, family = "bare all-reduce", ""
    package: str | None = None  # to be installed for it
    bytes_sent = 0  # by one sync, as far as the contender counts them

    def __init__(self, size: str):
        torch.manual_seed(0)
        self.model = gpt_neo_tensors(size, "cpu")
        self.params = [p.detach() for p in self.model.parameters()]
        self.prepare()

    def prepare(self) -> None:
        self.flat = torch.zeros(sum(p.numel() for p in self.params))

    def sync(self) -> None:
        dist.all_reduce(self.flat)

    def weights(self) -> list[torch.Tensor]:
        """Asked for anew each time, as some peers put other tensors in the parameters' places."""
        return [p.detach() for p in self.model.parameters()]

    def bare_inner(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.model.parameters(), lr=1.0)

    def close(self) -> None:
        """End what runs beside the syncs."""


class OursLocalSGD(Contender):
    label, family = "palsgd LocalSGD", "average"

    def prepare(self) -> None:
        self.opt: Any = palsgd.LocalSGD(self.model, self.bare_inner(), sync_every=1)
        self.opt.run_until(10**9)  # opens the local phase, while all models are still equal

    def sync(self) -> None:
        self.opt.step()

    @property
    def bytes_sent(self) -> int:  # type: ignore[override]
        return self.opt.ledger.history[-1]["bytes_sent"]


class OursDiLoCo(OursLocalSGD):
    label, family = "palsgd DiLoCo", "nesterov"

    def prepare(self) -> None:
        outer = palsgd.nesterov(LR, MOMENTUM)
        self.opt = palsgd.DiLoCo(self.model, self.bare_inner(), sync_every=1, outer=outer)
        self.opt.run_until(10**9)


class Plain(Contender):
    label, family = "DiLoCo by hand", "nesterov"

    def prepare(self) -> None:
        self.plain = PlainDiLoCo(self.params, LR, MOMENTUM)

    def sync(self) -> None:
        self.plain.sync()


class TorchAverager(Contender):
    label, family = "torch PeriodicModelAverager", "average"

    def prepare(self) -> None:
        self.averager = PeriodicModelAverager(period=1, warmup_steps=0)
        for p in self.model.parameters():  # it leaves out what has no gradient
            p.grad = torch.zeros(()).expand(p.shape)

    def sync(self) -> None:
        self.averager.average_parameters(self.model.parameters())


class Accelerate(Contender):
    label, family, package = "accelerate LocalSGD", "average", "accelerate"

    def prepare(self) -> None:
        os.environ["ACCELERATE_USE_CPU"] = "true"
        from accelerate import Accelerator
        from accelerate.local_sgd import LocalSGD

        accelerator = Accelerator()
        self.local = LocalSGD(accelerator, accelerator.prepare_model(self.model), local_sgd_steps=1)
        if not self.local.enabled:
            raise RuntimeError("accelerate turned its LocalSGD off: it sees a single process")
        self.local.__enter__()

    def sync(self) -> None:
        self.local.step()


class Torchft(Contender):
    label, family, package = "torchft DiLoCo", "nesterov", "torchft"

    def prepare(self) -> None:
        from torchft.local_sgd import DiLoCo
        from torchft_manager import own_address, start_manager

        logging.getLogger("torchft").setLevel(logging.ERROR)
        address = own_address()
        socket.gethostname = lambda: address
        self.manager, self.beside = start_manager(address)
        outer = torch.optim.SGD(self.model.parameters(), lr=LR, momentum=MOMENTUM, nesterov=True)
        self.inner = self.bare_inner()
        self.diloco = DiLoCo(
            self.manager, [nn.ModuleList([self.model])], self.inner, outer, sync_every=1
        )
        self.diloco.__enter__()

    def sync(self) -> None:
        self.inner.step()

    def close(self) -> None:
        self.diloco.__exit__(None, None, None)
        dist.barrier()
        self.manager.shutdown(wait=False)
        self.beside.close()


CONTENDERS: dict[str, type[Contender]] = {
    "all-reduce": Contender,
    "by hand": Plain,
    "localsgd": OursLocalSGD,
    "diloco": OursDiLoCo,
    "torch": TorchAverager,
    "accelerate": Accelerate,
    "torchft": Torchft,
}

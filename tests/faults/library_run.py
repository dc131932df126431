"""What a worker of the library's scenarios does: a short training run that saves as it goes."""

import hashlib
import os
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import palsgd
from faults.damage import step_of
from faults.fault import Fault
from faults.notes import Notes
from faults.strikes import Strike

STEPS, SYNC_EVERY, SAVE_EVERY = 48, 8, 4
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "compressed": {"compress": "int8"},
    "delayed": {"delay": 3},
    "fragmented": {"fragments": 2},
    "paced": {"draws": "paced", "speeds": (1.0, 0.8)},
    "soak": {"compress": "int8", "delay": 3},
}


class Net(nn.Module):
    """A model of two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 16), nn.Linear(16, 4)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.second(torch.tanh(self.first(inputs)))


class OtherNet(Net):
    """The same weights, and other arithmetic."""

    def forward(self, inputs: Tensor) -> Tensor:
        return self.second(torch.relu(self.first(inputs)))


OtherNet.__name__ = OtherNet.__qualname__ = "Net"  # as another version of the same file has it


@dataclass(frozen=True)
class Order:
    """What the workers of a run are told."""

    scenario: str
    folder: Path  # of the saves
    notes: Path
    store: Path
    timeout_s: float  # of the process group
    interface: str = "lo"
    resume: bool = False
    fault: Fault | None = None
    steps: int = STEPS
    save_every: int = SAVE_EVERY  # gradient steps

    def hits(self, kind: str, worker: int) -> bool:
        return self.fault is not None and (kind, worker) == (self.fault.kind, self.fault.victim)

    def work(self, worker: int) -> None:
        _work(self, worker)


def _work(order: Order, worker: int) -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = order.interface
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=order.store.as_uri(),
        rank=worker,
        world_size=2,
        timeout=timedelta(seconds=order.timeout_s),
    )
    notes = Notes(order.notes, worker)
    try:
        _train(order, worker, notes)
    except Exception as error:
        notes.add("error", kind=type(error).__name__, message=str(error))
        os._exit(1)  # an ordinary end would wait for threads of exchanges that never end
    os._exit(0)


def _train(order: Order, worker: int, notes: Notes) -> None:
    model, opt = _built(order, worker, notes)
    if order.resume:
        loaded = palsgd.checkpoint.load(order.folder, model, opt)
        notes.add("resumed", step=step_of(loaded.path))
    strike = Strike(order.fault, worker, order.folder, notes)
    palsgd.leave_on_sigterm(opt)
    for _ in palsgd.until([None], opt, steps=order.steps):
        step = opt.gradient_steps
        _disturbed_gradient(model, worker, step, strike, order)
        opt.step()
        opt.zero_grad()
        if opt.leaving:
            break
        if opt.synced if order.scenario == "paced" else step % order.save_every == 0:
            saved = palsgd.checkpoint.save(order.folder, model, opt)
            notes.add("saved", step=step_of(saved))
    if opt.leaving:
        saved = palsgd.checkpoint.save(order.folder, model, opt)
        notes.add("saved", step=step_of(saved))
        notes.add("left")
        os._exit(143)
    notes.add("done", digest=digest(model, opt))


def _built(order: Order, worker: int, notes: Notes) -> tuple[Net, palsgd.LocalOptimizer]:
    torch.manual_seed(0)
    strange = [kind for kind in ("other settings", "other code") if order.hits(kind, worker)]
    if strange:
        notes.add("struck", step=0)
    model = OtherNet() if strange == ["other code"] else Net()
    lr = 0.011 if strange == ["other settings"] else 0.01
    inner = torch.optim.AdamW(model.parameters(), lr=lr)
    options = {"mix_prob": 0.1, "sync_every": SYNC_EVERY, **OPTIONS[order.scenario]}
    return model, palsgd.PALSGD(model, inner, **options)


def gradient(model: Net, worker: int, step: int) -> None:
    """Compute it, on examples that depend on worker and step alone."""
    draw = torch.Generator().manual_seed(1000 * step + worker)
    inputs = torch.randn(16, 8, generator=draw)
    (model(inputs) - inputs[:, :4].sin()).square().mean().backward()


def _disturbed_gradient(model: Net, worker: int, step: int, strike: Strike, order: Order) -> None:
    try:
        strike.before(step)
    except RuntimeError:
        if not order.hits("out of memory, caught", worker):
            raise
    gradient(model, worker, step)
    strike.spoil(step, list(model.parameters()))


def digest(model: Net, opt: palsgd.LocalOptimizer) -> str:
    """Of the worker's own weights and of the global ones."""
    found = hashlib.sha256()
    for value in model.state_dict().values():
        found.update(value.numpy().tobytes())
    with opt.anchor_weights():
        for value in model.state_dict().values():
            found.update(value.numpy().tobytes())
    return found.hexdigest()

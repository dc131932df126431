"""What a gradient step, and a worker's own part of a sync, take on this machine."""

import time
from dataclasses import dataclass
from statistics import median

import torch

from palsgd.lab import workloads
from palsgd.lab.device import chosen_device, device_words, wait_for
from palsgd.lab.factory import build_optimizer, low_precision
from palsgd.lab.methods import plain_local
from palsgd.lab.settings import Settings
from palsgd.lab.trainer import split_batch
from palsgd.transports import Alone, ambient

STEPS, WARM = 7, 2


@dataclass(frozen=True)
class Measured:
    step_s: float
    sync_s: float
    parameters: int
    device: str


def measure(settings: Settings, *, data: str | None, device: str) -> Measured:
    """Medians over a few steps of a single worker, with a sync at each step."""
    place = chosen_device(device)
    own = workloads.data_settings(settings)
    workload = workloads.load(settings.workload, data=data, device=place, **own)
    settings = settings.in_steps(workload.examples)
    torch.manual_seed(settings.seed)
    model = workload.model().to(place)
    method = plain_local().name
    alone = settings.changed({"method": method, "sync_every": 1, "warmup_steps": 0, "delay": 0})
    with ambient(Alone()):
        opt = build_optimizer(alone.changed({"compress": None, "fragments": 1}), 10**6, model)
    autocast, steps, syncs = low_precision(settings, place), [], []
    for index in range(WARM + STEPS):
        before, began = opt.ledger.sync_s, _now(place)
        batch = workload.batch(
            worker=0, workers=settings.workers, size=settings.batch_size, index=index
        )
        parts = split_batch(batch, settings.micro_batches)
        for part in parts:
            with autocast():
                loss = workload.loss(model, part)
            (loss / len(parts)).backward()
        opt.step()
        opt.zero_grad()
        took = _now(place) - began
        syncs.append(opt.ledger.sync_s - before)
        steps.append(took - syncs[-1])
    return Measured(
        step_s=median(steps[WARM:]),
        sync_s=max(0.0, median(syncs[WARM:])),
        parameters=sum(p.numel() for p in model.parameters() if p.requires_grad),
        device=device_words(place),
    )


def _now(place: torch.device) -> float:
    wait_for(place)
    return time.perf_counter()

"""What a gradient step, a worker's own part of a sync, and coding take on this machine."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median

import torch

from palsgd.codecs import find_codec
from palsgd.codecs.coded_mean import CodedMean, new_residue
from palsgd.lab import workloads
from palsgd.lab.device import chosen_device, device_words, wait_for
from palsgd.lab.factory import build_optimizer, low_precision
from palsgd.lab.methods import plain_local
from palsgd.lab.plan.candidates import CODES
from palsgd.lab.settings import Settings
from palsgd.lab.worker_loop import split_batch
from palsgd.transports import Alone, ambient

BLOCKS, STEPS, WARM = 7, 2, 2  # blocks of steps that are timed, and steps before them
POOR = 0.2  # the spread of the blocks above which a measurement is called poor
ELEMENTS, WORKERS = 1 << 20, 8  # of the message that is coded


@dataclass(frozen=True)
class Measured:
    step_s: float  # the median over blocks of steps
    low_s: float  # of these blocks, without the fastest and the slowest one
    high_s: float
    sync_s: float
    parameters: int
    device: str
    coding_s: dict[str, float]  # per element, by code

    @property
    def spread(self) -> float:
        return (self.high_s - self.low_s) / self.step_s

    @property
    def words(self) -> str:
        """With a warning where other programs disturbed the measurement."""
        from palsgd.lab.plan.text import time_words

        said = (
            f"A step was measured on {self.device}: {time_words(self.step_s)}, the median of "
            f"{BLOCKS} blocks of {STEPS} steps, most of them between {time_words(self.low_s)} and "
            f"{time_words(self.high_s)}."
        )
        if self.spread <= POOR:
            return said
        return (
            f"{said} WARNING: they differ by {self.spread:.0%}, so this plan is as uncertain; "
            "measure on a quiet machine, or give --step-ms."
        )


def measure(settings: Settings, *, data: str | None, device: str) -> Measured:
    """Medians over blocks of steps of a single worker, with a sync at each step."""
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
    for index in range(WARM + BLOCKS * STEPS):
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
    step, low, high = in_blocks(steps[WARM:])
    return Measured(
        step_s=step,
        low_s=low,
        high_s=high,
        sync_s=max(0.0, median(syncs[WARM:])),
        parameters=sum(p.numel() for p in model.parameters() if p.requires_grad),
        device=device_words(place),
        coding_s={code: coding_s(code, place) for code in CODES if code is not None},
    )


def in_blocks(steps: list[float]) -> tuple[float, float, float]:
    """The median of the blocks' means, and the second and the last but one of them."""
    means = sorted(sum(steps[i : i + STEPS]) / STEPS for i in range(0, len(steps), STEPS))
    return median(means), means[1], means[-2]


def coding_s(code: str, place: torch.device) -> float:
    """Seconds per element in which a worker codes its message, adds up its chunk and decodes the
    mean: the least of several, as others only slow it down."""
    codec = find_codec(code)
    assert codec is not None
    residue = new_residue(ELEMENTS, codec, worker=0, workers=WORKERS, device=place)
    values = torch.randn(ELEMENTS, device=place)

    def once() -> None:
        coded = CodedMean(
            values.clone(), 0, codec, residue, worker=0, workers=WORKERS, device=place
        )
        rows = coded.chunks()
        mean = coded.mean(rows)
        coded.keep()
        coded.accept([mean] * WORKERS)

    return min(_timed(once, place) for _ in range(3)) / ELEMENTS


def _timed(call: Callable[[], None], place: torch.device) -> float:
    began = _now(place)
    call()
    return _now(place) - began


def _now(place: torch.device) -> float:
    wait_for(place)
    return time.perf_counter()

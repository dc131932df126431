"""Measures what the steps of several programs take, in short blocks that are taken in turn.

The blocks of a turn follow each other at once (A B C A B C ...), so a machine that becomes slower
or faster does so for all programs alike, and the order in which they are trained decides nothing.
Nothing that is timed here becomes part of a training.
"""

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch.distributed as dist

from palsgd import registry
from palsgd.lab.device import device_words
from palsgd.lab.methods import baseline, method_of, plain_local, without_effect
from palsgd.lab.settings import Settings
from palsgd.lab.timeline import Span
from palsgd.lab.timing.blocks import Block, RoundBlock, StepsBlock
from palsgd.lab.timing.record import Session, Timed
from palsgd.lab.workload import Workload
from palsgd.transports.json_exchange import gathered

TURNS = 7
_NEVER = 10**6  # steps of a round that does not end

# Settings that do not change what a step takes. All others may, and make programs of their own.
TIMELESS = frozenset(
    {
        "seed", "lr", "momentum", "weight_decay", "outer_lr", "outer_momentum", "mix_rate", "pull",
        "steps", "epochs", "schedule", "schedule_every", "schedule_at", "schedule_factor",
        "lr_warmup_steps", "lr_warmup_epochs", "outer_schedule", "warmup_steps", "discard_batches",
        "evaluate_every", "checkpoint_every", "cluster", "split", "sharding", "target", "target_on",
        "margin", "tuned",
    }
)  # fmt: skip

Kind = tuple[str, ...]
Figures = dict[str, np.ndarray]  # by name, a value per turn: means over the processes


def measure(
    runs: Mapping[str, Settings], workload: Workload, *, link: str | None = None, turns: int = TURNS
) -> Session:
    """Time the programs of these runs, all of one workload, on all processes together. `link` is
    the emulated one that they communicate over; what each process did is then recorded too, as
    training may well be done elsewhere."""
    programs = _Programs(workload)
    wanted: dict[tuple[Kind, int], list[str]] = {}
    for name, settings in runs.items():
        settings = settings.in_steps(workload.examples)
        programs.add(settings)
        wanted.setdefault((programs.kind(settings), settings.warmup_steps), []).append(name)
    programs.take(turns)
    if link is not None:
        programs.record()
    programs.close()
    return Session(
        link=link,
        backend=str(dist.get_backend()),
        machine=device_words(workload.device),
        repetitions=turns,
        programs=tuple(
            programs.timed(tuple(names), runs[names[0]].in_steps(workload.examples))
            for names in wanted.values()
        ),
    )


def can_be_timed(settings: Settings) -> bool:
    """Rounds whose length is found, or changes, while training runs have no block of their own; the
    clocks of such runs count instead."""
    return not registry.row(settings.method).rounds or isinstance(settings.sync_every, int)


class _Programs:
    """The blocks of all programs. Settings that take the same time share theirs."""

    def __init__(self, workload: Workload):
        self._workload = workload
        self._blocks: dict[Kind, Block] = {}
        self._figures: dict[Kind, Figures] = {}
        self._spans: dict[Kind, list[Span]] = {}

    def add(self, settings: Settings) -> None:
        alone = _alone(settings)
        self._build(alone, lambda: StepsBlock(alone, self._workload))
        if _averages(settings):
            ddp = _averaging(settings)
            self._build(ddp, lambda: StepsBlock(ddp, self._workload))
        if registry.row(settings.method).rounds:
            local, step_s = _local(settings), self._first_step(alone)
            self._build(local, lambda: RoundBlock(local, self._workload, step_s=step_s))

    def _build(self, settings: Settings, make: Callable[[], Block]) -> None:
        """The first block is not counted: connections are made in it and memory is allocated."""
        kind = self.kind(settings)
        if kind not in self._blocks:
            self._blocks[kind] = make()
            self._figures[kind] = _over_processes([self._blocks[kind].take()])

    def _first_step(self, alone: Settings) -> float:
        return float(self._figures[self.kind(alone)]["step"][0])

    def take(self, turns: int) -> None:
        taken = [[block.take() for block in self._blocks.values()] for _ in range(turns)]
        for kind, *rows in zip(self._blocks, *taken, strict=True):
            self._figures[kind] = _over_processes(rows)

    def record(self) -> None:
        """Of all programs that exchange something."""
        self._spans = {
            kind: block.record()
            for kind, block in self._blocks.items()
            if block.loop.settings.sync_every != _NEVER
        }

    def close(self) -> None:
        for block in self._blocks.values():
            block.loop.close()
        self._blocks.clear()

    def kind(self, settings: Settings) -> Kind:
        without = TIMELESS | without_effect(settings.method)
        values = settings.as_dict()
        return tuple(f"{key}={values[key]!r}" for key in sorted(values) if key not in without)

    def timed(self, names: tuple[str, ...], settings: Settings) -> Timed:
        alone = self._figures[self.kind(_alone(settings))]
        rounds = registry.row(settings.method).rounds
        averaging = local = None
        mixing_s = 0.0
        if _averages(settings):
            averaging = _averaging_parts(alone, self._figures[self.kind(_averaging(settings))])
        if rounds:
            found = self._figures[self.kind(_local(settings))]
            mixing_s = float(found["mixing"].sum() / max(1.0, found["mixings"].sum()))
            local = _local_parts(settings, found, mixing_s)
        return Timed(
            runs=names,
            warmup=settings.warmup_steps if rounds else None,
            step_s=alone["step"].tolist(),
            averaging=None if averaging is None else averaging.tolist(),
            local=None if local is None else local.tolist(),
            mixing_s=mixing_s,
            spans=self._spans.get(self.kind((_local if rounds else _averaging)(settings)), []),
        )


# -- the programs of a run -----------------------------------------------------------------------


def _alone(settings: Settings) -> Settings:
    """Gradient steps without any exchange."""
    plain = {"method": plain_local().name, "compress": None, "delay": 0, "fragments": 1}
    return _calm(settings).changed(plain | {"sync_every": _NEVER, "warmup_steps": 0})


def _averages(settings: Settings) -> bool:
    return not registry.row(settings.method).rounds or settings.warmup_steps > 0


def _averaging(settings: Settings) -> Settings:
    return _calm(settings).changed({"method": baseline().name})


def _local(settings: Settings) -> Settings:
    return _calm(settings).changed({"warmup_steps": 0})


def _calm(settings: Settings) -> Settings:
    """With a learning rate at which nothing diverges, and steps take the same time. A mixing rate
    is a share of the learning rate, so a pull stands in for it. Blocks of a round or two are too
    short to measure speeds in, so paced draws are timed as balanced ones, which are no faster."""
    changes: dict[str, Any] = {"lr": min(settings.lr, 1e-6)}
    if settings.draws == "paced":
        changes |= {"draws": "balanced", "speeds": None}
    if settings.mix_rate is not None:
        changes["pull"] = 0.5
    return settings.changed(changes)


# -- from blocks to the parts of a step ----------------------------------------------------------


def _averaging_parts(alone: Figures, ddp: Figures) -> np.ndarray:
    """DDP's exchanges overlap its backward pass. What they cost is what its step takes longer than
    one without exchange; of that, waiting is what the slowest worker's step takes longer than the
    mean one."""
    exposed = np.maximum(0.0, ddp["step"] - alone["step"])
    computing = ddp["step"] - exposed
    waiting = np.minimum(exposed, alone["slowest"] - alone["step"])
    return np.stack([computing, np.zeros_like(exposed), waiting, exposed - waiting], axis=1)


def _local_parts(settings: Settings, found: Figures, mixing_s: float) -> np.ndarray:
    """A step is a gradient with the method's share and a mixing step otherwise, and has its part of
    a sync, whatever the plan of the rounds that were timed."""
    share, length = method_of(settings).gradient_share, int(settings.sync_every)
    # a worker learns at a sync how long it waited at the one before, so the two are told apart by
    # their means over all turns
    together = found["sync"] + found["waiting"]
    waited = found["waiting"].sum() / together.sum() if together.sum() else 0.0
    return np.stack(
        [
            share * found["step"],
            np.full_like(together, (1 - share) * mixing_s),
            waited * together / length,
            (1 - waited) * together / length,
        ],
        axis=1,
    )


def _over_processes(taken: list[dict[str, float]]) -> Figures:
    """Means over the processes, and the slowest of them."""
    everyone = gathered(taken)
    each = {
        name: np.array([[turn[name] for turn in turns] for turns in everyone]) for name in taken[0]
    }
    means = {name: values.mean(axis=0) for name, values in each.items()}
    return means | {"slowest": each["step"].max(axis=0)}

"""Everything that defines a run, in one flat record. A recipe is a Settings with values filled in."""

import difflib
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

METHODS = ("ddp", "localsgd", "diloco", "palsgd")


@dataclass(frozen=True, kw_only=True)
class Settings:
    workload: str
    method: str = "palsgd"
    workers: int = 4
    steps: int | None = None  # of the clock; one of steps and epochs is given
    epochs: float | None = None
    batch_size: int = 32  # per worker and gradient
    micro_batches: int = 1  # a gradient is the mean over this many parts of its batch

    sync_every: int = 64  # H
    mix_prob: float = 0.1  # p
    mix_rate: float = 1.0  # eta
    warmup_steps: int = 0
    draws: str = "balanced"
    buffers: str = "average"

    inner: str = "sgd"  # sgd, adamw, adam
    lr: float = 0.01
    momentum: float = 0.9  # of inner SGD
    weight_decay: float = 0.0
    max_norm: float | None = None  # clipping
    schedule: str = "constant"  # constant, cosine (to zero at the last step)
    lr_warmup_steps: int = 0  # linear, before the schedule
    outer: str = "nesterov"  # nesterov, sgd, adam
    outer_lr: float = 0.2
    outer_momentum: float = 0.9

    precision: str = "fp32"  # fp32, tf32, bf16 (autocast)
    seed: int = 2023
    evaluate_every: int | None = None  # steps; None: twenty times in a run

"""Everything that defines a run, in one flat record. A recipe is one with its values filled in."""

import difflib
import math
import types
import typing
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from typing import Any

from palsgd.checks import below, check_choice, check_number

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

    sync_every: int | str = 64  # H, or "auto": from what syncs and steps are measured to cost
    mix_prob: float = 0.1  # p
    mix_rate: float = 1.0  # eta
    warmup_steps: int = 0
    draws: str = "balanced"
    buffers: str = "average"
    compress: str | None = None  # what a sync sends: bf16, int8, int4 or topk:SHARE
    delay: int = 0  # steps that a sync travels, while training goes on
    fragments: int = 1  # parts of the model that are synced one after another

    inner: str = "sgd"
    lr: float = 0.01
    momentum: float = 0.9  # of inner SGD
    weight_decay: float = 0.0
    max_norm: float | None = None  # clipping
    schedule: str = "constant"  # cosine: to zero at the last step
    lr_warmup_steps: int = 0  # linear, before the schedule
    outer: str = "nesterov"
    outer_lr: float = 0.2
    outer_momentum: float = 0.9

    precision: str = "fp32"
    seed: int = 2023
    evaluate_every: int | None = None  # steps; None: twenty times in a run
    checkpoint_every: int | None = None  # rounds; None: whenever the model is evaluated
    cluster: str | None = None  # whose time a simulation tells, e.g. 100mbit,20ms,step=50ms

    def __post_init__(self) -> None:
        for name, choices in CHOICES.items():
            check_choice(name, getattr(self, name), choices)
        for name, (low, high, words) in RANGES.items():
            value = getattr(self, name)
            if value is not None and (name, value) != ("sync_every", "auto"):
                check_number(name, value, words, low=low, high=high)
        self._check_what_needs_torch()
        if self.batch_size % self.micro_batches:
            raise ValueError(
                f"batch_size={self.batch_size} is not a multiple of "
                f"micro_batches={self.micro_batches}; choose one that is"
            )

    def _check_what_needs_torch(self) -> None:
        """Torch takes a second to import, which the help texts, that need this module, do not have
        to wait for."""
        if self.compress is not None:
            from palsgd.compression import find_codec

            find_codec(self.compress)
        if self.cluster is not None:
            from palsgd.cluster import Cluster

            Cluster.parse(self.cluster, workers=self.workers)

    def changed(self, changes: Mapping[str, Any]) -> "Settings":
        """With these values, given as text or as they are; steps and epochs exclude each other."""
        values = {name: parsed(name, value) for name, value in changes.items()}
        if values.get("steps") is not None:
            values.setdefault("epochs", None)
        if values.get("epochs") is not None:
            values.setdefault("steps", None)
        return replace(self, **values)

    def total_steps(self, examples: int) -> int:
        """The clock at the end; an epoch is one pass over `examples` by all workers together."""
        if self.steps is not None:
            return self.steps
        if self.epochs is None:
            raise ValueError("neither steps nor epochs is given; add for instance --steps 1000")
        steps = examples // (self.workers * self.batch_size)
        if steps == 0:
            raise ValueError(
                f"an epoch of {examples} examples has no step: {self.workers} workers with "
                f"batch_size={self.batch_size} take {self.workers * self.batch_size} in each; use "
                "a smaller batch_size, fewer workers, or --steps"
            )
        return max(1, round(self.epochs * steps))

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


CHOICES = {
    "method": METHODS,
    "draws": ("balanced", "independent", "shared"),
    "buffers": ("average", "local"),
    "inner": ("sgd", "adam", "adamw"),
    "schedule": ("constant", "cosine"),
    "outer": ("nesterov", "sgd", "adam"),
    "precision": ("fp32", "tf32", "bf16"),
}
# Strict limits, and the range in words
_COUNT = (below(1), math.inf, "at least 1")
_NOT_NEGATIVE = (below(0), math.inf, "a number >= 0")
_POSITIVE = (0.0, math.inf, "a number > 0")
_SHARE = (below(0), 1.0, "in [0, 1)")
RANGES: dict[str, tuple[float, float, str]] = {
    **dict.fromkeys(("workers", "steps", "batch_size", "micro_batches", "sync_every"), _COUNT),
    **dict.fromkeys(("evaluate_every", "checkpoint_every", "fragments"), _COUNT),
    "delay": _NOT_NEGATIVE,
    **dict.fromkeys(("warmup_steps", "lr_warmup_steps", "seed", "weight_decay"), _NOT_NEGATIVE),
    **dict.fromkeys(("lr", "outer_lr", "mix_rate"), _NOT_NEGATIVE),
    **dict.fromkeys(("mix_prob", "momentum", "outer_momentum"), _SHARE),
    **dict.fromkeys(("epochs", "max_norm"), _POSITIVE),
}
FIELDS = {field.name: field for field in fields(Settings)}


def parsed(name: str, value: Any) -> Any:
    """The value of a field from text such as `64`, `0.1` or `none`."""
    check_field(name)
    kinds = _kinds(name)
    if not isinstance(value, str):
        return value
    if type(None) in kinds and value.lower() == "none":
        return None
    if (name, value) == ("sync_every", "auto"):
        return value
    kind = next(k for k in kinds if k is not type(None))
    try:
        return kind(value)
    except ValueError:
        raise ValueError(
            f"{name}={value} is no {'whole number' if kind is int else 'number'}"
        ) from None


def check_field(name: str) -> None:
    if name not in FIELDS:
        (nearest,) = difflib.get_close_matches(name, FIELDS, n=1, cutoff=0.0)
        raise ValueError(f"there is no setting {name!r}; did you mean {nearest!r}?")


def assignments(texts: list[str]) -> dict[str, str]:
    """`["lr=0.1", "seed=1"]` as a dict."""
    found = {}
    for text in texts:
        name, sign, value = text.partition("=")
        if not sign or not value:
            raise ValueError(f"{text!r} is not of the form field=value, for instance lr=0.01")
        check_field(name)
        found[name] = value
    return found


def _kinds(name: str) -> tuple[type, ...]:
    hint = typing.get_type_hints(Settings)[name]
    return typing.get_args(hint) if isinstance(hint, types.UnionType) else (hint,)

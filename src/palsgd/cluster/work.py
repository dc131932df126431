"""The properties of a model and a method that determine the time of a run."""

import math
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any

from palsgd import units
from palsgd.checks import (
    LONGEST_ROUND,
    below,
    check_choice,
    check_int,
    check_mix_prob,
    check_number,
)
from palsgd.codecs import find_codec
from palsgd.payload import MethodSize, ModelSize, PayloadSize
from palsgd.schedule import DRAWS, Schedule

if TYPE_CHECKING:
    from palsgd.optimizer import LocalOptimizer

FIRST_BUCKET = 2**20  # bytes, of torch's DistributedDataParallel


@dataclass(frozen=True, kw_only=True)
class Work:
    """What a model and a method ask of a cluster.

    Args:
        parameters: how many are trained; a number or text ("8M").
        sync_every, mix_prob, draws: H, p and the draws, as those of an optimizer.
        warmup_steps: steps of DDP at the start; `math.inf`: DDP.
        compress: the codec of a sync, by its name.
        delay: steps between the end of a round and the use of its mean.
        fragments: parts of the model that are synced one after another.
        buffers: numbers that are sent with the model.
        carries: what the method sends at a sync; by default the displacement of the model.
        coding: seconds of a worker's own coding at a sync, per element.
        gradient_bytes: of an element of DDP's gradients; 2 for a bf16 model.
        sent_share: the share of those bytes that DDP sends; less than 1 with PowerSGD.
        bucket_mb: the size of DDP's all-reduces, torch's `bucket_cap_mb`.
        accumulate: gradients of a worker that DDP adds up before it averages them.

    Raises:
        ValueError: a value is out of its range.

    Example:
        >>> from palsgd.cluster import Work
        >>> Work(parameters="8M", sync_every=64).parameters
        8000000
    """

    parameters: int
    sync_every: int = 1
    mix_prob: float = 0.0
    draws: str = "balanced"
    warmup_steps: float = 0
    compress: str | None = None
    delay: int = 0
    fragments: int = 1
    buffers: int = 0
    carries: MethodSize = field(default_factory=MethodSize)
    coding: float = 0.0
    gradient_bytes: int = 4
    sent_share: float = 1.0
    bucket_mb: float = 25.0
    accumulate: int = 1

    def __post_init__(self) -> None:
        object.__setattr__(self, "parameters", units.count("parameters", self.parameters))
        check_int("sync_every", self.sync_every, least=1, most=LONGEST_ROUND)
        check_mix_prob(self.mix_prob)
        check_choice("draws", self.draws, DRAWS)
        find_codec(self.compress)
        if not (isinstance(self.warmup_steps, float) and self.warmup_steps == math.inf):
            check_int("warmup_steps", self.warmup_steps)
        check_int("gradient_bytes", self.gradient_bytes, least=1)
        check_number("bucket_mb", self.bucket_mb, "more than 0 MiB", low=0.0, high=2.0**40)
        check_number("coding", self.coding, "a time of 0 s or more", low=below(0.0))
        share, words = self.sent_share, "a share in (0, 1]"
        check_number("sent_share", share, words, low=0.0, high=math.nextafter(1.0, 2.0))
        check_int("accumulate", self.accumulate, least=1)
        if check_int("fragments", self.fragments, least=1) > self.sync_every:
            raise ValueError(
                f"fragments={self.fragments} must be at most sync_every={self.sync_every}: each is "
                "sent at a step of its own"
            )
        longest = self.sync_every // self.fragments
        if check_int("delay", self.delay) > longest:
            raise ValueError(
                f"delay={self.delay} must be at most sync_every / fragments = {longest}: one "
                "exchange is under way at a time"
            )

    @classmethod
    def ddp(cls, parameters: int, **how: Any) -> "Work":
        """The work of DDP."""
        return cls(parameters=parameters, warmup_steps=math.inf, **how)

    @classmethod
    def of(cls, optimizer: "LocalOptimizer") -> "Work":
        """The work of a palsgd optimizer."""
        method, config = optimizer.method, optimizer.config
        model = ModelSize.of(optimizer.model, config["buffers"])
        return cls(
            parameters=model.parameters,
            sync_every=optimizer.sync_every,
            mix_prob=round(1 - method.gradient_share, 12),
            draws=config["draws"],
            warmup_steps=optimizer.schedule.warmup,
            compress=config["compress"],
            delay=config["delay"],
            fragments=config["fragments"],
            buffers=model.buffers,
            carries=MethodSize.of(method),
        )

    @property
    def is_ddp(self) -> bool:
        return self.warmup_steps == math.inf

    @property
    def gradient_size(self) -> int:
        """Bytes of a DDP all-reduce."""
        return max(1, round(self.parameters * self.gradient_bytes * self.sent_share))

    @cached_property
    def schedule(self) -> Schedule:
        """The schedule of its rounds and syncs."""
        return Schedule.fixed(
            sync_every=self.sync_every,
            warmup=self.warmup_steps,
            fragments=self.fragments,
            delay=self.delay,
        )

    def payload(self, workers: int) -> PayloadSize:
        """The sizes of what its syncs send. All buckets of a fragment, of 128 MiB each, count as
        one message, as the latency of a further message is small against the time of its
        transfer."""
        return PayloadSize.of(
            ModelSize(parameters=self.parameters, buffers=self.buffers),
            self.carries,
            workers=workers,
            fragments=self.fragments,
            delay=self.delay,
            codec=find_codec(self.compress),
            whole=True,
            draws=self.draws,
        )

    def buckets(self) -> list[int]:
        """Sizes of DDP's all-reduces in the order of the backward pass. torch's sizes differ from
        these a little, as a bucket holds whole tensors."""
        first = min(FIRST_BUCKET, self.gradient_size)
        size = int(self.bucket_mb * 2**20)
        full, rest = divmod(self.gradient_size - first, size)
        return [first] + [size] * full + [rest] * (rest > 0)

"""What the settings of a run come to, in numbers."""

import math
from dataclasses import dataclass

import numpy as np
import torch

from palsgd.compression import BLOCK, Codec, CodedMean, find_codec
from palsgd.draws import round_stops
from palsgd.lab import workloads
from palsgd.lab.factory import learning_rate_factor
from palsgd.lab.settings import Settings
from palsgd.layout import fragments
from palsgd.method import Method
from palsgd.pseudo_async import PseudoAsync
from palsgd.roll_call import RollCall


@dataclass(frozen=True, kw_only=True)
class Forecast:
    settings: Settings
    method: Method
    mix_prob: float  # 0 where the method never mixes
    steps: int
    parameters: int | None

    @property
    def warmup(self) -> int:
        return int(min(self.method.warmup_steps, self.steps))

    @property
    def local(self) -> int:
        """Steps behind the warm-up."""
        return self.steps - self.warmup

    @property
    def rounds(self) -> int:
        """With the last one, which may be cut short."""
        return math.ceil(self.local / self.method.sync_every)

    def steps_of(self, round: int) -> range:
        start = self.warmup + round * self.method.sync_every
        return range(start, min(start + self.method.sync_every, self.steps))

    def plan(self, worker: int, round: int) -> list[bool]:
        stops = round_stops(
            sync_every=self.method.sync_every,
            fragments=self.settings.fragments,
            delay=self.settings.delay,
        )
        plan = self.method.plan(worker=worker, round=round, stops=stops)
        return plan[: len(self.steps_of(round))]

    def gradients(self, steps: int) -> float:
        """Expected for one worker in this many steps of the local phase."""
        return steps * (1 - self.mix_prob)

    @property
    def excess(self) -> float:
        """How much more than the mean the slowest worker of a round computes with own coins."""
        H = self.method.sync_every
        most = expected_most(workers=self.settings.workers, coins=H, chance=1 - self.mix_prob)
        return most / self.gradients(H) - 1

    @property
    def learning_rates(self) -> tuple[float, float]:
        """The lowest and highest of the local phase: schedules rise, then fall."""
        peak = min(max(self.warmup, self.settings.lr_warmup_steps), self.steps - 1)
        clocks = (self.warmup, peak, self.steps - 1)
        rates = [
            self.settings.lr * learning_rate_factor(self.settings, self.steps, clock)
            for clock in clocks
        ]
        return min(rates), max(rates)

    @property
    def betas(self) -> tuple[float, float]:
        low, high = (lr * self.settings.mix_rate / self.mix_prob for lr in self.learning_rates)
        return low, high

    @property
    def sync_numbers(self) -> float:
        """What a worker sends in a round, in numbers of 4 bytes; in models, their size unknown."""
        codec = find_codec(self.settings.compress)
        if self.parameters is None:
            return 1.0 if codec is None else codec.width / (4 * BLOCK)
        roll_call = RollCall(self.settings.workers).size
        return sum(
            self._message(len(part), roll_call, codec)
            for part in fragments(self.parameters, self.settings.fragments)
        )

    def _message(self, elements: int, extras: int, codec: Codec | None) -> float:
        workers = self.settings.workers
        if codec is None or workers == 1:
            return elements + extras
        values = torch.empty(elements + extras, device="meta")
        return CodedMean(values, extras, codec, None, workers).nbytes / 4

    @property
    def model_numbers(self) -> float:
        return 1.0 if self.parameters is None else self.parameters


def forecast(
    settings: Settings, *, examples: int | None = None, parameters: int | None = None
) -> Forecast:
    """`examples` and `parameters` are those of the workload as it was loaded; without them, of the
    published data and of the model."""
    return Forecast(
        settings=settings,
        method=method_of(settings),
        mix_prob=settings.mix_prob if settings.method == "palsgd" else 0.0,
        steps=settings.total_steps(
            workloads.kind(settings.workload).examples if examples is None else examples
        ),
        parameters=parameters_of(settings.workload) if parameters is None else parameters,
    )


def method_of(settings: Settings) -> Method:
    """What the optimizer that is built from these settings has as its method."""
    if settings.method == "ddp":
        return Method(sync_every=1, warmup_steps=math.inf)
    if settings.sync_every == "auto":
        raise ValueError(
            "sync_every=auto is chosen when training runs, from what it measures; give a number "
            "here"
        )
    mixes = settings.method == "palsgd"
    return PseudoAsync(
        sync_every=int(settings.sync_every),
        warmup_steps=settings.warmup_steps,
        mix_prob=settings.mix_prob if mixes else 0.0,
        mix_rate=settings.mix_rate if mixes else 0.0,
        draws=settings.draws if mixes else "balanced",
        seed=settings.seed if mixes else 0,
    )


def parameters_of(workload: str) -> int | None:
    """Of the workload's model; None for one whose shape depends on its data."""
    kind = workloads.kind(workload)
    try:
        with torch.device("meta"):
            model = kind.model(object.__new__(kind))  # a workload that has not loaded its data
    except AttributeError:
        return None
    return sum(p.numel() for p in model.parameters())


def expected_most(*, workers: int, coins: int, chance: float) -> float:
    """The mean of the largest of `workers` independent Binomial(coins, chance), exactly.

    For a whole number X >= 0, E X = sum over n >= 0 of P(X > n); and the largest of K
    independent ones is at most n with probability F(n)^K.
    """
    n = np.arange(coins + 1)
    log_factorial = np.array([math.lgamma(i + 1) for i in range(coins + 1)])
    ways = log_factorial[-1] - log_factorial - log_factorial[::-1]
    at_most = np.exp(ways + n * math.log(chance) + (coins - n) * math.log1p(-chance)).cumsum()
    return float((1 - np.minimum(at_most[:-1], 1.0) ** workers).sum())

"""The numbers of steps, gradients, exchanges and bytes of a run, from its settings."""

import math
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
import torch

from palsgd import registry
from palsgd.codecs import find_codec
from palsgd.lab import workloads
from palsgd.lab.clock_values import Pieces, parse
from palsgd.lab.factory import learning_rate, lengths_of_rounds
from palsgd.lab.methods import method_of
from palsgd.lab.settings import Settings
from palsgd.method import Facts, Method
from palsgd.methods.palsgd import step_beta
from palsgd.payload import MethodSize, ModelSize, PayloadSize, wire_bytes
from palsgd.registry import Row
from palsgd.schedule import Schedule, Span

NOMINAL = ModelSize(parameters=10**7)  # of a model whose size is not known, for shares of bytes


@dataclass(frozen=True)
class Traffic:
    """What one worker exchanges, as its ledger counts it."""

    syncs: int = 0
    messages: int = 0
    bytes_sent: int = 0  # handed over
    bytes_on_the_wire: int = 0  # bytes that the collectives send for them

    def __add__(self, other: "Traffic") -> "Traffic":
        return Traffic(*(a + b for a, b in zip(_counts(self), _counts(other), strict=True)))

    def times(self, number: int) -> "Traffic":
        return Traffic(*(number * count for count in _counts(self)))


def _counts(traffic: Traffic) -> list[int]:
    return list(vars(traffic).values())


@dataclass(frozen=True, kw_only=True)
class Forecast:
    settings: Settings
    method: Method
    steps: int
    model: ModelSize | None  # None where it depends on data
    schedule: Schedule
    wrapped: bool  # does a DistributedDataParallel average the gradients of the warm-up?

    @property
    def row(self) -> Row:
        return registry.row(self.settings.method)

    @property
    def sync_every(self) -> int:
        """H; 1 where gradients are averaged at every step."""
        return self.schedule.spans[0].length

    @property
    def mix_prob(self) -> float:
        """0 where the method never mixes."""
        return round(1 - self.method.gradient_share, 12)

    @property
    def warmup(self) -> int:
        return int(min(self.schedule.warmup, self.steps))

    @property
    def local(self) -> int:
        """Steps after the warm-up."""
        return self.steps - self.warmup

    @property
    def rounds(self) -> int:
        """The number of rounds, including the last one, which may be cut short."""
        return self.schedule.round_of(self.steps - 1) + 1 if self.local else 0

    def steps_of(self, round: int) -> range:
        return self.schedule.steps_of(round)

    def plan(self, worker: int, round: int) -> list[bool]:
        steps, settings = self.steps_of(round), self.settings
        facts = Facts(
            sync_every=self.sync_every,
            workers=settings.workers,
            seed=settings.seed,
            draws=settings.draws,
            stops=self.schedule.stops(steps[0]),
            speeds=self.speeds,
        )
        length = self.schedule.length(steps[0])
        return self.method.plan(worker, round, length, facts)[: len(steps)]

    @property
    def speeds(self) -> tuple[float, ...]:
        """Of the workers, as far as they matter: those that are known before a run, or equal."""
        return self.settings.worker_speeds or (1.0,) * self.settings.workers

    def gradients(self, steps: int) -> float:
        """Expected for one worker in this many steps of the local phase; for the fastest, if
        workers are paced."""
        return steps * (1 - self.mix_prob)

    @property
    def excess(self) -> float:
        """How much more than the mean the slowest worker of a round computes with own coins."""
        H = self.sync_every
        most = expected_most(workers=self.settings.workers, coins=H, chance=1 - self.mix_prob)
        return most / self.gradients(H) - 1

    @property
    def learning_rates(self) -> tuple[float, float]:
        """The lowest and highest of the local phase: schedules rise, then fall."""
        peak = min(max(self.warmup, self.settings.lr_warmup_steps), self.steps - 1)
        clocks = (self.warmup, peak, self.steps - 1)
        rates = [learning_rate(self.settings, self.steps, clock) for clock in clocks]
        return min(rates), max(rates)

    @property
    def betas(self) -> tuple[float, float]:
        """The smallest and the largest weight of a mixing step, also where it is refused."""
        return min(self.beta_at.values()), max(self.beta_at.values())

    @cached_property
    def beta_at(self) -> dict[int, float]:
        """The weight of a mixing step at many clocks of the local phase, also where it is refused.
        Clocks at which a setting changes and the one before are among them."""
        evenly = np.linspace(self.warmup, self.steps - 1, num=min(self.local, 500), dtype=int)
        marks = [self.settings.lr_warmup_steps, *self._changes]
        clocks = {*evenly.tolist(), *marks, *(mark - 1 for mark in marks)}
        return {c: self._beta(c) for c in sorted(clocks) if self.warmup <= c < self.steps}

    @property
    def steepest(self) -> int:
        """The clock at which a mixing step has the largest weight."""
        return max(self.beta_at, key=self.beta_at.__getitem__)

    @property
    def _changes(self) -> list[int]:
        """The clocks at which mix_rate, pull or H change at once."""
        found = [span.start for span in self.schedule.spans[1:]]
        for name in ("mix_rate", "pull"):
            value = getattr(self.settings, name)
            rule = parse(name, value) if isinstance(value, str) else None
            found += [start for start, _ in rule.pieces] if isinstance(rule, Pieces) else []
        return found

    def _beta(self, clock: int) -> float:
        pull, eta = (getattr(self.method, name, None) for name in ("pull", "mix_rate"))
        if pull is not None:
            value = pull(clock) if callable(pull) else pull
            return step_beta(value, self.mix_prob, self.schedule.length(clock))
        value = eta(clock) if callable(eta) else eta or 0.0
        return learning_rate(self.settings, self.steps, clock) * value / self.mix_prob

    # -- bytes ---------------------------------------------------------------------------------

    @cached_property
    def payload(self) -> PayloadSize:
        return PayloadSize.of(
            self.model or NOMINAL,
            MethodSize.of(self.method),
            workers=self.settings.workers,
            fragments=self.schedule.fragments,
            delay=self.schedule.spans[0].delay,
            codec=find_codec(self.settings.compress) if self.row.rounds else None,
            draws=self.settings.draws if self.row.rounds else "balanced",
        )

    @property
    def ddp_step(self) -> Traffic:
        """A step of the warm-up, or of DDP."""
        if self.wrapped:
            return self._traffic([self.payload.ddp()], syncs=1, messages=0)
        return self._traffic(self.payload.warmup(), syncs=1)

    @property
    def round(self) -> Traffic:
        """A round: a sync of each fragment. Where rounds differ, the first."""
        return sum((self._sync(f, 0) for f in range(self.schedule.fragments)), Traffic())

    @cached_property
    def run(self) -> Traffic:
        """The traffic of the whole run."""
        found = self.ddp_step.times(self.warmup)
        if not self.local:
            return found
        found += self._traffic(
            self.payload.start(with_buffers=self.wrapped and self.warmup > 0), syncs=0
        )
        period = math.lcm(*(part.every for part in self.payload.parts))
        kinds = Counter(
            (due.fragment, self.schedule.round_of(clock - 1) % period)
            for clock, dues in self.schedule.exchanges(self.steps, start=self.warmup)
            for due in dues
            if due.kind != "apply"  # its bytes were counted when it was sent
        )
        return sum((self._sync(*kind).times(n) for kind, n in kinds.items()), found)

    def _sync(self, fragment: int, round: int) -> Traffic:
        sent = self.payload.sync(fragment, round)
        wire = self.payload.on_the_wire(fragment, round)
        return replace(self._traffic(sent, syncs=1), bytes_on_the_wire=wire)

    def _traffic(self, sent: list[int], *, syncs: int, messages: int | None = None) -> Traffic:
        return Traffic(
            syncs,
            len(sent) if messages is None else messages,
            sum(sent),
            sum(wire_bytes(size, self.settings.workers) for size in sent),
        )


def forecast(
    settings: Settings,
    *,
    examples: int | None = None,
    parameters: int | None = None,
    model: ModelSize | None = None,
    simulated: bool = False,
) -> Forecast:
    """`examples`, and `parameters` or `model`, are those of the workload as it was loaded; without
    them, of the published data and of its model. In a simulation, and where a worker is alone, no
    DistributedDataParallel averages the gradients of the warm-up."""
    if parameters is not None:
        model = ModelSize(parameters=parameters)
    if examples is None:
        examples = workloads.kind(settings.workload).examples
    settings = settings.in_steps(examples)
    steps = settings.total_steps(examples)
    return Forecast(
        settings=settings,
        method=method_of(settings, steps),
        steps=steps,
        model=model or model_size(settings.workload, settings.buffers),
        schedule=schedule_of(settings, steps),
        wrapped=not simulated and settings.workers > 1,
    )


def work_of(runs: Iterable[Settings]) -> float:
    """Examples of all gradients, for estimates of the time that is left. Workers count, whether
    they share a device or each other's time."""
    found = 0.0
    for run in runs:
        examples = workloads.kind(run.workload).examples
        # Where epochs are given and their length is known to `load` alone, they count as steps.
        steps = run.total_steps(examples) if run.steps or examples else run.epochs or 1.0
        found += steps * method_of(run).gradient_share * run.workers * run.batch_size
    return found


def schedule_of(settings: Settings, steps: int) -> Schedule:
    """That of the optimizer that is built from these settings."""
    if not registry.row(settings.method).rounds:
        return Schedule.fixed(sync_every=1, warmup=math.inf, end=steps)
    if settings.sync_every == "auto":
        raise ValueError(
            "sync_every=auto is chosen when training runs, from what it measures; give a number "
            "here"
        )
    if settings.rounds_differ:
        return _changing_schedule(settings, steps)
    return Schedule.fixed(
        sync_every=int(settings.sync_every),
        warmup=settings.warmup_steps,
        fragments=settings.fragments,
        delay=settings.delay,
        end=steps,
    )


def _changing_schedule(settings: Settings, steps: int) -> Schedule:
    """A span for each stretch of rounds of one length."""
    spans: list[Span] = []
    clock = settings.warmup_steps
    for round, length in enumerate(lengths_of_rounds(settings, steps)):
        if not spans or spans[-1].length != length:
            spans.append(Span(clock, round, length, 0))
        clock += length
    return Schedule(spans=tuple(spans), warmup=settings.warmup_steps, end=steps)


def model_size(workload: str, buffers: str = "average") -> ModelSize | None:
    """Of the workload's model; None for one whose shape depends on its data."""
    kind = workloads.kind(workload)
    try:
        with torch.device("meta"):
            model = kind.model(object.__new__(kind))  # a workload that has not loaded its data
    except AttributeError:
        return None
    return ModelSize.of(model, buffers)


def parameters_of(workload: str) -> int | None:
    """Of the workload's model; None for one whose shape depends on its data."""
    found = model_size(workload)
    return None if found is None else found.parameters


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

"""Which engine simulates which runs: programs, which train up to a pause, give a state and take
one."""

import copy
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from palsgd.checks import check_int
from palsgd.cluster import Cluster, WallClock
from palsgd.optimizer import LocalOptimizer
from palsgd.simulator.batches import Batches
from palsgd.simulator.exact import Exact, Randomness, own_randomness, seeded
from palsgd.simulator.history import Recorder, Watch
from palsgd.simulator.result import Result
from palsgd.simulator.room import check_memory, runs_that_fit
from palsgd.simulator.run import Run
from palsgd.simulator.stacking_checks import CannotVectorizeError, LoopIsFasterError, has_hooks
from palsgd.simulator.vectorized import Vectorized, alike
from palsgd.simulator.warm_start import CommonWarmUp

log = logging.getLogger("palsgd")

VERSION = 2  # of the states of programs
OptimizerOf = Callable[[nn.Module], LocalOptimizer]


class Engine(Protocol):
    """One run, or several as one program. The state is given and taken between two calls of
    `advance`."""

    name: str

    @property
    def starts_warm(self) -> bool:
        """Does it start after a warm-up that others have computed?"""

    def start_warm(self) -> None:
        """Go there, before the first call of `advance`, which would do so too."""

    @property
    def recorders(self) -> Sequence[Recorder]:
        """One for each run."""

    @property
    def clock(self) -> int: ...

    def advance(self) -> bool:
        """Train up to the next pause. Returns whether there was one; False: training has ended."""

    def results(self) -> list[Result]:
        """One for each run, after training."""

    def state(self) -> Iterator[tuple[str, Any]]:
        """The state, in pieces with names."""

    def load(self, saved: Mapping[str, Any]) -> None:
        """Go on from the pieces of a state."""


@dataclass
class Program:
    """One run, or several that share a stacked program.

    Which runs share a program is part of what a run computes: rounding depends on it. To go on with
    a program bit for bit, make it of the same runs, in the same order, on the same engine.
    """

    runs: list[int]  # their numbers
    _engine: Engine
    _facts: dict[str, Any]  # which simulation it is of

    @property
    def engine(self) -> str:
        """ "exact" or "vectorized"."""
        return self._engine.name

    @property
    def starts_warm(self) -> bool:
        """Does it start after a warm-up that other runs have computed?"""
        return self._engine.starts_warm

    def start_warm(self) -> None:
        """Go to the end of that warm-up, so that `histories` has it before training."""
        self._engine.start_warm()

    @property
    def clock(self) -> int:
        return self._engine.clock

    @property
    def histories(self) -> list[list[dict[str, Any]]]:
        """The entries of each run so far, as in `Result.history`."""
        return [recorder.history for recorder in self._engine.recorders]

    def advance(self) -> bool:
        """Train up to the next pause, right after an evaluation. Returns whether there was one;
        False: training has ended."""
        return self._engine.advance()

    def results(self) -> list[Result]:
        """One for each run, when training has ended."""
        return self._engine.results()

    def state(self) -> Iterator[tuple[str, Any]]:
        """The whole state at a pause, as pieces with names: tensors and plain values. A piece may
        share memory with the program; write or copy it before `advance` is called again."""
        yield "program", self._facts
        yield from self._engine.state()

    def load(self, state: Mapping[str, Any]) -> None:
        """Go on from the pieces of a state, before the first call of `advance`.

        Raises:
            ValueError: the state is of another simulation.
        """
        saved = state["program"]
        for name, value in self._facts.items():
            if saved.get(name) != value:
                raise ValueError(
                    f"the checkpoint is of another simulation: {name} was {saved.get(name)}, and "
                    f"is {value} now; use the old value, or another checkpoint folder"
                )
        self._engine.load(state)


@dataclass
class Start:
    """A run that has not begun: its new model, its data and its recorder."""

    number: int
    model: nn.Module
    batches: list[Batches]
    method: OptimizerOf
    seed: int
    rngs: list[Randomness]  # of the workers, for the exact engine
    recorder: Recorder
    warmup: CommonWarmUp | None  # what it has in common with other runs

    def try_batches(self) -> None:
        """Draw the first batch of each worker with the random numbers of the exact engine."""
        for source, rng in zip(self.batches, self.rngs, strict=True):
            with own_randomness(rng):
                source.peek()


@dataclass(kw_only=True)
class Simulation:
    """The settings that all runs have in common."""

    workers: int
    steps: int
    model: Callable[[], nn.Module]
    loss: Callable[[nn.Module, Any], Tensor]
    vectorize: bool | str
    device: torch.device | str | None
    progress: bool | None
    compile: bool | str | None
    cluster: Cluster | None

    def programs(
        self,
        plans: Mapping[int, dict[str, Any]],
        at_once: int | None,
        known: Iterable[tuple[list[int], str]] = (),
    ) -> Iterator[list[Program]]:
        """All runs, as programs that are in memory together. The next ones are made after them.
        Programs of earlier times come first, `known` by their runs and engines."""
        if at_once is not None:
            at_once = check_int("at_once", at_once, least=1)
        waiting = dict(plans)
        for numbers, engine in known:
            if not set(numbers) <= set(waiting):
                raise ValueError(
                    f"the checkpoints are of a simulation with run {max(numbers)}, and now there "
                    f"are {len(plans)} runs; give the same runs, or another checkpoint folder"
                )
            yield replace(self, vectorize=engine == Vectorized.name).made(
                {number: waiting.pop(number) for number in numbers}, len(numbers)
            )
        while waiting:
            together = self.made(waiting, at_once)
            for number in (number for program in together for number in program.runs):
                del waiting[number]
            yield together

    def made(self, plans: Mapping[int, dict[str, Any]], at_once: int | None) -> list[Program]:
        """The programs of the first runs, at most `at_once`; None: as many as fit into memory."""
        with torch.random.fork_rng():
            first, *others = plans.items()
            starts = [self.start(*first)]
            size = at_once or runs_that_fit(starts[0].model, self.workers)
            return self._programs(starts + [self.start(*each) for each in others[: size - 1]])

    def start(self, number: int, plan: dict[str, Any]) -> Start:
        seed = check_int("seed", plan["seed"])
        torch.manual_seed(seed)
        model = self.model() if self.device is None else self.model().to(self.device)
        check_copies(model)
        check_memory(model, self.workers)
        method, wall_clock = plan["method"], None
        if self.cluster is not None:
            wall_clock = WallClock(self.cluster, steps=self.steps, seed=seed)
            method = wall_clock.watching(method)
        return Start(
            number=number,
            model=model,
            batches=[Batches(plan["data"], k) for k in range(self.workers)],
            method=method,
            seed=seed,
            rngs=[seeded(seed + k, next(model.parameters()).device) for k in range(self.workers)],
            recorder=Recorder(
                plan["evaluate"],
                plan["evaluate_every"],
                steps=self.steps,
                progress=self.progress,
                wall_clock=wall_clock,
                pause_every=plan.get("pause_every"),
            ),
            warmup=plan.get("warmup"),
        )

    def _programs(self, starts: list[Start]) -> list[Program]:
        if not self.vectorize:
            return [self._exact(start) for start in starts]
        try:
            return self._vectorized(starts)
        except CannotVectorizeError as reason:
            if len(starts) == 1:
                return [self._instead(starts[0], reason)]
            log.warning("palsgd.simulate_many: one run after another, because %s", reason)
        # Out here the reason, and with it the stack that failed, is no longer in memory.
        return self._one_by_one(starts)

    def _one_by_one(self, starts: list[Start]) -> list[Program]:
        """A loop over the workers that is faster for one run is taken for the rest too: all have
        one model, and trying takes up to minutes."""
        found: list[Program] = []
        for number, start in enumerate(starts):
            try:
                found += self._vectorized([start])
            except LoopIsFasterError as reason:
                return found + [self._instead(each, reason) for each in starts[number:]]
            except CannotVectorizeError as reason:
                found.append(self._instead(start, reason))
        return found

    def _instead(self, start: Start, reason: CannotVectorizeError) -> Program:
        """The exact engine, for a run that cannot be stacked."""
        if self.vectorize is True:
            raise ValueError(
                f"this simulation cannot be vectorized: {reason}; use vectorize='auto'"
            ) from reason
        log.warning("palsgd.simulate: workers one after another, because %s", reason)
        return self._exact(start)

    def _vectorized(self, starts: list[Start]) -> list[Program]:
        if self.vectorize == "auto":
            check_worthwhile(starts[0].model)
        made: dict[Run, Start] = {}
        for start in starts:  # each with a copy of the model, which the exact engine may need
            model = copy.deepcopy(start.model)
            run = Run(model, self.loss, start.batches, start.method, start.recorder)
            made[run] = start
        engines = [
            Vectorized(
                group,
                steps=self.steps,
                seed=made[group[0]].seed,
                warmups=[made[run].warmup for run in group],
            )
            for group in alike(list(made))
        ]
        for start in starts:
            start.try_batches()
        # every engine is tried before the first one trains, as training uses up data
        for engine in engines:
            engine.try_gradient()
        for engine in engines:
            engine.choose_program(compile=self.compile, against_loop=self.vectorize == "auto")
        return [self._program([made[run] for run in engine.runs], engine) for engine in engines]

    def _exact(self, start: Start) -> Program:
        start.recorder.watch = Watch()  # a stack that failed has given its own to all its runs
        engine = Exact(
            model=start.model,
            steps=self.steps,
            loss=self.loss,
            batches=start.batches,
            method=start.method,
            rngs=start.rngs,
            recorder=start.recorder,
            graphs=bool(self.compile) and next(start.model.parameters()).is_cuda,
            warmup=start.warmup,
        )
        return self._program([start], engine)

    def _program(self, starts: list[Start], engine: Engine) -> Program:
        facts = {
            "version": VERSION,
            "engine": engine.name,
            "workers": self.workers,
            "steps": self.steps,
            "seeds": [start.seed for start in starts],
        }
        return Program([start.number for start in starts], engine, facts)


def check_copies(model: nn.Module) -> None:
    """Refuse a model with hooks, as every worker has a copy of the model and copies have no
    hooks."""
    if any(has_hooks(p) for p in model.parameters()):
        raise ValueError(
            "model() gives parameters with hooks, which the workers' copies would lack; register "
            "them in method(model), which is called for each worker"
        )


def check_worthwhile(model: nn.Module) -> None:
    """Refuse convolutions on a CPU. Stacked convolutions are grouped convolutions, which a CPU does
    not run faster than one after another."""
    convolutions = any(isinstance(m, nn.modules.conv._ConvNd) for m in model.modules())
    if convolutions and not next(model.parameters()).is_cuda:
        raise CannotVectorizeError("stacked convolutions are slower than a loop on a CPU")

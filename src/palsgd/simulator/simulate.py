"""Simulates K workers on one device by the rules of K real workers, and many such runs at once."""

import copy
import logging
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from palsgd.checks import check_choice, check_int
from palsgd.cluster import Cluster, WallClock
from palsgd.errors import NonFiniteError
from palsgd.optimizer import LocalOptimizer
from palsgd.simulator.batches import Batches, DryError
from palsgd.simulator.exact import Randomness, own_randomness, run_exact, seeded
from palsgd.simulator.history import Evaluate, Every, Recorder
from palsgd.simulator.result import Result
from palsgd.simulator.run import Run
from palsgd.simulator.stacking_checks import CannotVectorizeError, has_hooks
from palsgd.simulator.vectorized import Vectorized, alike, run_vectorized

log = logging.getLogger("palsgd")

Data = Callable[[int], Iterable[Any]]
OptimizerOf = Callable[[nn.Module], LocalOptimizer]


def simulate(
    *,
    workers: int,
    steps: int,
    model: Callable[[], nn.Module],
    loss: Callable[[nn.Module, Any], Tensor],
    data: Data,
    method: OptimizerOf,
    vectorize: bool | str = "auto",
    device: torch.device | str | None = None,
    seed: int = 0,
    evaluate: Evaluate | None = None,
    evaluate_every: Every = 1,
    progress: bool | None = None,
    compile: bool | str | None = None,
    cluster: Cluster | None = None,
) -> Result:
    """Train with `workers` simulated workers until the clock shows `steps`.

    Args:
        workers: how many there are.
        steps: the clock at which training ends, steps without data included.
        model: builds the network, once, after `torch.manual_seed(seed)`; all workers start from it.
        loss: `loss(model, batch)` is a scalar.
        data: `data(worker)` gives that worker's batches: an endless iterator, or a list or loader
            that can start over.
        method: `method(model)` gives a palsgd optimizer, for each worker.
        vectorize: True: all workers as one stacked program; False: one after another, the
            optimizers' own code; "auto": stacked where that is possible and pays.
        device: where the model is moved; None: where `model()` puts it.
        seed: of the model. In the exact engine worker k draws its random numbers (dropout) as a
            process would after `torch.manual_seed(seed + k)`; the vectorized one draws others of
            the same kind.
        evaluate: `evaluate(model)` is called with the global model, and at the end; what it returns
            goes into the history.
        evaluate_every: evaluate at every `evaluate_every`-th exchange, or at the clocks for which
            this function returns True.
        progress: show a bar; None: on a terminal.
        compile: compile the stacked program by torch.compile, which takes half a minute and then
            saves a tenth to a half of each step on a GPU. None compiles long runs on a GPU. A
            string is torch.compile's mode ("reduce-overhead" for CUDA graphs).
        cluster: a `palsgd.Cluster`; `time_s` in the history is then the wall-clock time at which
            each exchange would end on that cluster.

    Returns:
        A result with `model` (the global one), `history` (an entry per exchange), `ledger`.

    Raises:
        ValueError: an argument is out of its range, data ran dry, or `vectorize=True` and the
            model or the inner optimizer cannot be stacked; the message says why.
        NonFiniteError: a loss or a model is inf or nan.

    Example:
        >>> import torch, palsgd
        >>> result = palsgd.simulate(
        ...     workers=2, steps=20, model=lambda: torch.nn.Linear(1, 1),
        ...     loss=lambda model, batch: (model(batch) - 3).square().mean(),
        ...     data=lambda worker: [torch.full((1, 1), 1.0 + worker)],
        ...     method=lambda model: palsgd.LocalSGD(
        ...         model, torch.optim.SGD(model.parameters(), lr=0.1), sync_every=5
        ...     ),
        ... )
        >>> [entry["clock"] for entry in result.history]
        [5, 10, 15, 20]
    """
    (result,) = simulate_many(
        [{}],
        workers=workers,
        steps=steps,
        model=model,
        loss=loss,
        data=data,
        method=method,
        vectorize=vectorize,
        device=device,
        seed=seed,
        evaluate=evaluate,
        evaluate_every=evaluate_every,
        progress=progress,
        compile=compile,
        cluster=cluster,
    )
    if result.error is not None:
        raise result.error
    return result


def simulate_many(
    runs: Sequence[Mapping[str, Any]],
    *,
    workers: int,
    steps: int,
    model: Callable[[], nn.Module],
    loss: Callable[[nn.Module, Any], Tensor],
    data: Data | None = None,
    method: OptimizerOf | None = None,
    vectorize: bool | str = "auto",
    device: torch.device | str | None = None,
    seed: int = 0,
    evaluate: Evaluate | None = None,
    evaluate_every: Every = 1,
    progress: bool | None = None,
    compile: bool | str | None = None,
    cluster: Cluster | None = None,
    at_once: int | None = None,
) -> list[Result]:
    """Simulate several runs that differ in `method`, `seed` or `data`; one result for each.

    Runs with equal shapes (the same H, warm-up, fragments, delay and kind of inner optimizer;
    methods, learning rates, outer optimizers, codecs, seeds and data are free) share one stacked
    program. A run that ends early, by a loss that is not finite or data that runs dry, has the
    reason as `error` in its result; the others go on.

    Args:
        runs: for each run a mapping with `method`, `seed` or `data`; what it does not say is taken
            from the arguments of that name.
        at_once: runs that share a program at a time; None: as many as fit into memory.
        workers, steps, model, loss, data, method, vectorize, device, seed, evaluate,
            evaluate_every, progress, compile, cluster: as for `simulate`.

    Raises:
        ValueError: an argument is out of its range, or a run has an unknown key or lacks one.

    Example:
        >>> import torch, palsgd
        >>> def method(model):
        ...     inner = torch.optim.SGD(model.parameters(), lr=0.1)
        ...     return palsgd.DiLoCo(model, inner, sync_every=5)
        >>> results = palsgd.simulate_many(
        ...     [{"seed": 1}, {"seed": 2}], workers=2, steps=10, method=method,
        ...     model=lambda: torch.nn.Linear(1, 1),
        ...     loss=lambda model, batch: (model(batch) - 3).square().mean(),
        ...     data=lambda worker: [torch.full((1, 1), 1.0 + worker)],
        ... )
        >>> [result.history[-1]["clock"] for result in results]
        [10, 10]
    """
    if vectorize not in (True, False, "auto"):
        raise ValueError(f"vectorize={vectorize!r} is unknown; use True, False or 'auto'")
    if cluster is not None and cluster.workers != workers:
        raise ValueError(
            f"workers={workers}, but the cluster has workers={cluster.workers}; give both the same"
        )
    simulation = Simulation(
        workers=check_int("workers", workers, least=1),
        steps=check_int("steps", steps, least=1),
        model=model,
        loss=loss,
        vectorize=vectorize,
        device=device,
        evaluate=evaluate,
        evaluate_every=evaluate_every
        if callable(evaluate_every)
        else check_int("evaluate_every", evaluate_every, least=1),
        progress=progress,
        compile=compile,
        cluster=cluster,
    )
    common = {"method": method, "seed": seed, "data": data}
    waiting = [_complete(run, number, common) for number, run in enumerate(runs)]
    if at_once is not None:
        at_once = check_int("at_once", at_once, least=1)
    results: list[Result] = []
    with torch.random.fork_rng():
        while waiting:
            first = simulation.start(waiting[0])
            size = at_once or runs_that_fit(first.model, simulation.workers)
            starts = [first, *(simulation.start(plan) for plan in waiting[1:size])]
            results += simulation.run(starts)
            waiting = waiting[len(starts) :]
    return results


def _complete(run: Mapping[str, Any], number: int, common: dict[str, Any]) -> dict[str, Any]:
    for name in run:
        check_choice(f"a key of run {number}", name, tuple(common))
    plan = common | dict(run)
    for name in ("method", "data"):
        if plan[name] is None:
            raise ValueError(f"run {number} has no {name}; give it one, or pass {name}= for all")
    return plan


@dataclass
class Start:
    """A run that has not begun: its new model, its data and its recorder."""

    model: nn.Module
    batches: list[Batches]
    method: OptimizerOf
    seed: int
    rngs: list[Randomness]  # of the workers, for the exact engine
    recorder: Recorder

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
    evaluate: Evaluate | None
    evaluate_every: Every
    progress: bool | None
    compile: bool | str | None
    cluster: Cluster | None

    def start(self, plan: dict[str, Any]) -> Start:
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
            model=model,
            batches=[Batches(plan["data"], k) for k in range(self.workers)],
            method=method,
            seed=seed,
            rngs=[seeded(seed + k, next(model.parameters()).device) for k in range(self.workers)],
            recorder=Recorder(self.evaluate, self.evaluate_every, self.progress, wall_clock),
        )

    def run(self, starts: list[Start]) -> list[Result]:
        if not self.vectorize:
            return [self._exact(start) for start in starts]
        try:
            return self._vectorized(starts)
        except CannotVectorizeError as reason:
            if len(starts) > 1:
                log.warning("palsgd.simulate_many: one run after another, because %s", reason)
                return [result for start in starts for result in self.run([start])]
            if self.vectorize is True:
                raise ValueError(
                    f"this simulation cannot be vectorized: {reason}; use vectorize='auto'"
                ) from reason
            log.warning("palsgd.simulate: workers one after another, because %s", reason)
            return [self._exact(starts[0])]

    def _vectorized(self, starts: list[Start]) -> list[Result]:
        if self.vectorize == "auto":
            check_worthwhile(starts[0].model)
        runs = [  # a run has a copy of the model, as the exact engine may need the model itself
            Run(copy.deepcopy(start.model), self.loss, start.batches, start.method, start.recorder)
            for start in starts
        ]
        engines = [Vectorized(group, self._compiled(starts[0].model)) for group in alike(runs)]
        for start in starts:
            start.try_batches()
        # every engine is tried before the first one trains, as training uses up data
        for engine in engines:
            engine.try_gradient()
        found: dict[Run, Result] = {}
        for engine in engines:
            for run in engine.runs[1:]:  # the runs share a clock, so one bar is enough
                run.recorder.bar = False
            torch.manual_seed(starts[runs.index(engine.runs[0])].seed)
            found |= zip(engine.runs, run_vectorized(engine, self.steps), strict=True)
        return [found[run] for run in runs]

    def _compiled(self, model: nn.Module) -> bool | str:
        if self.compile is not None:
            return self.compile
        return next(model.parameters()).is_cuda and self.steps >= 2000

    def _exact(self, start: Start) -> Result:
        try:
            return run_exact(
                models=[start.model] + [copy.deepcopy(start.model) for _ in start.batches[1:]],
                steps=self.steps,
                loss=self.loss,
                batches=start.batches,
                method=start.method,
                rngs=start.rngs,
                recorder=start.recorder,
            )
        except (NonFiniteError, DryError) as error:
            history = start.recorder.history
            return Result(model=start.model, engine="exact", history=history, error=error)


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


def check_memory(model: nn.Module, workers: int) -> None:
    """Refuse a simulation that does not fit into memory."""
    need, free = memory(model, workers)
    if need > free:
        raise ValueError(
            f"{workers} workers need about {need / 2**30:.1f} GiB for weights, gradients and inner "
            f"state, activations not counted, and {free / 2**30:.1f} GiB are free on "
            f"{next(model.parameters()).device}; use at most {max(1, workers * free // need)} "
            "workers, or a smaller model"
        )


def runs_that_fit(model: nn.Module, workers: int) -> int:
    """The number of runs whose weights and state take a quarter of the memory. The rest is for
    activations."""
    need, free = memory(model, workers)
    return max(1, free // max(1, 4 * need))


def memory(model: nn.Module, workers: int) -> tuple[int, int]:
    """The bytes that a run needs for the weights, gradients and two tensors of inner state of each
    worker; and the bytes that are free."""
    device = next(model.parameters()).device
    need = workers * 4 * sum(p.nbytes for p in model.parameters() if p.requires_grad)
    if device.type == "cuda":
        return need, torch.cuda.mem_get_info(device)[0]
    return need, _free_memory()


def _free_memory() -> int:
    """The bytes that programs can allocate. On Linux they include the file cache."""
    info = Path("/proc/meminfo")
    lines = info.read_text().splitlines() if info.exists() else []
    available = [int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable")]
    if available:
        return available[0]
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")

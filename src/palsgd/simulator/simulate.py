"""Simulates K workers on one device by the rules of K real workers, and many such runs at once."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from palsgd.checks import (
    check_choice,
    check_flag,
    check_function,
    check_int,
    check_path,
    check_text,
    in_error,
)
from palsgd.cluster import Cluster
from palsgd.simulator.checkpoints import ProgramList
from palsgd.simulator.history import Evaluate, Every
from palsgd.simulator.program import OptimizerOf, Program, Simulation
from palsgd.simulator.result import Result

Data = Callable[[int], Iterable[Any]]


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
    checkpoint: str | Path | None = None,
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
            optimizers' own code; "auto": stacked where that is possible and, on a GPU, faster: both
            are tried on the first batches, once for runs that are alike.
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
            saves a tenth to a half of each step on a GPU. None compiles, on a GPU, where that saves
            more than it takes. A string is torch.compile's mode ("reduce-overhead" for CUDA
            graphs). Workers that are not stacked replay their gradients as CUDA graphs if it is
            true; the loss must then do the same work in every step.
        cluster: a `palsgd.Cluster`; `time_s` in the history is then the wall-clock time at which
            each exchange would end on that cluster.
        checkpoint: a folder into which the state is written after every evaluation (without
            `evaluate`: where it would be). The same call goes on from there, bit for bit, after its
            process has ended in any way; when training has ended, it returns the result at once.
            The state is in files of tensors and plain numbers. It has everything but what the
            functions given here keep to themselves: iterators whose order depends on random numbers
            drawn along the way need `state_dict` and `load_state_dict`.

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

        A simulation that ends halfway, here by an error, goes on where it was:

        >>> import tempfile
        >>> folder, seen = tempfile.mkdtemp(), []
        >>> def evaluate(model):
        ...     seen.append(float(model.weight))
        ...     if len(seen) == 3:
        ...         raise KeyboardInterrupt
        >>> def again():
        ...     return palsgd.simulate(
        ...         workers=2, steps=20, model=lambda: torch.nn.Linear(1, 1),
        ...         loss=lambda model, batch: (model(batch) - 3).square().mean(),
        ...         data=lambda worker: [torch.full((1, 1), 1.0 + worker)],
        ...         method=lambda model: palsgd.LocalSGD(
        ...             model, torch.optim.SGD(model.parameters(), lr=0.1), sync_every=5
        ...         ),
        ...         evaluate=evaluate, checkpoint=folder,
        ...     )
        >>> try:
        ...     again()
        ... except KeyboardInterrupt:
        ...     resumed = again()
        >>> len(seen), torch.equal(resumed.model.weight, result.model.weight)
        (5, True)
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
        checkpoint=checkpoint,
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
    checkpoint: str | Path | None = None,
) -> list[Result]:
    """Simulate several runs that differ in `method`, `seed` or `data`; one result for each.

    Runs with equal shapes (the same H, warm-up, fragments, delay and kind of inner optimizer;
    methods, learning rates, outer optimizers, codecs, seeds and data are free) share one stacked
    program. A run that ends early, by a loss that is not finite or data that runs dry, has the
    reason as `error` in its result; the others go on.

    Args:
        runs: for each run a mapping with `method`, `seed`, `data`, `evaluate` or
            `evaluate_every`; what it does not say is taken from the arguments of that name.
        at_once: runs that share a program at a time; None: as many as fit into memory.
        checkpoint: as for `simulate`. The folder also says which runs share a program, as rounding
            depends on it; they share it again when the simulation goes on.

    The other arguments are those of `simulate`: `workers`, `steps`, `model`, `loss`, `data`,
    `method`, `vectorize`, `device`, `seed`, `evaluate`, `evaluate_every`, `progress`, `compile` and
    `cluster`.

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
    simulation = _simulation(
        workers=workers,
        steps=steps,
        model=model,
        loss=loss,
        vectorize=vectorize,
        device=device,
        progress=progress,
        compile=compile,
        cluster=cluster,
    )
    common = {"method": method, "seed": seed, "data": data, "evaluate": evaluate}
    plans = _plans(runs, common | {"evaluate_every": evaluate_every})
    if checkpoint is not None:
        plans = {n: plan | {"pause_every": plan["evaluate_every"]} for n, plan in plans.items()}
    known = None if checkpoint is None else ProgramList(check_path("checkpoint", checkpoint))
    found: dict[int, Result] = {}
    for together in simulation.programs(plans, at_once, [] if known is None else known.read()):
        if known is not None:
            known.add((program.runs, program.engine) for program in together)
        while together:  # none of them is kept when it has ended
            found |= _trained(together.pop(0), known)
    return [found[number] for number in plans]


def programs(
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
    pause_every: Every | None = None,
    progress: bool | None = None,
    compile: bool | str | None = None,
    cluster: Cluster | None = None,
    at_once: int | None = None,
) -> Iterator[list[Program]]:
    """The programs that `simulate_many` would train, for callers that train them piece by piece: to
    show what there is so far, to keep states in a way of their own, to stop and to go on.

    Programs come in lists of those that are in memory together, and none has begun. A program says
    which runs it has and which engine. `advance()` trains it up to a pause, at which `histories`
    has the entries so far and `state()` gives everything that another process needs to go on.

    Args:
        pause_every: pause after every `pause_every`-th exchange, or at the clocks for which this
            function returns True; None: as `evaluate_every`. There is always a pause at the end. A
            run may have its own; a program pauses where one of its runs does.
        runs: as for `simulate_many`; a run may also have a `warmup`, one SharedWarmUp for all runs
            that compute the same until their warm-up ends. A stacked program whose runs find it
            computed starts after it.
        workers, steps, model, loss, data, method, vectorize, device, seed, evaluate,
            evaluate_every, progress, compile, cluster, at_once: as for `simulate_many`.

    Example:
        >>> import torch, palsgd
        >>> from palsgd.simulator import programs
        >>> def begun():
        ...     ((program,),) = programs(
        ...         [{}], workers=2, steps=20, model=lambda: torch.nn.Linear(1, 1),
        ...         loss=lambda model, batch: (model(batch) - 3).square().mean(),
        ...         data=lambda worker: [torch.full((1, 1), 1.0 + worker)],
        ...         method=lambda model: palsgd.LocalSGD(
        ...             model, torch.optim.SGD(model.parameters(), lr=0.1), sync_every=5
        ...         ),
        ...     )
        ...     return program
        >>> first = begun()
        >>> first.advance(), first.clock
        (True, 5)
        >>> second = begun()
        >>> second.load(dict(first.state()))
        >>> while second.advance():
        ...     pass
        >>> [entry["clock"] for entry in second.results()[0].history]
        [5, 10, 15, 20]
    """
    simulation = _simulation(
        workers=workers,
        steps=steps,
        model=model,
        loss=loss,
        vectorize=vectorize,
        device=device,
        progress=progress,
        compile=compile,
        cluster=cluster,
    )
    common = {"method": method, "seed": seed, "data": data, "evaluate": evaluate}
    pause = evaluate_every if pause_every is None else pause_every
    often = {"evaluate_every": evaluate_every, "pause_every": pause}
    plans = _plans(runs, common | often | {"warmup": None})
    return simulation.programs(plans, at_once)


def _trained(program: Program, known: ProgramList | None) -> dict[int, Result]:
    """The results of a program that goes on from its newest checkpoint, if there is one."""
    store = None if known is None else known.checkpoints(program.runs[0])
    state = None if store is None else store.newest()
    if state is not None:
        program.load(state)
    while program.advance():
        if store is not None:
            store.save(program.clock, program.state())
    return dict(zip(program.runs, program.results(), strict=True))


def _simulation(
    *, workers: int, steps: int, vectorize: bool | str, cluster: Cluster | None, **others: Any
) -> Simulation:
    if not isinstance(vectorize, bool) and vectorize != "auto":
        given = in_error(vectorize)
        raise ValueError(f"vectorize={given} is unknown; use True, False or 'auto'")
    check_function("model", others["model"], "lambda: torch.nn.Linear(2, 1)")
    check_function("loss", others["loss"], "lambda model, batch: model(batch).mean()")
    others["device"] = _device(others["device"])
    _check_program(others["compile"], others["progress"])
    if cluster is not None and not isinstance(cluster, Cluster):
        raise ValueError(f"cluster={in_error(cluster)} must be a palsgd.Cluster")
    if cluster is not None and cluster.workers != workers:
        raise ValueError(
            f"workers={workers}, but the cluster has workers={cluster.workers}; give both the same"
        )
    return Simulation(
        workers=check_int("workers", workers, least=1),
        steps=check_int("steps", steps, least=1),
        vectorize=vectorize,
        cluster=cluster,
        **others,
    )


def _device(device: Any) -> torch.device | None:
    if device is None or isinstance(device, torch.device):
        return device
    try:
        found = torch.device(check_text("device", device))
    except RuntimeError:
        given = in_error(device)
        raise ValueError(f"device={given} is unknown; use for instance 'cpu' or 'cuda:0'") from None
    if found.type == "cuda" and not torch.cuda.is_available():
        raise ValueError(f"device={device!r}, but no GPU is to be seen here; use 'cpu'")
    return found


def _check_program(compile: Any, progress: Any) -> None:
    if compile is not None and not isinstance(compile, bool | str):
        raise ValueError(f"compile={in_error(compile)} must be True, False, None or a mode's name")
    if isinstance(compile, str):
        try:
            torch.compile(lambda x: x, mode=compile)
        except RuntimeError as error:  # torch knows the names of its modes
            raise ValueError(f"compile={in_error(compile)} is refused by torch: {error}") from None
    if progress is not None:
        check_flag("progress", progress)


def _plans(runs: Sequence[Mapping[str, Any]], common: dict[str, Any]) -> dict[int, dict[str, Any]]:
    if not isinstance(runs, Sequence) or isinstance(runs, str | bytes):
        raise ValueError(f"runs={in_error(runs)} must be a list of mappings, one for each run")
    return {number: _complete(run, number, common) for number, run in enumerate(runs)}


def _complete(run: Mapping[str, Any], number: int, common: dict[str, Any]) -> dict[str, Any]:
    if not isinstance(run, Mapping):
        raise ValueError(f"run {number} is {in_error(run)}; give a mapping, such as {{'seed': 1}}")
    for name in run:
        check_choice(f"a key of run {number}", name, tuple(common))
    plan = common | dict(run)
    for name in ("method", "data"):
        if plan[name] is None:
            raise ValueError(f"run {number} has no {name}; give it one, or pass {name}= for all")
    check_function("method", plan["method"], "lambda model: palsgd.DiLoCo(model, inner)")
    check_function("data", plan["data"], "lambda worker: batches[worker]")
    if plan["evaluate"] is not None:
        check_function("evaluate", plan["evaluate"], "lambda model: {'loss': loss(model)}")
    for name in ("evaluate_every", "pause_every"):
        if name in plan and not callable(plan[name]):
            check_int(name, plan[name], least=1)
    return plan

"""K workers on one device, by the same rules as K real ones."""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from palsgd.draws import whole
from palsgd.optimizer import LocalOptimizer
from palsgd.simulator.exact import identical_models, run_exact
from palsgd.simulator.record import Evaluate, Recorder
from palsgd.simulator.result import Result


def simulate(
    *,
    workers: int,
    steps: int,
    model: Callable[[], nn.Module],
    loss: Callable[[nn.Module, Any], Tensor],
    data: Callable[[int], Iterable[Any]],
    method: Callable[[nn.Module], LocalOptimizer],
    vectorize: bool | str = "auto",
    device: torch.device | str | None = None,
    seed: int = 0,
    evaluate: Evaluate | None = None,
    evaluate_every: int = 1,
    progress: bool | None = None,
) -> Result:
    """Train with `workers` simulated workers until the clock shows `steps`.

    `model()` builds the network (once, after `torch.manual_seed(seed)`; all workers start from
    it), `loss(model, batch)` is a scalar, `data(worker)` that worker's batches, `method(model)`
    a palsgd optimizer. Worker k draws its random numbers (dropout) as a process would after
    `torch.manual_seed(seed + k)`. `evaluate(model)` is called with the global model at every
    `evaluate_every`-th exchange and at the end. A progress bar shows on a terminal.
    """
    workers, steps = whole("workers", workers, least=1), whole("steps", steps, least=1)
    seed = whole("seed", seed)
    whole("evaluate_every", evaluate_every, least=1)
    recorder = Recorder(evaluate, evaluate_every, progress)
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        models = identical_models(model, workers, device)
        return run_exact(
            models=models,
            steps=steps,
            loss=loss,
            data=data,
            method=method,
            seed=seed,
            recorder=recorder,
        )

"""K workers on one device, by the same rules as K real ones."""

import copy
import logging
import os
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from palsgd.draws import whole
from palsgd.optimizer import LocalOptimizer
from palsgd.simulator.batches import Batches
from palsgd.simulator.exact import run_exact
from palsgd.simulator.program import CannotVectorizeError
from palsgd.simulator.record import Evaluate, Recorder
from palsgd.simulator.result import Result
from palsgd.simulator.vectorized import Vectorized, run_vectorized

log = logging.getLogger("palsgd")


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
    compile: bool | None = None,
) -> Result:
    """Train with `workers` simulated workers until the clock shows `steps`.

    `model()` builds the network (once, after `torch.manual_seed(seed)`; all workers start from
    it), `loss(model, batch)` is a scalar, `data(worker)` that worker's batches, `method(model)`
    a palsgd optimizer. Worker k draws its random numbers (dropout) as a process would after
    `torch.manual_seed(seed + k)`. `evaluate(model)` is called with the global model at every
    `evaluate_every`-th exchange and at the end. A progress bar shows on a terminal. With
    `compile` the stacked program goes through torch.compile, which takes half a minute and then
    saves a tenth to a half of each step on a GPU; None does so for long runs on one.
    """
    workers, steps = whole("workers", workers, least=1), whole("steps", steps, least=1)
    seed = whole("seed", seed)
    whole("evaluate_every", evaluate_every, least=1)
    recorder = Recorder(evaluate, evaluate_every, progress)
    if vectorize not in (True, False, "auto"):
        raise ValueError(f"vectorize={vectorize!r} is unknown; use True, False or 'auto'")
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        first = model() if device is None else model().to(device)
        check_memory(first, workers)
        batches = [Batches(data, k) for k in range(workers)]
        if vectorize:
            try:
                on_gpu = next(first.parameters()).is_cuda
                compiled = on_gpu and steps >= 2000 if compile is None else compile
                if vectorize == "auto":
                    check_worthwhile(first)
                engine = Vectorized(copy.deepcopy(first), workers, loss, batches, method, compiled)
                engine.try_gradient()
                torch.manual_seed(seed)
                return run_vectorized(engine, steps, recorder)
            except CannotVectorizeError as reason:
                if vectorize is True:
                    raise ValueError(
                        f"this simulation cannot be vectorized: {reason}; use vectorize='auto'"
                    ) from reason
                log.warning("palsgd.simulate: workers one after another, because %s", reason)
        return run_exact(
            models=[first] + [copy.deepcopy(first) for _ in range(workers - 1)],
            steps=steps,
            loss=loss,
            batches=batches,
            method=method,
            seed=seed,
            recorder=recorder,
        )


def check_worthwhile(model: nn.Module) -> None:
    """Stacked convolutions are grouped ones, which CPUs run no faster than one after another."""
    convolutions = any(isinstance(m, nn.modules.conv._ConvNd) for m in model.modules())
    if convolutions and not next(model.parameters()).is_cuda:
        raise CannotVectorizeError("stacked convolutions are slower than a loop on a CPU")


def check_memory(model: nn.Module, workers: int) -> None:
    """Refuse what cannot fit: per worker the weights, gradients and two tensors of inner state."""
    device = next(model.parameters()).device
    need = workers * 4 * sum(p.nbytes for p in model.parameters() if p.requires_grad)
    if device.type == "cuda":
        free = torch.cuda.mem_get_info(device)[0]
    else:
        free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    if need > free:
        raise ValueError(
            f"{workers} workers need about {need / 2**30:.1f} GiB for weights, gradients and inner "
            f"state, activations not counted, and {free / 2**30:.1f} GiB are free on {device}; use "
            f"at most {max(1, workers * free // need)} workers, or a smaller model"
        )

"""One training in palsgd's simulator: the loss of the global model over its steps."""

import warnings
from functools import partial
from itertools import count
from typing import Any

import torch
from contenders import TRAININGS, settings_of
from ours import optimizer
from task import SIZES, Task

import palsgd

Job = dict[str, Any]


def train(job: Job) -> Job:
    """`job` has training, chosen (settings of its grid), seed, split, steps, size, workers and
    device; what is found is added to it."""
    torch.set_num_threads(1)
    size, training, steps = SIZES[job["size"]], TRAININGS[job["training"]], job["steps"]
    task = Task(size, steps, seed=job["seed"], split=job["split"], device=job["device"])
    settings = settings_of(training, job["chosen"], size.sync_every)

    def method(model: torch.nn.Module) -> Any:
        inner = torch.optim.AdamW(model.parameters(), lr=job["chosen"]["lr"], fused=True)
        return optimizer(model, inner, task, method=training.method, seed=job["seed"], **settings)

    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*pull")  # one that is 0 is meant
        result = palsgd.simulate(
            workers=job["workers"], steps=steps, model=task.model, method=method, progress=False,
            loss=lambda model, batch: model(*batch), device=job["device"], seed=job["seed"],
            data=lambda worker: (task.next_batch(worker, index) for index in count()),
            vectorize=False, evaluate=lambda model: task.score(task.totals(model))[0],
            evaluate_every=partial(evaluated, size.evaluations, steps, training.local),
        )  # fmt: skip
    curve = [(line["clock"], line["metric"]) for line in result.history if "metric" in line]
    gradients = result.ledger.gradient_steps
    parameters = sum(p.numel() for p in result.model.parameters())
    return job | {"curve": curve, "gradient_steps": gradients, "parameters": parameters}


def evaluated(evaluations: int, steps: int, local: bool, clock: int) -> bool:
    """In the second half, where a run's loss is about to be reached, and at the end."""
    if 2 * clock < steps:
        return False
    return local or clock == steps or clock % max(1, steps // (2 * evaluations)) == 0

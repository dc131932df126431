"""EXO Gym's DiLoCo on the same task: python exogym_diloco.py '{"source": ..., ...}'.

It starts its own processes, on loopback, so there is no row for it on other links. The changes it
needs are those of bench/exogym.py, in a temporary copy. Its learning-rate schedule takes any
scheduler class, so it gets the one the others have; its model is evaluated at the end only.
"""

import importlib.util
import json
import sys
import tempfile
import time
from functools import partial
from itertools import pairwise
from pathlib import Path

import torch
from task import MAX_NORM, SIZES, Task
from torch import nn
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import Dataset


class Batches(Dataset):
    """Item i of worker k is that worker's i-th batch, whatever index the sampler asks for."""

    def __init__(self, task: Task, worker: int, steps: int):
        self.task, self.worker, self.steps, self.given = task, worker, steps, 0

    def __len__(self) -> int:
        return self.steps

    def __getitem__(self, index: int):
        self.given += 1
        return self.task.next_batch(self.worker, self.given - 1)


class Stamped(nn.Module):
    """EXO Gym's kind of model, batch in and loss out; rank 0 notes when each round begins."""

    def __init__(self, net: nn.Module, stamps: Path, sync_every: int):
        super().__init__()
        self.net, self.stamps, self.sync_every, self.calls = net, stamps, sync_every, 0

    def forward(self, batch):
        if self.calls % self.sync_every == 0 and torch.distributed.get_rank() == 0:
            with open(self.stamps, "a") as file:
                print(time.perf_counter(), file=file)
        self.calls += 1
        return self.net(*batch)


def first(batch: list):
    return batch[0]


def data_of(task: Task, steps: int, rank: int, nodes: int, train_dataset: bool) -> Batches:
    torch.set_num_threads(1)
    return Batches(task, rank, steps)


def neighbour():
    """bench/exogym.py, under another name than the peer's package."""
    bench = Path(__file__).parent.parent
    sys.path.append(str(bench))
    spec = importlib.util.spec_from_file_location("beside_exogym", bench / "exogym.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    sys.path.remove(str(bench))
    return module


def main() -> None:
    order, beside = json.loads(sys.argv[1]), neighbour()
    steps, every, (outer_lr, momentum) = order["steps"], order["sync_every"], order["outer"]
    task = Task(SIZES[order["size"]], steps)
    with tempfile.TemporaryDirectory() as folder:
        beside.patched_copy(Path(order["source"]), Path(folder, "exogym"))
        sys.path[:0] = [folder]
        sys.path.append(order["peers"])
        from exogym import Trainer
        from exogym.strategy import DiLoCoStrategy, OptimSpec

        stamps = Path(folder, "stamps")
        strategy = DiLoCoStrategy(
            OptimSpec(torch.optim.AdamW, lr=task.size.lr, fused=True),
            OptimSpec(torch.optim.SGD, lr=outer_lr, nesterov=True, momentum=momentum),
            H=every,
            max_norm=MAX_NORM,
            lr_scheduler=LambdaLR,
            lr_scheduler_kwargs={"lr_lambda": task.lr_factor},
        )
        data = partial(data_of, task, steps)
        trainer = Trainer(
            Stamped(task.model(), stamps, every), data, data, start_port=beside.free_port() - 199,
            device="cpu",
        )  # fmt: skip
        trained = trainer.fit(
            num_epochs=1, max_steps=steps, num_nodes=order["workers"], strategy=strategy,
            batch_size=1, minibatch_size=1, val_size=0, disable_logging=True,
            dataloader_kwargs={"collate_fn": first},
        )  # fmt: skip
        began = [float(line) for line in stamps.read_text().split()]
    loss = task.score(task.totals(trained.net))[0]
    rounds = [late - early for early, late in pairwise(began[1:])]
    print(json.dumps({"steps": steps, "final_loss": loss, "round_s": rounds}))


if __name__ == "__main__":
    main()

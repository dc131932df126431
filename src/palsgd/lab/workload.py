"""What a workload is: a model, batches, a loss and a metric."""

from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from palsgd.lab.data.download import Progress


class Workload(ABC):
    """One learning problem, its data loaded and ready on `device`.

    Batches are a pure function of worker, index and seed, so a resumed run, a simulated one and
    one in real processes see the same data, and no loader state is ever saved.
    """

    name: ClassVar[str]
    metric: ClassVar[str] = "accuracy"
    higher_is_better: ClassVar[bool] = True
    labelled: ClassVar[bool] = False  # have examples classes, by which they can be dealt out?
    judged_on: ClassVar[str] = "loss"  # or "metric": by which a comparison says who is better
    # Training examples in an epoch. A class says how many the published data have, `load` how many
    # it found.
    examples: int
    context: int | None = None  # tokens of a row; of a class: the most, None where nothing is cut
    held_out: ClassVar[float] = 0.1  # share of the training data that split=choose evaluates on
    floor: float | None = None  # the lowest expected loss any model can reach, where known

    def __init__(
        self,
        *,
        data: Path | str | None = None,
        device: torch.device | str = "cpu",
        seed: int = 2023,
        sharding: str = "reshuffled",
        split: str = "test",
        context: int | None = None,
        download: bool = False,
        progress: Progress | None = None,
    ):
        """`data` is a folder, for workloads that need files; `download` fetches missing ones.
        `sharding`, `split` and `context` are as in the settings of a run."""
        self.data, self.device, self.seed = data, torch.device(device), seed
        if sharding.startswith("dirichlet") and not self.labelled:
            raise ValueError(
                f"sharding={sharding} deals out examples by their labels, and those of {self.name} "
                "have none; use fixed or reshuffled"
            )
        if context is not None:
            self._check_context(context)
            self.context = context
        self.sharding, self.split = sharding, split
        self.download, self.progress = download, progress
        self.load()

    def _check_context(self, context: int) -> None:
        if self.context is None:
            raise ValueError(
                f"context={context} is for texts that are cut, and {self.name} has none; leave it "
                "out"
            )
        if context > self.context:
            raise ValueError(
                f"context={context} is more than the {self.context} positions of the model of "
                f"{self.name}; use context <= {self.context}"
            )

    @abstractmethod
    def load(self) -> None:
        """Read the data onto the device."""

    @abstractmethod
    def model(self) -> nn.Module:
        """A new model on the CPU, drawn from torch's global generator."""

    @abstractmethod
    def batch(self, *, worker: int, workers: int, size: int, index: int) -> Any:
        """The `index`-th batch of a worker, of the examples that `sharding` gives to it."""

    @abstractmethod
    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        """The mean loss over the batch. Calls `model(...)` once, so that DDP sees it."""

    @abstractmethod
    def totals(self, model: nn.Module, *, part: int = 0, parts: int = 1) -> Tensor:
        """Over one of `parts` equal parts of the validation set: summed loss, summed metric and
        count, in float64. Parts add up, so ranks can share an evaluation."""

    def score(self, totals: Tensor) -> tuple[float, float]:
        """Loss and metric from totals that were added up."""
        loss, metric, count = totals.tolist()
        return loss / count, metric / count


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """No dropout, no gradients; the model is put back as it was."""
    was = model.training
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        model.train(was)


def parts_of(count: int, part: int, parts: int, size: int) -> Iterator[slice]:
    """One of `parts` equal parts of `count` examples, in slices of at most `size`."""
    end = count * (part + 1) // parts
    for start in range(count * part // parts, end, size):
        yield slice(start, min(start + size, end))

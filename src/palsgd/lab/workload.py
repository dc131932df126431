"""What a workload is: a model, batches, a loss and a metric."""

from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from palsgd.lab.data.download import Data, Progress
from palsgd.lab.data.sharding import Changes, Shards
from palsgd.lab.data.splits import held_out

if TYPE_CHECKING:
    from palsgd.lab.data.sources import Source


class Workload(ABC):
    """One learning problem, its data loaded and ready on `device`.

    A workload writes `load`, `model` and `loss`. `load` sets `train` and `valid`, tuples of tensors
    with a row for each example; a workload whose data are no such tensors writes `batch` and
    `validation` instead.

    Batches are a pure function of worker, index, seed and changes of the number of workers, so a
    resumed run, a simulated one and one in real processes see the same data, and no loader state is
    ever saved.
    """

    name: ClassVar[str]
    metric: ClassVar[str] = "loss"
    higher_is_better: ClassVar[bool] = False
    labelled: ClassVar[bool] = False  # have examples classes, by which they can be dealt out?
    judged_on: ClassVar[str] = "loss"  # or "metric": by which a comparison says who is better
    # Does a forward pass do the same work every time, in many small kernels? A simulation on a GPU
    # then trains workers one after another, whose gradients it replays as CUDA graphs.
    graphs: ClassVar[bool] = False
    # Training examples in an epoch. A class says how many the published data have, `load` how many
    # it found. 0: not known, so that the length of a run must be given in steps.
    examples: int = 0
    source: ClassVar["Source | None"] = None  # the files it needs, where it needs some
    context: int | None = None  # tokens of a row; of a class: the most, None where nothing is cut
    held_out: ClassVar[float] = 0.1  # share of the training data that split=choose evaluates on
    floor: float | None = None  # the loss of the truth itself on `valid`, where known
    train: tuple[Tensor, ...] = ()
    valid: tuple[Tensor, ...] = ()

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if not hasattr(cls, "name"):
            cls.name = cls.__name__

    def __init__(
        self,
        *,
        data: Data = None,
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
        self.check(sharding=sharding, context=context)
        if context is not None:
            self.context = context
        self.sharding, self.split = sharding, split
        self.download, self.progress = download, progress
        self.require(data, download=download, progress=progress)
        self.load()
        self._check_data()
        if self.train:
            self._deal()

    @classmethod
    def require(
        cls, data: Data, *, download: bool = False, progress: Progress | None = None
    ) -> None:
        """Raise a ValueError unless the files are there; with `download`, fetch those that are
        not."""
        if cls.source is None:
            return
        try:
            cls.source.require(data)
        except ValueError:
            if not download:
                raise
            cls.source.download(data, progress)

    @classmethod
    def check(
        cls, *, sharding: str = "reshuffled", context: int | None = None, target_on: str = "loss"
    ) -> None:
        """Refuse settings that this workload cannot follow. Nothing is loaded for it."""
        if sharding.startswith("dirichlet") and not cls.labelled:
            raise ValueError(
                f"sharding={sharding} deals out examples by their labels, and those of {cls.name} "
                "have none; use fixed or reshuffled"
            )
        if context is not None and cls.context is None:
            raise ValueError(
                f"context={context} is for texts that are cut, and {cls.name} has none; leave it "
                "out"
            )
        if context is not None and cls.context is not None and context > cls.context:
            raise ValueError(
                f"context={context} is more than the {cls.context} positions of the model of "
                f"{cls.name}; use context <= {cls.context}"
            )
        if target_on == "train_metric" and cls.training_totals is Workload.training_totals:
            raise ValueError(
                f"target_on=train_metric: {cls.name} has no metric on training examples; use "
                "train_loss"
            )

    @abstractmethod
    def load(self) -> None:
        """Read the data."""

    @abstractmethod
    def model(self) -> nn.Module:
        """A new model on the CPU, drawn from torch's global generator."""

    @abstractmethod
    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        """The mean loss over the batch. Calls `model(...)` once, so that DDP sees it."""

    def measure(self, model: nn.Module, batch: Any) -> Tensor | None:
        """The mean metric over a batch of the validation set; None: the loss is the metric. A
        workload that writes this says `metric` and `higher_is_better` too."""
        return None

    def batch(
        self, *, worker: int, workers: int, size: int, index: int, changes: Changes = ()
    ) -> Any:
        """The `index`-th batch of a worker, of the examples that `sharding` gives to it. `changes`
        is given where the number of workers has changed in the run."""
        which = self._shards.batch(
            worker=worker, workers=workers, size=size, index=index, changes=changes
        )
        return tuple(column[which] for column in self.train)

    def joint_batch(self, *, workers: int, size: int, index: int) -> Any:
        """The `index`-th batches of all workers, with the workers as a first axis of each tensor;
        None: they are asked for one by one. A workload that writes this says the same as
        `batch`."""
        return None

    def validation(self, part: int, parts: int) -> Iterator[Any]:
        """One of `parts` equal parts of the validation set, in batches."""
        for own in parts_of(len(self.valid[0]), part, parts, size=1000):
            yield tuple(column[own] for column in self.valid)

    def totals(self, model: nn.Module, *, part: int = 0, parts: int = 1) -> Tensor:
        """Over one of `parts` equal parts of the validation set: summed loss, summed metric and
        count, in float64. Parts add up, so ranks can share an evaluation."""
        sums = torch.zeros(3, dtype=torch.float64, device=self.device)
        with evaluating(model):
            for batch in self.validation(part, parts):
                loss, metric = self.loss(model, batch), self.measure(model, batch)
                self._check_loss(loss)
                means = torch.stack([loss.double(), (loss if metric is None else metric).double()])
                count = len(pytree.tree_leaves(batch)[0])
                sums += torch.cat([means * count, sums.new_tensor([count])])
        return sums

    def training_totals(self, model: nn.Module, *, part: int = 0, parts: int = 1) -> Tensor | None:
        """The same over a sample of the training examples, for `train_metric`; None where a
        workload has none."""
        return None

    def score(self, totals: Tensor) -> tuple[float, float]:
        """Loss and metric from totals that were added up."""
        loss, metric, count = totals.tolist()
        return loss / count, metric / count

    def _deal(self) -> None:
        """Put the rows that `load` has set onto the device. With split=choose, those that are
        evaluated are held out of the training data, and `valid` is not used."""
        if self.split == "choose":
            parts = held_out(len(self.train[0]), self.held_out)
            self.train, self.valid = (_rows(self.train, torch.from_numpy(part)) for part in parts)
        self.train = tuple(column.to(self.device) for column in self.train)
        self.valid = tuple(column.to(self.device) for column in self.valid)
        self.examples = len(self.train[0])
        self._shards = Shards(
            self.sharding, self.examples, seed=self.seed, device=self.device,
            labels=self.train[-1] if self.labelled else None,
        )  # fmt: skip

    def new_model(self) -> nn.Module:
        """What `model` returns, which must be one."""
        found = self.model()
        if not isinstance(found, nn.Module):
            kind = type(self).__name__
            raise ValueError(f"{kind}.model returned {found!r:.60}; return a torch.nn.Module")
        return found

    def _check_loss(self, loss: Any) -> None:
        if isinstance(loss, Tensor) and loss.numel() == 1:
            return
        found = f"shape {list(loss.shape)}" if isinstance(loss, Tensor) else f"{loss!r:.60}"
        raise ValueError(
            f"{type(self).__name__}.loss returned {found}; return the mean over the batch, a "
            "tensor with one number"
        )

    def _check_data(self) -> None:
        """Raise if `load` has not set what the methods that are not overridden read."""
        kind = type(self)
        for name, readers in {"train": ["batch"], "valid": ["validation", "totals"]}.items():
            inherited = all(getattr(kind, each) is getattr(Workload, each) for each in readers)
            if inherited and not getattr(self, name):
                raise ValueError(
                    f"{kind.__name__}.load has set no self.{name}; set a tuple of tensors with a "
                    f"row for each example, or write {kind.__name__}.{readers[0]}"
                )
            if inherited and not len(getattr(self, name)[0]):
                raise ValueError(
                    f"{kind.__name__}.load has set self.{name} with 0 rows; give it at least one"
                )


def _rows(columns: tuple[Tensor, ...], which: Tensor) -> tuple[Tensor, ...]:
    return tuple(column[which.to(column.device)] for column in columns)


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

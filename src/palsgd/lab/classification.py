"""What the image workloads share: cross-entropy, accuracy, and data kept on the device."""

from abc import abstractmethod
from collections.abc import Iterator
from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from palsgd.lab.data.sharding import Changes, Shards
from palsgd.lab.data.splits import held_out
from palsgd.lab.workload import Workload, evaluating, parts_of

Batch = tuple[Tensor, Tensor]  # images, labels
SAMPLE = 10_000  # training examples, at most, on which a model is evaluated beside the others


class Classification(Workload):
    metric = "accuracy"
    higher_is_better = True
    labelled = True
    # Should the channels of pictures be last in memory, on a GPU? The convolutions of large models
    # are faster then, in bf16 by far (bench/pictures.py).
    channels_last: ClassVar[bool] = False

    def arranged(self, images: Tensor) -> Tensor:
        """The same images, in the order in memory that the model computes fastest."""
        if self.channels_last and _has_fast_kernels(self.device):
            return images.contiguous(memory_format=torch.channels_last)
        return images

    def inputs(self, images: Tensor) -> Tensor:
        """The model's inputs from the images of a batch. The loss calls this, not `batch`, so that
        a stacked program computes it once for all workers."""
        return images

    @abstractmethod
    def validation(self, part: int, parts: int) -> Iterator[Batch]:
        """One of `parts` equal parts of the validation set, in batches."""

    @abstractmethod
    def training_sample(self, part: int, parts: int) -> Iterator[Batch]:
        """One of `parts` equal parts of a sample of the training examples, without augmentation."""

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        return cross_entropy(model(self.inputs(batch[0])), batch[1])

    def totals(self, model: nn.Module, *, part: int = 0, parts: int = 1) -> Tensor:
        return self._totals(model, self.validation(part, parts))

    def training_totals(self, model: nn.Module, *, part: int = 0, parts: int = 1) -> Tensor:
        return self._totals(model, self.training_sample(part, parts))

    def _totals(self, model: nn.Module, batches: Iterator[Batch]) -> Tensor:
        sums = torch.zeros(3, dtype=torch.float64, device=self.device)
        with evaluating(model):
            for images, labels in batches:
                logits = model(self.inputs(self.arranged(images))).float()
                loss = cross_entropy(logits, labels, reduction="sum")
                right = (logits.argmax(1) == labels).sum()
                sums += torch.stack([loss.double(), right.double(), sums.new_tensor(len(labels))])
        return sums


class InMemory(Classification):
    """What is trained on and what is evaluated, as tensors on the device, set by `load` through
    `keep`."""

    train_images: Tensor
    train_labels: Tensor
    test_images: Tensor  # with split=choose, of the held out part
    test_labels: Tensor

    def keep(self, train: Batch, test: Batch | None) -> None:
        """The test set is not kept with split=choose, so `load` need not read it there."""
        if self.split == "choose":
            parts = held_out(len(train[1]), self.held_out)
            train, test = (_rows(train, torch.from_numpy(part)) for part in parts)
        assert test is not None, "a run with split=test needs the test set"
        self.train_images, self.train_labels = train
        self.test_images, self.test_labels = test
        self.examples = len(self.train_labels)
        self._shards = Shards(
            self.sharding, self.examples, seed=self.seed, device=self.device,
            labels=self.train_labels,
        )  # fmt: skip

    def batch(
        self, *, worker: int, workers: int, size: int, index: int, changes: Changes = ()
    ) -> Batch:
        which = self._shards.batch(
            worker=worker, workers=workers, size=size, index=index, changes=changes
        )
        images = self.arranged(self.training_images(which, worker, index))
        return images, self.train_labels[which]

    def joint_batch(self, *, workers: int, size: int, index: int) -> Batch | None:
        if type(self).training_images is not InMemory.training_images:
            return None  # each worker has random numbers of its own
        which = self._shards.joint(workers=workers, size=size, index=index)
        return self.train_images[which], self.train_labels[which]

    def training_images(self, which: Tensor, worker: int, index: int) -> Tensor:
        return self.train_images[which]

    def plain_images(self, which: slice) -> Tensor:
        """Training images without augmentation."""
        return self.train_images[which]

    def training_sample(self, part: int, parts: int) -> Iterator[Batch]:
        for own in sample_slices(self.examples, part, parts, size=1000):
            yield self.plain_images(own), self.train_labels[own]

    def validation(self, part: int, parts: int) -> Iterator[Batch]:
        for own in parts_of(len(self.test_labels), part, parts, size=1000):
            yield self.test_images[own], self.test_labels[own]


def sample_slices(examples: int, part: int, parts: int, size: int) -> Iterator[slice]:
    """One of `parts` equal parts of every n-th example, in slices of at most `size`."""
    every = -(-examples // SAMPLE)
    for own in parts_of(-(-examples // every), part, parts, size):
        yield slice(own.start * every, own.stop * every, every)


def _has_fast_kernels(device: torch.device | str) -> bool:
    """For channels that are last in memory: cuDNN has."""
    return torch.device(device).type == "cuda"


def _rows(batch: Batch, which: Tensor) -> Batch:
    images, labels = batch
    which = which.to(labels.device)
    return images[which], labels[which]

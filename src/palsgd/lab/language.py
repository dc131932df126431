"""What the language workloads share: rows of one story, and perplexity."""

from abc import abstractmethod
from collections.abc import Iterator

import torch
from torch import Tensor, nn

from palsgd.lab.data import sources, tokens
from palsgd.lab.data.sharding import Changes, Shards
from palsgd.lab.data.splits import held_out_count
from palsgd.lab.workload import Workload, evaluating, parts_of

Batch = tuple[Tensor, Tensor]  # inputs, targets: a story per row, -100 where there is none


class Language(Workload):
    metric = "perplexity"
    higher_is_better = False

    @abstractmethod
    def validation(self, part: int, parts: int) -> Iterator[Batch]:
        """One of `parts` equal parts of the validation set, in batches."""

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        return model(*batch)

    def totals(self, model: nn.Module, *, part: int = 0, parts: int = 1) -> Tensor:
        sums = torch.zeros(3, dtype=torch.float64, device=self.device)
        with evaluating(model):
            for inputs, targets in self.validation(part, parts):
                count = (targets != tokens.NOT_A_TARGET).sum().double()
                nats = model(inputs, targets).double() * count
                sums += torch.stack([nats, nats, count])
        return sums

    def score(self, totals: Tensor) -> tuple[float, float]:
        """Loss and perplexity. Perplexities cannot be added, so it is computed from the summed
        loss."""
        loss = totals[0] / totals[2]
        return loss.item(), loss.exp().item()


class TinyStories(Language):
    """TinyStories as a workload's data, which is encoded at first use and kept beside the text."""

    source = sources.TinyStories()
    examples = 2_119_719
    context: int  # positions of the model; of a longer story the beginning is read
    held_out = 0.01  # the last stories of the training data

    def load(self) -> None:
        folder = self.source.place(self.data)
        if not tokens.is_prepared(folder):
            tokenizer = self.source.tokenizer(self.data)
            tokens.prepare(folder, folder, tokenizer, self.progress)
        self._train = tokens.Stories(folder, "train", self.device)
        self.examples = len(self._train)
        if self.split == "choose":
            self.examples -= held_out_count(self.examples, self.held_out)
            self._valid, self._first_valid = self._train, self.examples
        else:
            self._valid, self._first_valid = tokens.Stories(folder, "valid", self.device), 0
        self._shards = Shards(self.sharding, self.examples, seed=self.seed, device=self.device)

    def batch(
        self, *, worker: int, workers: int, size: int, index: int, changes: Changes = ()
    ) -> Batch:
        which = self._shards.batch(
            worker=worker, workers=workers, size=size, index=index, changes=changes
        )
        return self._train.rows(which, self.context)

    def joint_batch(self, *, workers: int, size: int, index: int) -> Batch:
        which = self._shards.joint(workers=workers, size=size, index=index)
        inputs, targets = self._train.rows(which.flatten(), self.context)
        return inputs.unflatten(0, (workers, size)), targets.unflatten(0, (workers, size))

    def validation(self, part: int, parts: int) -> Iterator[Batch]:
        every = torch.arange(self._first_valid, len(self._valid), device=self.device)
        for own in parts_of(len(every), part, parts, size=64):
            yield self._valid.rows(every[own], self.context)

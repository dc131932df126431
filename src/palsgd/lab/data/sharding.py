"""Which examples are in which batch: a pure function of seed, worker, workers and index."""

from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

from palsgd.lab.settings import check_sharding


class Shards:
    """The training examples, dealt out to workers.

    `reshuffled`: an epoch is one permutation for all workers, dealt out in batches: worker 0 takes
    the first, worker 1 the second, and so on in turn. In time every worker sees every example.

    `fixed`: all examples are dealt out once, in parts that are equal up to one example. A worker
    sees its own part alone, in another order in each epoch.

    `dirichlet:A`: fixed parts in which each worker has classes in shares of its own, drawn from a
    Dirichlet distribution with all parameters A: the smaller A, the fewer classes a worker has.

    Fixed parts depend on the seed and on the number of workers. Examples that do not fill a batch
    for every worker are left out of an epoch; the next one leaves out others.
    """

    def __init__(
        self,
        sharding: str,
        examples: int,
        *,
        seed: int,
        device: torch.device | str = "cpu",
        labels: Tensor | None = None,
    ):
        self._concentration = check_sharding(sharding)
        if self._concentration is not None and labels is None:
            raise ValueError(
                f"sharding={sharding} deals out examples by their labels, and these have none; use "
                "fixed or reshuffled"
            )
        self._sharding, self._examples, self._seed = sharding, examples, seed
        self._device, self._labels = device, labels
        # Simulated workers are at most one epoch apart, and take their batches in order.
        self._epoch = lru_cache(maxsize=2)(self._new_epoch)
        self._parts = lru_cache(maxsize=1)(self._new_parts)
        self._orders: dict[tuple[int, int], tuple[int, Tensor]] = {}

    def batch(self, *, worker: int, workers: int, size: int, index: int) -> Tensor:
        """The examples in the `index`-th batch of a worker."""
        epoch, place = self._place(workers, size, index)
        if self._sharding == "reshuffled":
            order, place = self._epoch(epoch), place * workers + worker
        else:
            order = self._own_order(worker, workers, epoch)
        return order[place * size : (place + 1) * size]

    def joint(self, *, workers: int, size: int, index: int) -> Tensor:
        """The same of all workers, a row for each."""
        if self._sharding != "reshuffled":
            own = (
                self.batch(worker=worker, workers=workers, size=size, index=index)
                for worker in range(workers)
            )
            return torch.stack(list(own))
        epoch, place = self._place(workers, size, index)
        all_of_them = workers * size
        order = self._epoch(epoch)[place * all_of_them : (place + 1) * all_of_them]
        return order.view(workers, size)

    def _place(self, workers: int, size: int, index: int) -> tuple[int, int]:
        """The epoch of a batch, and its place in the epoch."""
        batches = self._examples // workers // size  # of each worker in an epoch
        if batches == 0:
            raise ValueError(
                f"{self._examples} examples give each of {workers} workers "
                f"{self._examples // workers}, fewer than a batch of {size}; use a smaller batch, "
                "fewer workers or more data"
            )
        return divmod(index, batches)

    def part(self, worker: int, workers: int) -> np.ndarray:
        """The examples that are a worker's own, where parts are fixed."""
        return self._parts(workers)[worker]

    def _new_epoch(self, epoch: int) -> Tensor:
        return self._sent(random_stream(self._seed, epoch).permutation(self._examples))

    def _own_order(self, worker: int, workers: int, epoch: int) -> Tensor:
        kept = self._orders.get((worker, workers))
        if kept is None or kept[0] != epoch:
            random = random_stream(self._seed, worker, epoch, 1)
            kept = epoch, self._sent(random.permutation(self.part(worker, workers)))
            self._orders[worker, workers] = kept
        return kept[1]

    def _new_parts(self, workers: int) -> list[np.ndarray]:
        random = random_stream(self._seed, workers, 0, 0)
        order = random.permutation(self._examples)
        if self._labels is None or self._concentration is None:
            return [order[worker::workers] for worker in range(workers)]
        labels = self._labels.cpu().numpy()[order]
        classes = [order[labels == each] for each in np.unique(labels)]
        counts = class_counts(
            np.array([len(each) for each in classes]), workers, self._concentration, random
        )
        dealt = [np.split(c, n.cumsum()[:-1]) for c, n in zip(classes, counts.T, strict=True)]
        return [np.concatenate(own) for own in zip(*dealt, strict=True)]

    def _sent(self, order: np.ndarray) -> Tensor:
        return torch.from_numpy(order).to(self._device)


def class_counts(
    supply: np.ndarray, workers: int, concentration: float, random: np.random.Generator
) -> np.ndarray:
    """How many examples of each class each worker has, a row for each worker.

    All workers have equally many up to one, and all examples are dealt out. Each worker asks for
    classes in shares that it drew. Of a class that is asked for more than there is, the examples go
    by lot to those who asked. Who got too few asks again, among the classes that are left. Each
    turn ends a class or the dealing.
    """
    sizes = np.array([len(range(worker, supply.sum(), workers)) for worker in range(workers)])
    shares = random.dirichlet(np.full(len(supply), concentration), size=workers)
    counts = np.zeros((workers, len(supply)), dtype=np.int64)
    while (missing := sizes - counts.sum(axis=1)).any():
        left = supply - counts.sum(axis=0)
        wanted = shares * (left > 0)
        wanted[wanted.sum(axis=1) == 0] = left  # whose classes are all dealt takes what is there
        wanted /= wanted.sum(axis=1, keepdims=True)
        asked = random.multinomial(missing, wanted)
        for each in range(len(supply)):
            counts[:, each] += (
                asked[:, each]
                if asked[:, each].sum() <= left[each]
                else random.multivariate_hypergeometric(asked[:, each], left[each])
            )
    return counts


def random_stream(seed: int, *key: int) -> np.random.Generator:
    """Random numbers that are a function of seed and key alone."""
    return np.random.Generator(np.random.Philox(np.random.SeedSequence(seed, spawn_key=key)))

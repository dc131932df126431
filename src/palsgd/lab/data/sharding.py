"""Which examples are in which batch: a pure function of seed, worker, workers, index and the
changes of the number of workers."""

from functools import lru_cache
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from palsgd.lab.settings import check_sharding
from palsgd.lab.worker_changes import Change

Changes = tuple[Change, ...]


class Rest(NamedTuple):
    """What a change of the number of workers finds."""

    unseen: Tensor  # examples of the epoch under way (or epochs, of uneven workers), in order
    epoch: int  # the first one that no worker has begun


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

    Where the number of workers or their batch changes, what no worker has seen of the epoch under
    way is dealt out anew, and then the next epoch begins. Of fixed parts, each worker gets what is
    unseen in its new part.

    A worker takes its batches in turns: turn 0 is the rest that the last change left, turn 1 the
    first epoch that nobody had begun, and so on. Without a change turn 0 is empty.
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
        self._rest = lru_cache(maxsize=2)(self._new_rest)
        self._left = lru_cache(maxsize=64)(self._count_left)
        self._orders: dict[tuple[int, int], tuple[tuple[int, Changes], Tensor]] = {}

    def batch(
        self, *, worker: int, workers: int, size: int, index: int, changes: Changes = ()
    ) -> Tensor:
        """The examples in the `index`-th batch of a worker."""
        turn, place = self._place(worker, workers, size, index, changes)
        order = self._order(worker, workers, turn, changes)
        if self._sharding == "reshuffled":
            place = place * workers + worker
        return order[place * size : (place + 1) * size]

    def joint(self, *, workers: int, size: int, index: int) -> Tensor:
        """The same of all workers, a row for each."""
        if self._sharding != "reshuffled":
            own = (
                self.batch(worker=worker, workers=workers, size=size, index=index)
                for worker in range(workers)
            )
            return torch.stack(list(own))
        turn, place = self._place(0, workers, size, index, ())
        all_of_them = workers * size
        order = self._order(0, workers, turn, ())[place * all_of_them : (place + 1) * all_of_them]
        return order.view(workers, size)

    def _place(
        self, worker: int, workers: int, size: int, index: int, changes: Changes
    ) -> tuple[int, int]:
        """The turn of a batch, and its place among the worker's own of that turn."""
        batches = self._examples // workers // size  # of each worker in an epoch
        if batches == 0:
            raise ValueError(
                f"{self._examples} examples give each of {workers} workers "
                f"{self._examples // workers}, fewer than a batch of {size}; use a smaller batch, "
                "fewer workers or more data"
            )
        if not changes:
            turn, place = divmod(index, batches)
            return turn + 1, place
        index -= changes[-1].begins[worker]
        left = self.batches_left(worker, workers, size, changes)
        if index < left:
            return 0, index
        turn, place = divmod(index - left, batches)
        return turn + 1, place

    def batches_left(self, worker: int, workers: int, size: int, changes: Changes) -> int:
        """Those of a worker in its turn 0: from the last change to the end of the epoch that was
        under way."""
        return self._left(worker, workers, size, changes)

    def _count_left(self, worker: int, workers: int, size: int, changes: Changes) -> int:
        examples = len(self._order(worker, workers, 0, changes))
        return examples // size // (workers if self._sharding == "reshuffled" else 1)

    def _order(self, worker: int, workers: int, turn: int, changes: Changes) -> Tensor:
        """The examples of a turn in order: of all workers where they are reshuffled, which deal
        them out batch by batch, else the worker's own."""
        if self._sharding != "reshuffled":
            return self._own_order(worker, workers, turn, changes)
        rest = self._rest(changes)
        return rest.unseen if turn == 0 else self._epoch(rest.epoch + turn - 1)

    def part(self, worker: int, workers: int) -> np.ndarray:
        """The examples that are a worker's own, where parts are fixed."""
        return self._parts(workers)[worker]

    def _new_epoch(self, epoch: int) -> Tensor:
        return self._sent(random_stream(self._seed, epoch).permutation(self._examples))

    def _own_order(self, worker: int, workers: int, turn: int, changes: Changes) -> Tensor:
        kept, key = self._orders.get((worker, workers)), (turn, changes)
        if kept is None or kept[0] != key:
            rest, part = self._rest(changes), self.part(worker, workers)
            random = random_stream(self._seed, worker, rest.epoch + turn - 1, 1)
            if turn == 0:  # of the epoch that was under way, in another order than before
                random = random_stream(self._seed, worker, rest.epoch, workers, 2)
                part = part[np.isin(part, rest.unseen.cpu().numpy())]
            kept = key, self._sent(random.permutation(part))
            self._orders[worker, workers] = kept
        return kept[1]

    def _new_rest(self, changes: Changes) -> Rest:
        """What the workers before the last change had not seen."""
        if not changes:
            return Rest(torch.empty(0, dtype=torch.int64, device=self._device), 0)
        *earlier, last = changes
        before, (workers, _), (size, _) = tuple(earlier), last.workers, last.batch_size
        places = [
            self._place(worker, workers, size, taken, before)
            for worker, taken in enumerate(last.taken)
        ]
        unseen = self._unseen_of_all if self._sharding == "reshuffled" else self._unseen_of_each
        begun = max(turn for turn, _ in places)  # the last turn that one of them has begun
        found = torch.cat(unseen(places, workers, size, before))
        return Rest(found, self._rest(before).epoch + begun)

    def _unseen_of_all(
        self, places: list[tuple[int, int]], workers: int, size: int, changes: Changes
    ) -> list[Tensor]:
        """In the turns from that of the slowest worker to that of the fastest one."""
        turns, found = [turn for turn, _ in places], []
        for turn in range(min(turns), max(turns) + 1):
            order = self._order(0, workers, turn, changes)
            batches = len(order) // size // workers
            unseen = torch.ones(len(order), dtype=torch.bool, device=order.device)
            rows = unseen[: batches * workers * size].view(batches, workers, size)
            for worker, (own, place) in enumerate(places):
                rows[: place if own == turn else batches * (own > turn), worker] = False
            found.append(order[unseen])
        return found

    def _unseen_of_each(
        self, places: list[tuple[int, int]], workers: int, size: int, changes: Changes
    ) -> list[Tensor]:
        """By each worker in its own part, in its own epoch."""
        return [
            self._order(worker, workers, turn, changes)[place * size :]
            for worker, (turn, place) in enumerate(places)
        ]

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

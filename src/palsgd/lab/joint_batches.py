"""The batches of a simulated run: all workers' at once where the workload can, and ahead of time.

One call for all workers takes a few operations on the device, one call for each takes K times as
many, which for many workers is longer than a step. Where a workload makes each worker's by itself,
they are made for the worker that asks: workers that train one after another are a round apart, and
would make those of all of them K times. On a GPU the next batches are made by a thread while the
device computes. Runs that read the same data share their batches.
"""

from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cache, partial
from typing import Any
from weakref import WeakKeyDictionary, WeakSet, WeakValueDictionary

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from palsgd.lab.batch_order import BatchOrder
from palsgd.lab.settings import Settings
from palsgd.lab.workload import Workload

KEPT = 8  # batches of all workers at least for each run, as they may be some batches apart
PRESENT = 2  # batches at least: the present one and the next
ROOM = 256 * 2**20  # bytes for those of runs that are further apart, as some skip more gradients
ALL = -1  # in place of a worker: all of them

Make = Callable[[int], Any]  # of an index, the batches of all workers, or of one


@cache
def _thread() -> ThreadPoolExecutor:
    """One for all runs: Python would let several of them wait for each other."""
    return ThreadPoolExecutor(1, "batches")


class Shelf:
    """Batches by their index, each made once while there is room for it. With `ahead` a thread
    makes them."""

    def __init__(self, *, ahead: bool, kept: int, room: int):
        """So many are `kept` at least for each run, and more if they have `room`, in bytes."""
        self._made: OrderedDict[int, Future[Any]] = OrderedDict()
        self._ahead, self._kept, self._room = ahead, kept, room
        self.readers: WeakSet[JointBatches] = WeakSet()

    def batch(self, index: int, following: int, make: Make) -> Any:
        self._begin(index, make)
        if self._ahead:
            self._begin(following, make)
        try:
            found = self._made[index].result()
        except BaseException:
            del self._made[index]  # it may be made the next time, and its error holds much memory
            raise
        self._make_room(_bytes_of(found))
        return found

    def _begin(self, index: int, make: Make) -> None:
        if index in self._made:
            return
        if self._ahead:
            self._made[index] = _thread().submit(make, index)
        else:
            batch = make(index)
            self._made[index] = Future()
            self._made[index].set_result(batch)

    def _make_room(self, size: int) -> None:
        most = max(PRESENT, self._kept * len(self.readers), self._room // size if size else 0)
        while len(self._made) > most:
            self._made.popitem(last=False)


def _bytes_of(batch: Any) -> int:
    leaves = pytree.tree_leaves(batch)
    return sum(x.numel() * x.element_size() for x in leaves if isinstance(x, Tensor))


Shelves = WeakValueDictionary[tuple[int, int, int], Shelf]
# Of each workload, by the workers, the size of their batches and whose they are, as long as a run
# reads them.
_shelves: WeakKeyDictionary[Workload, Shelves] = WeakKeyDictionary()


class JointBatches:
    """`data` for a simulation: called with a worker, it gives that worker's batches."""

    def __init__(self, settings: Settings, workload: Workload):
        self._settings, self._workload = settings, workload
        self._order = BatchOrder(settings)
        self._shelf = self._shelf_of(ALL, kept=KEPT, room=ROOM)
        self._own: list[Shelf] = []  # of each worker, if the workload makes them by themselves

    def _shelf_of(self, whose: int, *, kept: int, room: int) -> Shelf:
        """The one that other runs have too."""
        shelves = _shelves.setdefault(self._workload, WeakValueDictionary())
        new = Shelf(ahead=self._workload.device.type == "cuda", kept=kept, room=room)
        found = shelves.setdefault((self._settings.workers, self._settings.batch_size, whose), new)
        found.readers.add(self)
        return found

    def __call__(self, worker: int) -> "WorkerBatches":
        return WorkerBatches(self, worker)

    def batch(self, worker: int, index: int) -> Any:
        joint = self.joint(index)
        if joint is None:
            make = partial(self._workload.batch, worker=worker)
            found = self._from(self._own[worker], index, make)
            # a copy, as a loss may change its batch in place, and another run reads it too
            return pytree.tree_map_only(Tensor, torch.clone, found)
        return pytree.tree_map_only(Tensor, lambda x: x[worker], joint)

    def joint(self, index: int) -> Any:
        """The batches of all workers as one; None: the workload makes each by itself."""
        if self._own:
            return None
        found = self._from(self._shelf, index, self._workload.joint_batch)
        if found is None:
            workers = self._settings.workers
            self._own = [self._shelf_of(k, kept=0, room=ROOM // workers) for k in range(workers)]
        return found

    def _from(self, shelf: Shelf, index: int, make: Callable[..., Any]) -> Any:
        return shelf.batch(self._order(index), self._order(index + 1), partial(self._new, make))

    def _new(self, make: Callable[..., Any], index: int) -> Any:
        settings = self._settings
        return make(workers=settings.workers, size=settings.batch_size, index=index)


class WorkerBatches:
    """The batches of one worker, by their index, so that a run goes on at any of them at once."""

    def __init__(self, joint: JointBatches, worker: int):
        self._joint, self._worker = joint, worker
        self._index = 0

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        index, self._index = self._index, self._index + 1
        return self._joint.batch(self._worker, index)

    @property
    def joint_place(self) -> tuple[JointBatches, int]:
        """What makes the next batches of all workers as one, and which they are."""
        return self._joint, self._index

    def pass_by(self) -> None:
        self._index += 1

    def state_dict(self) -> dict[str, int]:
        return {"index": self._index}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        self._index = state["index"]

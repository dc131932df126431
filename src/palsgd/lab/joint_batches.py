"""The batches of a simulated run: all workers' at once where the workload can, and ahead of time.

One call for all workers takes a few operations on the device, one call for each takes K times as
many, which for many workers is longer than a step. On a GPU the next batches are made by a thread
while the device computes.
"""

from collections import OrderedDict
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from torch import Tensor
from torch.utils import _pytree as pytree

from palsgd.lab.batch_order import BatchOrder
from palsgd.lab.settings import Settings
from palsgd.lab.workload import Workload

KEPT = 8  # indices, as workers may be some batches apart


class JointBatches:
    """`data` for a simulation: called with a worker, it gives that worker's batches."""

    def __init__(self, settings: Settings, workload: Workload):
        self._settings, self._workload = settings, workload
        self._order = BatchOrder(settings)
        self._made: OrderedDict[int, Future[Any]] = OrderedDict()
        gpu = workload.device.type == "cuda"
        self._thread = ThreadPoolExecutor(1) if gpu else None

    def __call__(self, worker: int) -> "WorkerBatches":
        return WorkerBatches(self, worker)

    def batch(self, worker: int, index: int) -> Any:
        joint = self.joint(index)
        if joint is None:
            return self._workload.batch(
                worker=worker,
                workers=self._settings.workers,
                size=self._settings.batch_size,
                index=self._order(index),
            )
        return pytree.tree_map_only(Tensor, lambda x: x[worker], joint)

    def joint(self, index: int) -> Any:
        """The batches of all workers as one; None: the workload makes each by itself."""
        if index not in self._made:
            self._begin(index)
        if self._thread is not None and index + 1 not in self._made:
            self._begin(index + 1)
        return self._made[index].result()

    def _begin(self, index: int) -> None:
        if self._thread is None:
            self._made[index] = Future()
            self._made[index].set_result(self._new(index))
        else:
            self._made[index] = self._thread.submit(self._new, index)
        while len(self._made) > KEPT:
            self._made.popitem(last=False)

    def _new(self, index: int) -> Any:
        settings = self._settings
        return self._workload.joint_batch(
            workers=settings.workers, size=settings.batch_size, index=self._order(index)
        )


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

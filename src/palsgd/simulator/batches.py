"""The batches of one worker, with errors that name the worker."""

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from palsgd.feed import END


class DryError(ValueError):
    """A worker's data ended before its training."""


class Batches:
    """The batches of one worker. At the end of a list or loader they start again from its
    beginning.

    The place in them can be saved. Data with `state_dict` and `load_state_dict` say themselves
    where they are. Of other data the passes are counted and the batches of the present pass, which
    are drawn again: a pass depends on the random numbers with which it begins, as a loader shuffles
    then, so their state is kept too.
    """

    def __init__(self, data: Callable[[int], Iterable[Any]], worker: int):
        self._source: Any = data(worker)
        self._worker = worker
        self._iterator: Iterator[Any] = iter(self._source)
        self._taken = 0
        self._pass, self._in_pass = 0, 0  # which pass it is, and its batches so far
        self._rng = torch.get_rng_state()  # before the first batch of this pass
        self._held: list[Any] | None = None
        self._place_of_held: dict[str, Any] = {}

    def peek(self) -> Any:
        """The next batch. The following call of `next` returns it too."""
        if self._held is None:
            self._place_of_held = self.state()
            self._held = [self.next()]
        return self._held[0]

    @property
    def joint_place(self) -> tuple[Any, Any] | None:
        """Of data that have the batches of all workers as one: what makes them, and the place of
        the next one. None: the next batch must be asked for by itself."""
        return None if self._held is not None else getattr(self._source, "joint_place", None)

    def pass_by(self) -> None:
        """Count a batch that was taken together with those of the other workers."""
        self._source.pass_by()
        self._taken += 1
        self._in_pass += 1

    def next(self) -> Any:
        if self._held is not None:
            (batch,), self._held = self._held, None
            return batch
        if self._in_pass == 0:
            self._rng = torch.get_rng_state()
        try:
            batch = next(self._iterator)
        except StopIteration:
            batch = self._again()
        self._taken += 1
        self._in_pass += 1
        return batch

    def _again(self) -> Any:
        self._pass, self._in_pass, self._rng = self._pass + 1, 0, torch.get_rng_state()
        # iter() of an iterator is that iterator, which has ended
        self._iterator = iter(self._source)
        try:
            return next(self._iterator)
        except StopIteration:
            raise DryError(
                f"the data of worker {self._worker} ran dry after {self._taken} batches; let "
                "data(worker) return an endless iterator, or a list or loader that can start over"
            ) from None

    # -- the place in the data -------------------------------------------------------------------

    def state(self) -> dict[str, Any]:
        """The place of the batch that `next` returns next."""
        if self._held is not None:
            return self._place_of_held
        own = self._source.state_dict() if self._has_state else None
        found = {"taken": self._taken, "pass": self._pass, "in_pass": self._in_pass}
        return found | {"rng": self._rng, "own": own}

    @property
    def _has_state(self) -> bool:
        return hasattr(self._source, "state_dict") and hasattr(self._source, "load_state_dict")

    def load(self, saved: dict[str, Any]) -> None:
        """Go to a saved place, from the beginning of the data or from the first batch."""
        self._held = None
        if saved["own"] is not None and self._has_state:
            self._source.load_state_dict(saved["own"])
            self._iterator = iter(self._source)
        else:
            self._draw_again(saved)
        self._taken, self._rng = saved["taken"], saved["rng"].clone()
        self._pass, self._in_pass = saved["pass"], saved["in_pass"]

    def _draw_again(self, saved: dict[str, Any]) -> None:
        """Leave out the batches of the saved pass that are taken."""
        with torch.random.fork_rng(devices=[]):
            torch.set_rng_state(saved["rng"])
            if saved["pass"] != self._pass:
                self._iterator, self._in_pass = iter(self._source), 0
            for _ in range(saved["in_pass"] - self._in_pass):
                if next(self._iterator, END) is END:
                    raise ValueError(
                        f"the checkpoint has taken {saved['in_pass']} batches of worker "
                        f"{self._worker} in one pass, and its data have fewer; give the data with "
                        "which the simulation began, or another checkpoint folder"
                    )


def moved(batch: Any, device: torch.device) -> Any:
    return pytree.tree_map_only(Tensor, lambda t: t.to(device, non_blocking=True), batch)


def sent(values: Tensor, device: torch.device | str) -> Tensor:
    """A copy on the device, from pinned memory. For a copy from ordinary memory the host would wait
    until the device has made it, and could not prepare the next step in that time."""
    if torch.device(device).type != "cuda":
        return values.to(device)
    return values.pin_memory().to(device, non_blocking=True)


def check_loss(loss: Any, worker: int | None, step: int) -> None:
    whose = "" if worker is None else f" of worker {worker}"
    if not isinstance(loss, Tensor) or loss.numel() != 1:
        kind = f"shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else type(loss).__name__
        raise ValueError(
            f"the loss{whose} at gradient step {step} must be one number, got {kind}; "
            "reduce it, for instance with .mean()"
        )

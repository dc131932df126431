"""The loader that a run takes its batches from, and the place it has reached in it."""

from collections.abc import Iterator
from typing import Any

from palsgd.checks import in_error

END = object()  # returned in place of a batch by a loader that has none


class Feed:
    """Passes over a loader, one after another. A run in stages goes on where it stopped."""

    def __init__(self) -> None:
        self._loader: Any = None
        self._pass: Iterator[Any] | None = None  # the pass that has begun; None between two
        self._saved: Any = None  # the state of a loader, for the one that comes next

    def next(self, loader: Any, progress: Any) -> Any:
        """The next batch, or END if a whole pass gave none. `progress.epoch` counts the passes that
        are over."""
        if self._loader is not loader:
            self._change(loader, progress)
        while True:
            whole = False
            if self._pass is None:
                whole = self._begin(progress.epoch)
            assert self._pass is not None
            batch = next(self._pass, END)
            if batch is not END or whole:
                return batch
            self._pass = None
            progress.epoch += 1

    def _change(self, loader: Any, progress: Any) -> None:
        """Take another loader. A pass that was not finished counts as one."""
        if self._pass is not None:
            progress.epoch += 1
        self._loader, self._pass = loader, None

    def _begin(self, epoch: int) -> bool:
        """Begin a pass. False if the loader goes on inside one that a saved state was taken in."""
        set_epoch(self._loader, epoch)
        saved, self._saved = self._saved, None
        resumes = saved is not None and _has_state(self._loader)
        if resumes:
            self._loader.load_state_dict(saved)
        try:
            self._pass = iter(self._loader)
        except TypeError as error:
            raise ValueError(
                f"loader={in_error(self._loader)} has no batches ({error}); give a DataLoader or a "
                "list of batches"
            ) from error
        return not resumes

    def state(self) -> Any:
        """The state of the loader; None if it has none of its own."""
        if self._loader is None or not _has_state(self._loader):
            return self._saved
        return self._loader.state_dict()

    def resume(self, saved: Any) -> None:
        """Begin anew, with a loader that gets this state."""
        self._loader, self._pass, self._saved = None, None, saved


def _has_state(loader: Any) -> bool:
    """Can the loader be saved and resumed? accelerate's loaders have the two functions also where
    what is inside them has not."""
    named = hasattr(loader, "state_dict") and hasattr(loader, "load_state_dict")
    return named and getattr(loader, "use_stateful_dataloader", True)


def set_epoch(loader: Any, epoch: int) -> None:
    """Tell every part of a loader that shuffles by the epoch which one it is."""
    parts: list[Any] = []
    for each in _loaders(loader):
        batch_sampler = getattr(each, "batch_sampler", None)
        parts += [each, getattr(each, "dataset", None), getattr(each, "sampler", None)]
        parts += [batch_sampler, getattr(batch_sampler, "sampler", None)]
    for part in {id(part): part for part in parts}.values():
        tell = getattr(part, "set_epoch", None)
        if callable(tell):
            tell(epoch)


def _loaders(loader: Any) -> list[Any]:
    """Itself and all that it wraps and iterates over: a progress bar or a prefetcher around a
    DataLoader hides its samplers, which would then deal every epoch alike."""
    found = [loader]
    for each in found:
        inside = list(getattr(each, "__dict__", {}).values())
        found += [part for part in inside if _may_wrap(part) and not _among(part, found)]
    return found


def _may_wrap(part: Any) -> bool:
    iterates = hasattr(part, "__iter__") and hasattr(part, "__dict__")
    return iterates and not isinstance(part, type)


def _among(part: Any, others: list[Any]) -> bool:
    return any(part is other for other in others)  # == of two tensors compares their elements
